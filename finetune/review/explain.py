"""The rules in words: `finetune review --explain RULE`, and docs/review-rules.md (`make docs`)."""

from __future__ import annotations

import shutil
import sys
import textwrap

from finetune.errors import UserError
from finetune.review.rules import EXPLANATIONS

WIDTH = 100  # characters of a line, or as many as a narrower terminal has
GROUPS = {
    "Where does the time go?": (
        *("data-wait", "straggler", "communication", "padding", "host-bound", "small-batch", "evaluation-share"),
        "throttling",
    ),
    "Is a second GPU worth it?": ("efficiency",),
    "Does it fit?": ("memory-near-limit", "memory-uneven"),
    "Is it healthy?": ("not-finite", "diverging", "spikes", "clipping", "collapsed-routing"),
    "Is it learning?": ("frozen", "updates-lost", "plateau", "too-slow", "overfitting"),
    "Is the data what you think?": ("leak", "rows-lost", "similar-steps"),
    "Is a rank stuck?": ("hang",),
}
_INTRODUCTION = """\
# The rules of the review

<!-- Printed from finetune/review/rules by `make docs`. Do not edit by hand. -->

`finetune review RUN` and the [Review tab](dashboard.md) judge a run by the rules below. `finetune review --explain
RULE` prints one of them. Figures in examples are of real runs; the file in parentheses has the record.
"""


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


def page() -> str:
    """All rules as Markdown, by the question that they belong to."""
    parts = [_INTRODUCTION, _contents()]
    for question, names in GROUPS.items():
        parts.append(f"## {question}\n")
        for name in names:
            one = EXPLANATIONS[name]
            parts.append(f"### {name}\n\n{one.question}\n")
            parts.append("".join(f"- **{heading}.** {text}\n" for heading, text in one.parts().items()))
    return "\n".join(parts)


def _contents() -> str:
    rows = [
        f"| {question} | {', '.join(f'[{name}](#{name})' for name in names)} |" for question, names in GROUPS.items()
    ]
    return "\n".join(["| question | rules |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(page())
