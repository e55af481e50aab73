"""Modules of the notebook's repository. A script keeps the import of one that is a file beside the notebook, and does
nothing but compute."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shlex
import sys
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

from finetune.convert.analysis.names import DEFINITIONS, calls, method, written_path
from finetune.convert.knowledge import known_packages, matches, named
from finetune.convert.notebook.read import Notebook, Refusal
from finetune.errors import UserError
from finetune.runtime import files

_MOVES = re.compile(r"\bsys\.path\b|\bchdir\(|^[^\S\n]*%cd\b|PYTHONPATH", re.MULTILINE)
# Names that people give to modules of their own repository.
_USUAL = re.compile(r"^(utils?|helpers?|helper_functions|configs?|src|common|prompts?|prompting|my_\w+|\w+_utils)$")


def own_modules(notebook: Notebook, folders: Sequence[Path]) -> set[str]:
    """Full names of imported modules that belong to the notebook's repository, not to a package.

    Those that are in the folders of the script and the notebook, or above; by their usual names; and if the notebook
    changes sys.path or its folder, all that no package is known to have.
    """
    anywhere = bool(_MOVES.search(notebook.text))
    imported = {name for statement in notebook.statements for name in imports(statement.node)}
    return {name for name in imported if name.startswith(".") or _is_own(name.split(".")[0], anywhere, folders)}


def _is_own(top: str, anywhere: bool, folders: Sequence[Path]) -> bool:
    if top in sys.stdlib_module_names or top in known_packages():
        return False
    beside = any((one / f"{top}.py").exists() or (one / top).is_dir() for one in folders) or _above(top, folders)
    installed = anywhere and top in importlib.metadata.packages_distributions()
    return bool(beside) or _USUAL.match(top) is not None or anywhere and not installed


def imports(node: ast.AST) -> Set[str]:
    """The full names of the modules that code imports."""
    return _asked([node]).keys()


def _asked(nodes: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Module -> the names that code imports from it; "*" for all of them."""
    found: dict[str, set[str]] = {}
    for inner in (one for node in nodes for one in ast.walk(node)):
        if isinstance(inner, ast.Import):
            for alias in inner.names:
                found.setdefault(alias.name, set()).add("*")
        elif isinstance(inner, ast.ImportFrom):
            found.setdefault("." * inner.level + (inner.module or ""), set()).update(one.name for one in inner.names)
    return found


def check_modules(notebook: Notebook, folders: Sequence[Path], script: str, own: Set[str]) -> list[str]:
    """Notes on the modules of the repository that a script imports, which must be beside it.

    Raises:
        Refusal: R4, for one that is not beside the notebook, or that does more than compute.
    """
    used = {name: names for name, names in sorted(_asked([ast.parse(script)]).items()) if name in own}
    for name, names in used.items():
        cell = next((one.cell for one in notebook.statements if name in imports(one.node)), None)
        if why := _not_usable(name, names, folders, set()):
            raise Refusal("R4", f"it imports {name}, a module of the repository, {why}", cell)
    paths = {path: one for name in used for one in folders if (path := _file(name, [one]))}
    shown = sorted({str(path.relative_to(one)) for path, one in paths.items()})
    return [f"the script imports {path}: keep it beside the script" for path in shown]


def _file(name: str, folders: Iterable[Path]) -> Path | None:
    """The file of a module in the first of the folders that has it."""
    stem = name.replace(".", "/")
    paths = [one / f"{stem}{end}" for one in folders for end in (".py", "/__init__.py")]
    return next((path for path in paths if path.exists()), None)


def _above(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder above the notebook's, of two, that has a module."""
    return next((one for one in folders[-1].resolve().parents[:2] if _file(name, [one])), None)


def _not_usable(name: str, names: Set[str], folders: Sequence[Path], seen: set[tuple[str, str]]) -> str:
    """Why a script cannot import these names of a module, with the remedy; "" if it can."""
    path = None if name.startswith(".") else _file(name, folders)
    if path is None:
        above = None if name.startswith(".") else _above(name, folders)
        elsewhere = f"which is in {above}; write the script there: --out {shlex.quote(str(above))}"
        return elsewhere if above else "which is not beside the notebook; copy it there, or paste its code into a cell"
    try:
        tree = ast.parse(files.read_bytes(path, at_most=2**20))
    except (OSError, UserError, SyntaxError, ValueError, RecursionError):
        return "which cannot be read; paste its code into a cell"
    nodes = _run(tree, names)
    for call in (one for node in nodes for one in calls(node)):
        text, last = ast.unparse(call.func), method(call) or getattr(call.func, "id", "")
        kinds = ("saves", "exports", "writes", "on every rank", "moves", "seeds")
        acts = any(last in named(kind) for kind in kinds) or text in named("runs text")  # not `re.compile`
        acts = acts or last.endswith(("Trainer", "from_pretrained", "_peft_model"))
        if acts or written_path(call) or any(matches(kind, text) for kind in ("process", "service", "unsafe")):
            where = f"whose `{text}` (line {call.lineno})"
            return f"{where} may need a change for several ranks; paste its code into a cell"
    for inner, asked in _asked(nodes).items():
        key = inner, " ".join(sorted(asked))
        if key not in seen and (inner.startswith(".") or _file(inner, folders)):
            seen.add(key)
            if why := _not_usable(inner, asked, folders, seen):
                return f"which imports {inner}, {why}"
    return ""


def _run(tree: ast.Module, names: Set[str]) -> list[ast.stmt]:
    """The statements of a module that run when these names of it are used: its definitions only if they are needed."""
    if "*" in names:
        return tree.body
    rest = {one.name: one for one in tree.body if isinstance(one, DEFINITIONS)}
    found = [one for one in tree.body if not isinstance(one, DEFINITIONS)]
    needed, place = set(names), 0
    while place < len(found) or needed & rest.keys():
        needed |= {one.id for node in found[place:] for one in ast.walk(node) if isinstance(one, ast.Name)}
        place = len(found)
        found += [rest.pop(name) for name in sorted(needed & rest.keys())]
    return found
