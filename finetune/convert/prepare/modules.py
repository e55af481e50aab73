"""Modules of the notebook's repository. A script keeps the import of one that is a file beside the notebook, and does
nothing but compute."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Set
from pathlib import Path

from finetune.convert.analysis.names import calls, method, written_path
from finetune.convert.knowledge import known_packages, matches, named
from finetune.convert.notebook.read import Notebook, Refusal
from finetune.errors import UserError
from finetune.runtime import files

_MOVES = re.compile(r"\bsys\.path\b|\bchdir\(|^[^\S\n]*%cd\b|PYTHONPATH", re.MULTILINE)
# Names that people give to modules of their own repository.
_USUAL = re.compile(r"^(utils?|helpers?|helper_functions|configs?|src|common|prompts?|prompting|my_\w+|\w+_utils)$")


def own_modules(notebook: Notebook, folder: Path) -> set[str]:
    """Full names of imported modules that belong to the notebook's repository, not to a package.

    Those that are in the notebook's folder; by their usual names; and if the notebook changes sys.path or its folder,
    all that no package is known to have.
    """
    anywhere = bool(_MOVES.search(notebook.text))
    imported = {name for statement in notebook.statements for name in imports(statement.node)}
    return {name for name in imported if name.startswith(".") or _is_own(name.split(".")[0], anywhere, folder)}


def _is_own(top: str, anywhere: bool, folder: Path) -> bool:
    if top in sys.stdlib_module_names or top in known_packages():
        return False
    beside = (folder / f"{top}.py").exists() or (folder / top).is_dir()
    installed = anywhere and top in importlib.metadata.packages_distributions()
    return beside or _USUAL.match(top) is not None or anywhere and not installed


def imports(node: ast.AST) -> Iterator[str]:
    """The full names of the modules that code imports."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom):
            yield "." * inner.level + (inner.module or "")


def check_modules(notebook: Notebook, folder: Path, script: str, own: Set[str]) -> list[str]:
    """Notes on the modules of the repository that a script imports, which must be beside it.

    Raises:
        Refusal: R4, for one that is not beside the notebook, or that does more than compute.
    """
    used = sorted({name for name in imports(ast.parse(script)) if name in own})
    for name in used:
        cell = next((one.cell for one in notebook.statements if name in imports(one.node)), None)
        if why := _not_usable(name, folder, set()):
            raise Refusal("R4", f"it imports {name}, a module of the repository, {why}", cell)
    paths = sorted({str(path.relative_to(folder)) for name in used if (path := _file(name, folder))})
    return [f"the script imports {path}: keep it beside the script" for path in paths]


def _file(name: str, folder: Path) -> Path | None:
    """The file of a module in the notebook's folder."""
    path = folder.joinpath(*name.split("."))
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()), None)


def _not_usable(name: str, folder: Path, seen: set[str]) -> str:
    """Why a script cannot import a module, with the remedy; "" if it can."""
    path = None if name.startswith(".") else _file(name, folder)
    if path is None:
        return "which is not beside the notebook; copy it there, or paste its code into a cell"
    try:
        tree = ast.parse(files.read_bytes(path, at_most=2**20))
    except (OSError, UserError, SyntaxError, ValueError, RecursionError):
        return "which cannot be read; paste its code into a cell"
    for call in calls(tree):
        text, last = ast.unparse(call.func), method(call) or getattr(call.func, "id", "")
        kinds = ("saves", "exports", "writes", "on every rank", "moves", "seeds", "runs text")
        acts = any(last in named(kind) for kind in kinds) or last.endswith(
            ("Trainer", "from_pretrained", "_peft_model")
        )
        if acts or written_path(call) or any(matches(kind, text) for kind in ("process", "service", "unsafe")):
            return (
                f"whose `{text}` (line {call.lineno}) may need a change for several ranks; paste its code into a cell"
            )
    for inner in imports(tree):
        if inner not in seen and (inner.startswith(".") or _file(inner, folder)):
            seen.add(inner)
            if why := _not_usable(inner, folder, seen):
                return f"which imports {inner}, {why}"
    return ""
