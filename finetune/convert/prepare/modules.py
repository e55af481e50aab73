"""Modules of the notebook's repository: their code, if they are beside the notebook; else the script must not need
them.

`from helpers import render` becomes the statements of helpers.py that define `render` and what it needs, and those
that do something when the module is imported. Nothing is executed or imported here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from finetune.convert.analysis.names import DEFINITIONS, effects
from finetune.convert.knowledge import known_packages
from finetune.convert.notebook.read import Notebook, Refusal, Statement
from finetune.runtime.files import read_text

MAX_BYTES = 2**20  # of a module; larger ones are data
_PARENTS = 3  # how far above the notebook a folder that it adds to sys.path is looked for
_MOVES = re.compile(r"\bsys\.path\b|\bchdir\(|^[^\S\n]*%cd\b|PYTHONPATH", re.MULTILINE)
# Names that people give to modules of their own repository.
_USUAL = re.compile(r"^(utils?|helpers?|helper_functions|configs?|src|common|prompts?|prompting|my_\w+|\w+_utils)$")


class MissingModule(Refusal):
    """The script needs a module that is not beside the notebook, or whose code cannot replace its import."""


class _Unclear(Exception):
    """A module's code cannot replace its import."""


class _Outside(Exception):
    """A module's file is outside of the notebook's repository. The message completes "it imports NAME, "."""


def own_modules(notebook: Notebook) -> set[str]:
    """Full names of imported modules that belong to the notebook's repository, not to a package.

    By their usual names; and if the notebook changes sys.path or its folder, all that no package is known to have.
    """
    anywhere = bool(_MOVES.search(notebook.text))
    imported = {name for statement in notebook.statements for name in _modules(statement.node)}
    return {name for name in imported if name.startswith(".") or _is_own(name.split(".")[0], anywhere)}


def _is_own(top: str, anywhere: bool) -> bool:
    return not _package(top) and (anywhere or _USUAL.match(top) is not None)


def _modules(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom):
            yield "." * inner.level + (inner.module or "")


def refuse_missing(notebook: Notebook, script: str) -> None:
    """Refuse a script that imports a module of the repository. Raises Refusal."""
    own = own_modules(notebook)
    for name in _modules(ast.parse(script)):
        if name in own or name.split(".")[0] in own:
            cell = next((one.cell for one in notebook.statements if name in _modules(one.node)), None)
            reason = f"it imports {name}, a module that is not in the notebook; paste its code into a cell"
            if not name.startswith(".") and not _USUAL.match(name.split(".")[0]):
                reason += ", or if it is an installed package, remove what changes sys.path or the folder"
            raise MissingModule("R4", reason, cell)


def inline_modules(notebook: Notebook, folder: Path) -> list[str]:
    """Replace top-level imports from modules beside the notebook by their code, in place. Returns notes for the report.

    An import stays as it is if the module is not found, does not parse, or shares a name with the notebook.

    Raises:
        MissingModule: a module's file is outside of the repository. A notebook cannot choose which of the user's files
            becomes part of a script that may be published.
    """
    roots = _roots(notebook, folder)
    repository = _repository(folder)
    notes: list[str] = []
    done: set[str] = set()  # sources that are in the notebook already
    statements = list(notebook.statements)
    for statement in notebook.statements:
        node = statement.node
        if not isinstance(node, ast.ImportFrom) or node.level or _package(node.module or ""):
            continue
        part = _Part(roots=roots, repository=repository, done=set(done))
        try:
            path = part.file(roots, node.module or "")
            if path is None:
                continue
            wanted = _wanted(node, path, statements)
            part.add(path, wanted)
            part.alias(node)
            _refuse_clashes(part, statements, statement)
        except _Unclear:
            continue
        except _Outside as error:
            reason = f"it imports {node.module}, {error}; paste its code into a cell"
            raise MissingModule("R4", reason, statement.cell) from None
        done |= part.done
        taken = max(one.id for one in statements) + 1
        made = [
            Statement(
                id=taken + n, cell=statement.cell, line=statement.line, source=source, node=ast.parse(source).body[0]
            )
            for n, source in enumerate(part.sources)
        ]
        place = statements.index(statement)
        statements[place : place + 1] = made
        notes.append(
            f"cell {statement.cell}: what the notebook uses of {path.name} is in the script:"
            f" {', '.join(sorted(wanted))}"
        )
    if notes:
        notebook.statements = statements
    return notes


def _package(module: str) -> bool:
    top = module.split(".")[0]
    return top in sys.stdlib_module_names or top in known_packages()


def _roots(notebook: Notebook, folder: Path) -> list[Path]:
    """Where modules may be: the notebook's folder, and those above and below it if the notebook changes the path."""
    folder = folder.resolve()
    if not _MOVES.search(notebook.text):
        return [folder]
    return [folder, folder / "src", *(one for above in folder.parents[:_PARENTS] for one in (above, above / "src"))]


def _repository(folder: Path) -> Path:
    """The repository that a folder belongs to; the folder itself if it belongs to none."""
    folder = folder.resolve()
    return next((one for one in (folder, *folder.parents) if (one / ".git").exists()), folder)


def _body(path: Path) -> tuple[str, list[ast.stmt]]:
    try:
        text = read_text(path)
        return text, ast.parse(text).body
    except (OSError, ValueError, SyntaxError) as error:
        raise _Unclear from error


