"""Numbers with their noun: one row, not 1 rows and not 1 row(s)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import finetune
from finetune.text import counted


def test_a_number_and_its_noun() -> None:
    assert [counted(n, "row") for n in (0, 1, 2, 6027)] == ["0 rows", "1 row", "2 rows", "6,027 rows"]
    assert counted(1.0, "step") == "1 step" and counted(1234.6, "step") == "1,235 steps"
    assert counted(1, "process", "processes") == "1 process" and counted(3, "process", "processes") == "3 processes"


def test_no_message_leaves_the_plural_to_the_reader() -> None:
    for path in Path(finetune.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search(r"\w\(s\)", node.value), f"{path.name}:{node.lineno}: {node.value[:80]}"
