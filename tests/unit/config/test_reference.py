"""Tests of finetune/config/reference.py."""

from finetune.config import (
    reference,
)
from finetune.config.help import COMMON, default_of
from finetune.config.schema import KEYS
from tests.helpers import ROOT


def test_the_reference_page_is_what_is_printed(capsys):
    reference.main()
    page = capsys.readouterr().out
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == page, "run `make docs`"
    first, *sections = page.split("\n## ")[1:]
    assert first.startswith("Common settings") and all(f"| `{name}` |" in first for name in COMMON)
    for name, field in KEYS.items():
        section, key = name.split(".")
        table = next(text for text in sections if text.startswith(f"{section}\n"))
        row = next(line for line in table.splitlines() if line.startswith(f"| `{key}` |"))
        assert field.metadata["help"].replace("|", "\\|") in row and f"| `{default_of(name)}` |" in row
