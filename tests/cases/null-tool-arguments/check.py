from pathlib import Path

from tests.cases.rows import marked_rows


def check(folder: Path, output: str) -> None:
    call = '[[<call>{"name": "look", "arguments": {"limit": null, "a": "x"}}</call><|im_end|>]]'
    as_object, as_text = marked_rows(folder, "c")
    assert call in as_object and call in as_text
    (optional,) = marked_rows(folder, "c_optional")
    assert '<call>{"name": "look", "arguments": {"where": {"x": null, "y": [null, 1]}}}</call>' in optional
    assert '"where": {"default": null, "enum": [null, 1]}' in optional
