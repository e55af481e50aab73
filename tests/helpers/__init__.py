"""What tests share: tiny models, runs in this process and launched ranks."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"))
