from pathlib import Path

from tests.cases.rows import marked_rows


def check(folder: Path, output: str) -> None:
    earlier = "<|im_start|>user\nwhat color?<|im_end|>\n<|im_start|>assistant\n[[red<|im_end|>]]\n"
    assert marked_rows(folder, "c_history")[0] == (
        f"{earlier}<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n[[blue<|im_end|>]]\n"
    )
    assert marked_rows(folder, "c_system")[0].startswith("<|im_start|>system\nbe brief<|im_end|>\n")
    plain = marked_rows(folder, "c_plain")[0]
    assert "### Instruction:\nwhat color?\n\n### Response:\nred\n\n" in plain
    assert plain.endswith("### Response:\n[[blue<|im_end|>]]")
    assert output.count("'source'") == 1
