"""Where a script reads and saves what the notebook has on a hosted service."""
# ruff: noqa: E501  (cells stand as they do in notebooks)

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from finetune.convert.notebook.read import read
from finetune.convert.prepare.files import in_working_folder

TRAIN = "trainer.train()\n"
DRIVE = "/content/drive/MyDrive"

# A notebook -> its paths afterwards.
CASES = {
    "an export": (f'{TRAIN}model.save_pretrained("{DRIVE}/birds")', ["birds"]),
    "a keyword": (f'{TRAIN}model.save_pretrained(save_directory="/kaggle/working/birds/")', ["birds/"]),
    "a name": (f'HOME = "/content/birds"\n{TRAIN}model.save_pretrained(f"{{HOME}}/merged")', ["birds", "/merged"]),
    "a folder itself": (
        f'HOME = os.path.join("/kaggle/working", "birds")\nSFTConfig(output_dir=HOME)\n{TRAIN}',
        [".", "birds"],
    ),
    "a Path": (
        f'HOME = Path("/content") / "birds"\nHOME.mkdir()\nSFTConfig(output_dir=str(HOME))\n{TRAIN}',
        [".", "birds"],
    ),
    "a sum": (f'{TRAIN}model.save_pretrained("/content/" + name)', ["./"]),
    "an f-string": (f'{TRAIN}model.save_pretrained(f"/content/drive/My Drive/{{name}}")', ["./"]),
    "a table": (
        f'CONFIG = {{"out": "/content/out", "data": "/content/rows"}}\nload(CONFIG["data"])\nSFTConfig(output_dir=CONFIG["out"])\n{TRAIN}',
        ["out", "out", "rows", "data", "data", "out"],
    ),
    "a class": (f'class CFG:\n    output_dir = "/kaggle/working/out"\n{TRAIN}', ["out"]),
    "a default": (f'def save(path="/content/out"):\n    model.save_pretrained(path)\n{TRAIN}save()', ["out"]),
    "an argument": (f'def save(path):\n    model.save_pretrained(path)\n{TRAIN}save("/content/out")', ["out"]),
    "a returned path": (f'def home():\n    return "/content/out"\nSFTConfig(output_dir=home())\n{TRAIN}', ["out"]),
    "loaded again after the training": (
        f'SFTConfig(output_dir="/content/out")\n{TRAIN}load("/content/out/checkpoint-5")',
        ["out", "out/checkpoint-5"],
    ),
    "a plot": (f'{TRAIN}plt.savefig("/content/loss.png")', ["loss.png"]),
    "a copy to Drive": (
        f'SFTConfig(output_dir="/content/out")\n{TRAIN}shutil.copytree("/content/out", "{DRIVE}/out")',
        ["out", "out", "drive/MyDrive/out"],
    ),
    "rows": (f'load("{DRIVE}/rows.csv")\n{TRAIN}', ["rows.csv"]),
    "rows by two names": ('table.to_json("rows.jsonl")\nread("/content/rows.jsonl")', ["rows.jsonl"] * 2),
    "another file's name": (
        'os.chdir("/tmp")\ntable.to_json("rows.jsonl")\nread("/content/rows.jsonl")',
        ["/tmp", "rows.jsonl", "/content/rows.jsonl"],
    ),
    "rows beside results": (
        f'load("{DRIVE}/x/rows.csv")\n{TRAIN}model.save_pretrained("{DRIVE}/x/out")',
        ["x/rows.csv", "x/out"],
    ),
    "rows and results by one name": (
        f'HOME = "{DRIVE}"\nload(f"{{HOME}}/rows.csv")\n{TRAIN}model.save_pretrained(f"{{HOME}}/out")',
        [".", "/rows.csv", "/out"],
    ),
    "rows in the folder of the results": (
        f'load("/content/x/rows.csv")\nSFTConfig(output_dir="/content/x")\n{TRAIN}',
        ["x/rows.csv", "x"],
    ),
    "a file that is written and read": (
        f'rows.to_json("/content/rows.json")\nload("/content/rows.json")\n{TRAIN}',
        ["rows.json"] * 2,
    ),
    "a file in a folder that is read before": (
        f'rows.to_json("/content/d/rows.json")\nload("/content/d")\n{TRAIN}',
        ["d/rows.json", "d"],
    ),
    "texts that only begin alike": (
        'read(\'/content/a.jsonl\', "/content/a.jsonl.gz", "x/content/a.jsonl")',
        ["a.jsonl", "a.jsonl.gz", "x/content/a.jsonl"],
    ),
    "another service's input": (f'{TRAIN}model.save_pretrained("/kaggle/input/x")', ["/kaggle/input/x"]),
    "the middle of a text": (f'{TRAIN}model.save_pretrained(name + "/content/x")', ["/content/x"]),
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_saved_below_the_working_folder(case: str, tmp_path: Path) -> None:
    code, paths = CASES[case]
    cell = {"cell_type": "code", "source": code, "outputs": [], "metadata": {}}
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}))
    notebook = read(path)
    before = [statement.source for statement in notebook.statements]
    notes = in_working_folder(notebook)
    nodes = [node for one in notebook.statements for node in ast.walk(one.node)]
    texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    assert sorted(texts) == sorted(paths)
    assert bool(notes) == (before != [statement.source for statement in notebook.statements])