def _wanted(node: ast.ImportFrom, path: Path, statements: list[Statement]) -> set[str]:
    """The names that an import needs; for `*`, the public ones that the notebook reads."""
    if all(alias.name != "*" for alias in node.names):
        return {alias.name for alias in node.names}
    _, body = _body(path)
    bound = {name for one in body for name in effects(one).all_binds}
    listed = [one.value for one in body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"]
    if listed:
        try:
            return set(ast.literal_eval(listed[0]))
        except ValueError as error:
            raise _Unclear from error
    read = {name for one in statements for name in effects(one.node).all_reads | effects(one.node).changes}
    public = {name for name in bound & read if not name.startswith("_")}
    return {name for name in public if not _replaced(name, node, statements)}


def _replaced(name: str, node: ast.ImportFrom, statements: list[Statement]) -> bool:
    """Whether the notebook defines the name itself before a statement runs that reads it."""
    place = next(n for n, one in enumerate(statements) if one.node is node)
    for one in statements[place + 1 :]:
        if name in effects(one.node).binds:
            return True
        definition = isinstance(one.node, ast.FunctionDef | ast.ClassDef)
        if name in (effects(one.node).reads if definition else effects(one.node).all_reads):
            return False
    return False


@dataclass(kw_only=True)
class _Part:
    """What replaces one import. `names` are bound by its statements, except those that it imports."""

    roots: list[Path]
    repository: Path
    done: set[str]
    sources: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # name -> source that binds it
    open: set[Path] = field(default_factory=set)

    def file(self, roots: list[Path], module: str) -> Path | None:
        """The file of a module, or None. Raises _Outside if it leads out of the repository."""
        parts = module.split(".")
        for root in roots:
            for path in (root.joinpath(*parts).with_suffix(".py"), root.joinpath(*parts, "__init__.py")):
                if not path.is_file() or path.stat().st_size > MAX_BYTES:
                    continue
                if not path.resolve().is_relative_to(self.repository):
                    leads = "a link that leads" if path.absolute().is_relative_to(self.repository) else "a module"
                    raise _Outside(f"{leads} out of the notebook's repository or folder ({self.repository})")
                return path
        return None

    def add(self, path: Path, wanted: set[str]) -> None:
        """Add what a module needs for these names, after what it imports itself."""
        if path in self.open:
            raise _Unclear  # modules that import each other
        self.open.add(path)
        text, body = _body(path)
        needed, kept = set(wanted), set()
        while True:
            more = {n for n, one in enumerate(body) if n not in kept and _keeps(one, needed)}
            if not more:
                break
            kept |= more
            needed |= {name for n in more for name in effects(body[n]).all_reads | effects(body[n]).changes}
        if wanted - {name for n in kept for name in effects(body[n]).all_binds}:
            raise _Unclear  # a name that the module makes in another way
        for number in sorted(kept):
            self._add(path, body[number], _source(text, body[number]), needed)
        self.open.discard(path)

    def _add(self, path: Path, node: ast.stmt, source: str, needed: set[str]) -> None:
        if isinstance(node, ast.ImportFrom) and (node.level or not _package(node.module or "")):
            if node.level > len(path.parents):
                raise _Unclear
            found = self.file([path.parents[node.level - 1]] if node.level else self.roots, node.module or "__init__")
            if found is not None and not node.level or found is not None and node.module:
                self.add(found, {alias.name for alias in node.names if (alias.asname or alias.name) in needed})
                self.alias(node)
                return
            if node.level:
                raise _Unclear
        if source in self.done:
            return
        self.done.add(source)
        self.sources.append(source)
        if not isinstance(node, ast.Import | ast.ImportFrom):
            for name in effects(node).all_binds:
                if self.names.setdefault(name, source) != source:
                    raise _Unclear  # two modules give the name different values

    def alias(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.asname and alias.asname != alias.name:
                source = f"{alias.asname} = {alias.name}"
                self.sources.append(source)
                self.names[alias.asname] = source


def _keeps(node: ast.stmt, needed: set[str]) -> bool:
    """Whether a module's statement is needed for a name, or does something when the module is imported."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return False  # a docstring
    if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
        return False  # runs only as a program
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return False
    if effects(node).all_binds & needed:
        return True
    plain = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
        (node.targets[0] if isinstance(node, ast.Assign) else node.target), ast.Name | ast.Tuple
    )
    definition = isinstance(node, DEFINITIONS | ast.Import | ast.ImportFrom)
    return not plain and not definition


def _source(text: str, node: ast.stmt) -> str:
    """The statement's text, with decorators."""
    lines = text.split("\n")
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    whole = "\n".join(lines[first - 1 : node.end_lineno])
    try:
        if len(ast.parse(whole).body) == 1:
            return whole
    except SyntaxError:
        pass
    return ast.unparse(node)  # several statements on one line


def _refuse_clashes(part: _Part, statements: list[Statement], importing: Statement) -> None:
    """Raise _Unclear if the notebook binds a name of the module, other than by the same code."""
    for one in statements:
        if one is importing or one.source in part.done:
            continue
        if effects(one.node).all_binds & part.names.keys() and not isinstance(one.node, ast.Import | ast.ImportFrom):
            raise _Unclear
