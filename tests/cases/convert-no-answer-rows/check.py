from pathlib import Path

from tests.cases.rows import marked_rows


def check(folder: Path, output: str) -> None:
    rows = marked_rows(folder, "c")
    assert len(rows) == 4
    assert rows[1] == "[[<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n]]"
