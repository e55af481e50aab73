from pathlib import Path

from tests.cases.rows import marked_rows


def check(folder: Path, output: str) -> None:
    """An empty answer trains the end of the turn alone."""
    assert len(marked_rows(folder, "c")) == 1
    chat = "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n[[<|im_end|>]]\n"
    assert marked_rows(folder, "c_rows")[1] == marked_rows(folder, "c_alpaca")[1] == chat
    assert marked_rows(folder, "c_pairs") == ["the cat[[ runs<|im_end|>]]", "the dog[[<|im_end|>]]"]
