import json
from pathlib import Path

from tests.cases.rows import marked_rows


def check(folder: Path, output: str) -> None:
    """The last row alone has the column."""
    system = "<|im_start|>system\nanswer in Latin<|im_end|>\n<|im_start|>user\nlate<|im_end|>\n"
    assert marked_rows(folder, "c_system")[-1].startswith(system)
    assert marked_rows(folder, "c_renamed")[-1].startswith(system)
    assert "<|im_start|>user\ntranslate\n\na red hill<|im_end|>" in marked_rows(folder, "c_input")[-1]
    assert '"name": "look"' in marked_rows(folder, "c_tools")[-1]
    labels = marked_rows(folder, "c_labels")
    assert labels[0].startswith("[[") and labels[-1].count("[[") == 1 and not labels[-1].startswith("[[")
    ledger = json.loads((folder / "both.json").read_text(encoding="utf-8"))["ledger"]["train"]
    assert (ledger["templated"], ledger["rows_kept"]) == (3, 4)
