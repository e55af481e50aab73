from pathlib import Path

from tests.cases.rows import marked_rows


def check(folder: Path, output: str) -> None:
    first, second = "the cat runs\nover a hill", "the dog sees seven small green birds that sing while rain falls"
    documents = _text(marked_rows(folder, "c"))
    assert documents[0] == f"{first}<|endoftext|>"
    assert len(documents) > 2 and documents[1].startswith(second[:20]) and documents[-1].endswith("<|endoftext|>")
    assert not any(document.endswith("<|endoftext|>") for document in documents[1:-1])
    assert _text(marked_rows(folder, "c_notes")) == ["# birds\n\nthe birds sing<|endoftext|>"]
    assert _text(marked_rows(folder, "c_mac")) == ["one\ntwo<|endoftext|>", "three<|endoftext|>"]
    assert len(marked_rows(folder, "c_cut")) == 2


def _text(rows: list[str]) -> list[str]:
    return [row.replace("[[", "").replace("]]", "") for row in rows]
