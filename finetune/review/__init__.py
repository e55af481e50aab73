"""`finetune review`: what limits a run, in words, from what it recorded.

events.py reads TensorBoard's files, ranks.py the records of each rank, run.py a whole run; rules/ judge it, verdict.py
puts first what matters most, assemble.py builds the result, report.py prints it. Nothing is imported here before it is
needed: TensorBoard loads this package with the plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.runtime.types import JsonObject


def divergence(losses: Sequence[float], evaluations: Sequence[JsonObject]) -> str | None:
    """A sentence if a run with these losses of all its steps diverges.

    Args:
        evaluations: their "step", "loss", and "set" if there are several.
    """
    from finetune.review import events
    from finetune.review.rules import learning

    only = [one for one in evaluations if "set" not in one]
    return learning.divergence(losses, events.of([one["step"] for one in only], [one["loss"] for one in only]).finite())


def conclusion(folder: Path) -> tuple[list[str], str | None]:
    """The verdict on a run as lines, and what to change first if it is a warning about what the run has learned. What
    goes wrong here ends no run."""
    from finetune.review.assemble import review
    from finetune.review.rules import LEARNING

    try:
        [one] = review([folder]).runs
    except Exception as error:
        return [f"The run could not be reviewed: {type(error).__name__}: {error}"], None
    first = next((found for found in one.findings if found.rule in LEARNING and found.level == "warning"), None)
    return [str(half) for half in one.verdict], first and first.advice


def main(argv: list[str] | None = None) -> int:
    """`finetune review`. Returns the exit code."""
    from finetune.review.command import main as command

    return command(argv)
