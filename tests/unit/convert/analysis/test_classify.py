"""Several trainings: what the refusal advises depends on how many trainers there are, not on their names."""
# ruff: noqa: E501  (cells stand as they do in notebooks)

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.convert.command import convert

START = """from transformers import AutoModelForCausalLM
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("acme/one")
"""
NEW, TWO = 'AutoModelForCausalLM.from_pretrained("acme/two")', "SFTTrainer(two)"
SAME = "the same trainer trains again, from the trained weights: keep one call, with more num_train_epochs"
SPLIT = "split it into one notebook each, with the cells that each one needs; if one starts from the model"
UNKNOWN = "split it into one notebook each, with the cells that each one needs; if one trainer trains again, from"

# What follows START -> the advice.
CASES = {
    "called twice": ("t = SFTTrainer(model)\nt.train()\nt.train()", SAME),
    "in a function, of the module": ("t = SFTTrainer(model)\nt.train()\ndef f():\n    t.train()\nf()", SAME),
    "an attribute, in two methods": (
        "class A:\n    def a(self):\n        self.t = SFTTrainer(model)\n        self.t.train()\n    def b(self):\n        self.t.train()",
        UNKNOWN,
    ),
    "one name, two objects": (f"t = SFTTrainer(model)\nt.train()\ntwo = {NEW}\nt = {TWO}\nt.train()", SPLIT),
    "the same model, in a function": (
        "t = SFTTrainer(model)\nt.train()\ndef f():\n    t = SFTTrainer(model=model)\n    t.train()\nf()",
        SPLIT,
    ),
    "of a list": (f"ts = [SFTTrainer(model), SFTTrainer({NEW})]\nts[0].train()\nts[1].train()", SPLIT),
}


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_the_advice_for_several_trainings_depends_on_the_trainers(case: str, tmp_path: Path) -> None:
    code, advice = CASES[case]
    cell = {"cell_type": "code", "source": START + code, "outputs": [], "metadata": {}}
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}))
    outcome = convert(path)
    assert outcome.code == "R2"
    _, _, found = outcome.reason.partition("); ")
    assert found.startswith(advice)
