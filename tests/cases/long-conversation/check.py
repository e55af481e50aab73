from pathlib import Path

from tests.cases.rows import marked_rows


def check(folder: Path, output: str) -> None:
    turn = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[[a<|im_end|>]]\n"
    assert marked_rows(folder, "c") == [turn * 2000]
