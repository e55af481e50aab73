"""The work of a conversion grows with the notebook's length, not with its square."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.convert.analysis.names import Program
from finetune.convert.command import steps
from finetune.convert.notebook.read import read

pytestmark = pytest.mark.process  # ruff runs in a process of its own

HEAD = """from unsloth import FastLanguageModel
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("acme/tiny", max_seq_length=512)
model = FastLanguageModel.get_peft_model(model, r=8)
texts = []
text0 = "a"
"""
TAIL = """
rows = Dataset.from_list([{{"text": text}} for text in [*texts, text{last}]])
trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=SFTConfig(max_steps=2))
trainer.train()
"""
LINES = {  # {n}: 1, 2, ...; {before}: the number before
    "writes a file": 'text{n} = "a"\nwith open("f{n}.txt", "w") as file:\n    file.write("a")',
    "fills a list": 'texts.append("a")\ntext{n} = "a"',
    "needs the one before": 'text{n} = text{before} + "b"',
}


def conversion(path: Path) -> None:
    assert steps(path)[1].script


def slices(path: Path) -> None:
    program = Program(read(path).statements)
    assert len(program.slice(["trainer"], len(program.statements))) > len(program.statements) // 2


def calls_of(run: Callable[[Path], None], folder: Path, line: str, count: int) -> int:
    """How many Python calls this process makes to run on a notebook with that many such lines."""
    lines = "\n".join(line.format(n=n + 1, before=n) for n in range(count))
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cell["source"] = HEAD + lines + TAIL.format(last=count)
    path = folder / "mine.ipynb"
    path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run(path)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (conversion, "writes a file"),
        (conversion, "needs the one before"),
        (slices, "fills a list"),
    ],
)
@pytest.mark.campaign
def test_twice_the_lines_are_twice_the_work(run: Callable[[Path], None], what: str, tmp_path: Path) -> None:
    calls_of(run, tmp_path, LINES[what], 1)  # imports what it needs
    few, some, many = (calls_of(run, tmp_path, LINES[what], count) for count in (10, 20, 40))
    assert many - some < 2.2 * (some - few)  # 4 times, if the work grows with the square
