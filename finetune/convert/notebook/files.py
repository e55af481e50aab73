"""Files that a notebook writes and reads again, by whatever name: `"rows.jsonl"`, `target`, `/content/rows.jsonl`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from finetune.convert.analysis.names import Program, is_path, root, written_path
from finetune.convert.notebook.read import Notebook
from finetune.convert.services import WORKING_FOLDERS

_READS = re.compile(r"load|read|open|from_|glob|listdir|scandir|walk|path|join", re.IGNORECASE)
_CHANGES_FOLDER = re.compile(r"^[^\S\n]*[%!]?cd\s|\bchdir\(", re.MULTILINE)


def one_name_per_file(notebook: Notebook) -> list[str]:
    """Write a file's path on a hosted service as its relative path, in place, if the notebook has both names and writes
    the file. Returns notes for the report."""
    names = hosted_names(notebook.text, [statement.node for statement in notebook.statements])
    notes = []
    for place, statement in enumerate(notebook.statements):
        if not (found := sorted(_texts(statement.node) & names.keys())):
            continue
        same = ast.dump(statement.node) == ast.dump(ast.parse(statement.source).body[0])
        source = renamed(statement.source if same else ast.unparse(statement.node), names)
        notebook.statements[place] = replace(statement, source=source, node=ast.parse(source).body[0])
        notes += [
            f"cell {statement.cell}: {path} became {names[path]}: on the hosted service both are one file"
            for path in found
        ]
    return notes


def hosted_names(code: str, trees: Sequence[ast.AST]) -> dict[str, str]:
    """Path on a hosted service -> the relative path of the same file, of files that the parsed code writes and names in
    both ways. Empty if the code changes its folder."""
    if _CHANGES_FOLDER.search(code):
        return {}
    paths = {text for tree in trees for text in _texts(tree)}
    written = _written(trees)
    found: dict[str, str] = {}
    for path in sorted(paths):
        for folder in WORKING_FOLDERS:
            short = path.removeprefix(f"{folder}/")
            for name in (short, f"./{short}") if short != path else ():
                if name in paths and short and written & {path, name}:
                    found.setdefault(path, name)
    return found


def renamed(source: str, names: dict[str, str]) -> str:
    """The code with the literals of these paths replaced."""
    for path, name in names.items():
        source = re.sub(rf"""(["']){re.escape(path)}(?=\1|{{)""", lambda quoted, name=name: quoted[1] + name, source)
    return source


def _texts(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _written(trees: Sequence[ast.AST]) -> set[str]:
    """Literal paths that a call writes, itself or by a name that is given the path."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    paths = [path for node in nodes if isinstance(node, ast.Call) and (path := written_path(node)) is not None]
    names = {root(path) for path in paths} - {None}
    given = [
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id in names for one in node.targets)
    ]
    return {text for one in [*paths, *given] for text in _texts(one)}


class Mentioned:
    """The literals of some code as paths: their names, their parts, and the parts that it reads from."""

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        self.names: set[str] = set()
        self.parts: set[str] = set()
        self.read: set[str] = set()
        for node in nodes:
            for path in map(PurePosixPath, _texts(node)):
                self.names.add(path.name)
                self.parts |= {*path.parts}
            for call in (inner for inner in ast.walk(node) if isinstance(inner, ast.Call)):
                if _READS.search(ast.unparse(call.func)):
                    given = {text for one in [*call.args, *call.keywords] for text in _texts(one)}
                    self.read |= {part for one in given for part in PurePosixPath(one).parts}


def is_named(path: ast.expr, program: Program, mentioned: Mentioned) -> bool:
    """Whether code has a literal that may name the file or folder at `path`, or a folder that it is in. The names in
    `path` are followed to what they are assigned."""
    paths = [PurePosixPath(text) for text in _followed(path, program.values, set())]
    files = {one.name for one in paths if is_path(one.name)}
    wanted = files or {one.name for one in paths if one.name}
    folders = {part for one in paths for part in one.parts[: -1 if is_path(one.name) else None]} - {"/", ".."}
    return bool(wanted & (mentioned.names if files else mentioned.parts) or folders & mentioned.read)


def _followed(node: ast.AST, values: Mapping[str, list[ast.AST]], seen: set[str]) -> Iterator[str]:
    """The literals of an expression and of what its names are assigned."""
    yield from _texts(node)
    for name in {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - seen:
        seen.add(name)
        for value in values.get(name, []):
            yield from _followed(value, values, seen)
