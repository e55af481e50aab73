from pathlib import Path

from tests.cases.rows import marked_rows


def check(folder: Path, output: str) -> None:
    rows = marked_rows(folder, "c")
    assert len(rows) == 6
    assert all(row.startswith("<|im_start|>user\n") for row in rows)
