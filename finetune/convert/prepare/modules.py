"""Modules of the notebook's repository, which a script does not have."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from finetune.convert.knowledge import known_packages
from finetune.convert.notebook.read import Notebook, Refusal

_MOVES = re.compile(r"\bsys\.path\b|\bchdir\(|^[^\S\n]*%cd\b|PYTHONPATH", re.MULTILINE)
# Names that people give to modules of their own repository.
_USUAL = re.compile(r"^(utils?|helpers?|helper_functions|configs?|src|common|prompts?|prompting|my_\w+|\w+_utils)$")


def own_modules(notebook: Notebook, folder: Path) -> set[str]:
    """Full names of imported modules that belong to the notebook's repository, not to a package.

    Those that are in the notebook's folder; by their usual names; and if the notebook changes sys.path or its folder,
    all that no package is known to have.
    """
    anywhere = bool(_MOVES.search(notebook.text))
    imported = {name for statement in notebook.statements for name in _modules(statement.node)}
    return {name for name in imported if name.startswith(".") or _is_own(name.split(".")[0], anywhere, folder)}


def _is_own(top: str, anywhere: bool, folder: Path) -> bool:
    beside = (folder / f"{top}.py").exists() or (folder / top).is_dir()
    return not _package(top) and (anywhere or beside or _USUAL.match(top) is not None)


def _modules(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom):
            yield "." * inner.level + (inner.module or "")


def refuse_modules(notebook: Notebook, folder: Path, script: str) -> None:
    """Refuse a script that imports a module of the repository: nothing here has seen what it does. Raises Refusal."""
    own = own_modules(notebook, folder)
    for name in _modules(ast.parse(script)):
        if name in own or name.split(".")[0] in own:
            cell = next((one.cell for one in notebook.statements if name in _modules(one.node)), None)
            reason = f"it imports {name}, a module that is not in the notebook; paste its code into a cell"
            if not name.startswith(".") and not _USUAL.match(name.split(".")[0]):
                reason += ", or if it is an installed package, remove what changes sys.path or the folder"
            raise Refusal("R4", reason, cell)


def _package(module: str) -> bool:
    top = module.split(".")[0]
    return top in sys.stdlib_module_names or top in known_packages()
