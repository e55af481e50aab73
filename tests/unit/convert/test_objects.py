"""Several trainings: what the refusal advises depends on the objects, not on their names."""
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
    "by another name": ("t = SFTTrainer(model)\nt.train()\nagain = t\nagain.train()", SAME),
    "in a function, of the module": ("t = SFTTrainer(model)\nt.train()\ndef f():\n    t.train()\nf()", SAME),
    "given to a function": ("t = SFTTrainer(model)\nt.train()\ndef f(x):\n    x.train()\nf(t)", SAME),
    "an attribute, in two methods": (
        "class A:\n    def a(self):\n        self.t = SFTTrainer(model)\n        self.t.train()\n    def b(self):\n        self.t.train()",
        UNKNOWN,
    ),
    "changed for responses": (
        "t = SFTTrainer(model)\nt = train_on_responses_only(t)\nt.train()\nt.train()",
        SAME,
    ),
    "one name, two objects": (f"t = SFTTrainer(model)\nt.train()\ntwo = {NEW}\nt = {TWO}\nt.train()", SPLIT),
    "one name under a condition": (
        f"two = {NEW}\nt = SFTTrainer(model)\nt.train()\nif True:\n    t = {TWO}\nt.train()",
        SPLIT,
    ),
    "two functions": (
        f"def a():\n    t = SFTTrainer(model)\n    t.train()\ndef b():\n    two = {NEW}\n    t = {TWO}\n    t.train()\na()\nb()",
        SPLIT,
    ),
    "the module and a function": (
        f"t = SFTTrainer(model)\nt.train()\ndef f():\n    two = {NEW}\n    t = {TWO}\n    t.train()\nf()",
        SPLIT,
    ),
    "a function with one before it": (
        f"t = None\ndef f():\n    t = SFTTrainer(model)\n    t.train()\n    two = {NEW}\n    t = {TWO}\n    t.train()\nf()",
        SPLIT,
    ),
    "two attributes": (
        f"two = {NEW}\nbox = Box()\nbox.a = SFTTrainer(model)\nbox.b = {TWO}\nbox.a.train()\nbox.b.train()",
        SPLIT,
    ),
    "two entries": (
        f"two = {NEW}\nt = {{}}\nt['a'] = SFTTrainer(model)\nt['b'] = {TWO}\nt['a'].train()\nt['b'].train()",
        SPLIT,
    ),
    "two classes": (
        "class A:\n    def go(self):\n        self.t = SFTTrainer(model)\n        self.t.train()\n"
        f"class B:\n    def go(self):\n        self.t = SFTTrainer({NEW})\n        self.t.train()\nA().go()\nB().go()",
        SPLIT,
    ),
    "one trains twice, another once": (
        f"t = SFTTrainer(model)\nt.train()\ndef f():\n    two = {NEW}\n    t = {TWO}\n    t.train()\nf()\nt.train()",
        SPLIT,
    ),
    "the same model, in a function": (
        "t = SFTTrainer(model)\nt.train()\ndef f():\n    t = SFTTrainer(model=model)\n    t.train()\nf()",
        SPLIT,
    ),
    "the same model, with an adapter": (
        "model = get_peft_model(model, LoraConfig())\nt = SFTTrainer(model)\nt.train()\nt = SFTTrainer(model=t.model)\nt.train()",
        SPLIT,
    ),
    "created in a function by global": (
        f"def f(m):\n    global t\n    t = SFTTrainer(m)\nf(model)\nt.train()\nf({NEW})\nt.train()",
        UNKNOWN,
    ),
    "of a list": (f"ts = [SFTTrainer(model), SFTTrainer({NEW})]\nts[0].train()\nts[1].train()", SPLIT),
}


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_the_advice_for_several_trainings_depends_on_the_objects(case: str, tmp_path: Path) -> None:
    code, advice = CASES[case]
    cell = {"cell_type": "code", "source": START + code, "outputs": [], "metadata": {}}
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}))
    outcome = convert(path)
    assert outcome.code == "R2"
    _, _, found = outcome.reason.partition("); ")
    assert found.startswith(advice)
