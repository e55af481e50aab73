"""The names of a file: its path on a hosted service, and what a path expression may stand for."""

from __future__ import annotations

import ast

import pytest

from finetune.convert.notebook.files import hosted_names, renamed

WRITES = 'table.to_json("rows.jsonl")'
READS = 'rows = read("/content/rows.jsonl")'


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        ([WRITES, READS], {"/content/rows.jsonl": "rows.jsonl"}),
        (['table.to_json("/content/rows.jsonl")', 'read("rows.jsonl")'], {"/content/rows.jsonl": "rows.jsonl"}),
        (['to = "./b.csv"\ntable.to_csv(to)', 'read("/kaggle/working/b.csv")'], {"/kaggle/working/b.csv": "./b.csv"}),
        (['rows.save_to_disk("rows")', 'load("/content/rows")'], {"/content/rows": "rows"}),
        ([WRITES, 'read("/content/drive/MyDrive/rows.jsonl")'], {}),  # another folder
        (['read("rows.jsonl")', READS], {}),  # nothing is written
        ([WRITES, 'os.chdir("/tmp")', READS], {}),
        ([WRITES, "%cd data", READS], {}),
    ],
)  # fmt: skip
def test_a_path_on_a_hosted_service_is_the_file_that_is_written(sources: list[str], names: dict[str, str]) -> None:
    python = [ast.parse(source) for source in sources if not source.startswith("%")]
    assert hosted_names("\n".join(sources), python) == names


def test_only_whole_literals_are_renamed() -> None:
    names = {"/content/rows.jsonl": "rows.jsonl"}
    text = """read('/content/rows.jsonl', "/content/rows.jsonl", "/content/rows.jsonl.gz", "x/content/rows.jsonl")"""
    assert ast.literal_eval(renamed(text, names).removeprefix("read")) == (
        "rows.jsonl",
        "rows.jsonl",
        "/content/rows.jsonl.gz",
        "x/content/rows.jsonl",
    )
