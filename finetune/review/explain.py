"""The rules in words: `finetune review --explain RULE`."""

from __future__ import annotations

import shutil
import textwrap

from finetune.errors import UserError
from finetune.review.rules import EXPLANATIONS

WIDTH = 100  # characters of a line, or as many as a narrower terminal has


def rule(name: str) -> str:
    """A rule for a terminal.

    Raises:
        UserError: there is no such rule.
    """
    if name not in EXPLANATIONS:
        raise UserError(f"unknown rule: {name}. The rules are {', '.join(EXPLANATIONS)}.")
    one = EXPLANATIONS[name]
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    parts = [
        f"{heading}\n{textwrap.fill(text, width, initial_indent='  ', subsequent_indent='  ', break_on_hyphens=False)}"
        for heading, text in one.parts().items()
    ]
    return "\n\n".join([f"{name}: {one.question}", *parts])
