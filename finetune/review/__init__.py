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
    from finetune.review.assemble import Review


def review(folders: Sequence[Path]) -> Review:
    """Read and judge runs; `to_dict()` of the result is what `finetune review --json` writes.

    Raises:
        UserError: a folder holds no run.
    """
    from finetune.review import assemble

    return assemble.review(folders)


def divergence(losses: Sequence[float]) -> str | None:
    """A sentence if a run with these losses of all its steps diverges."""
    from finetune.review.rules import learning

    return learning.divergence(losses)


def main(argv: list[str] | None = None) -> int:
    """`finetune review`. Returns the exit code."""
    from finetune.review.command import main as command

    return command(argv)
