from pathlib import Path

from tests.cases.rows import marked_rows


def check(folder: Path, output: str) -> None:
    documents = "".join(marked_rows(folder, "c")).replace("[[", "").replace("]]", "")
    assert documents == "the cat runs<|im_end|>the dog sees seven small green birds<|im_end|>"
    # Rows are as in TRL, which appends EOS as text and then lets the tokenizer add its own.
    assert marked_rows(folder, "c_rows") == ["[[the cat<|im_end|><|im_end|>]]"]
