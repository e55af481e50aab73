"""Figures of records, drawn if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from finetune.runtime.command import print_line


def new_figure(rows: int, wide: float = 9.0) -> Any:
    """An empty figure for `rows` bars, or None if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print_line("no plot: matplotlib is not installed; pip install 'finetune-multigpu[plots]'")
        return None
    from matplotlib.figure import Figure  # type: ignore[reportMissingImports]  # not pyplot, which needs a display

    return Figure(figsize=(wide, 2.0 + 0.4 * rows), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print_line(f"wrote {path}")
