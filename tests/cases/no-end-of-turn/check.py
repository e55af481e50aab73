import json
from pathlib import Path


def check(folder: Path, output: str) -> None:
    """Every answer ends after the trained text."""
    answers = [one["answer"] for one in json.loads((folder / "answers.json").read_text())["answers"]]
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [one["text"] for one in answers] == [row["messages"][1]["content"] for row in rows]
    assert all(one["finished"] for one in answers)
