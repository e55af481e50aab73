import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from finetune.engine.monitoring.progress import ProgressLines


def check(folder: Path, output: str) -> None:
    """At any width of a terminal that has room for it, the step count is whole."""
    for width in (200, 120, 100, 80, 60, 40, 20):
        file = io.StringIO()
        lines = ProgressLines(Console(file=file, force_terminal=True, width=width), 24)
        state: Any = SimpleNamespace(global_step=10)
        lines.step(state)
        lines.log(state, 6.3299, 2.933, 1279.0)
        lines.close()
        assert "10/24" in file.getvalue(), width
