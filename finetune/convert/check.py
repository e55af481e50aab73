"""`--check DIR`: what would become of every notebook of a folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from finetune.convert.command import Outcome, convert
from finetune.errors import UserError
from finetune.runtime.command import console


def check_folder(folder: Path) -> list[Outcome]:
    """Convert each notebook below `folder` in memory, and print a table. Raises UserError where there is none."""
    from rich.markup import escape
    from rich.table import Table

    if not folder.is_dir():
        raise UserError(f"--check {folder} is no folder; give a folder with notebooks")
    paths = sorted(path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    if not paths:
        raise UserError(f"--check {folder}: no .ipynb file is in it")
    outcomes = [convert(path) for path in paths]
    table = Table("notebook", "outcome", "reason", "seconds", box=None, pad_edge=False)
    for outcome in outcomes:
        cell = "" if outcome.cell is None else f"cell {outcome.cell}: "
        code = f"{outcome.result} {outcome.code}".strip()
        name = str(Path(outcome.notebook).relative_to(folder))
        table.add_row(escape(name), code, escape(cell + outcome.reason), f"{outcome.seconds:.2f}")
    console().print(table)
    counts = Counter(f"{outcome.result} {outcome.code}".strip() for outcome in outcomes)
    console().print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    return outcomes
