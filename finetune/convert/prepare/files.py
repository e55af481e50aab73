"""Paths of a notebook: those on hosted services, which become paths below the working folder, and the files that it
names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from finetune.convert.analysis.names import Program, calls, is_path
from finetune.convert.notebook.read import Notebook
from finetune.convert.services import SERVICE_FOLDERS, below_working_folder, is_below

_READS = re.compile(r"load|read|open|from_|glob|listdir|scandir|walk|path|join", re.IGNORECASE)


def in_working_folder(notebook: Notebook) -> list[str]:
    """Write each path in a folder of a hosted service as one below the working folder, in place. Returns a note for the
    report."""
    drives = _COPIES.search(notebook.text) is not None  # from the working folder to a drive, perhaps by the same name
    # In another folder, "rows.csv" is not "/content/rows.csv".
    others = {text for one in notebook.statements for text in _texts(one.node)}
    others = others if _CHANGES_FOLDER.search(notebook.text) else set()
    moved: dict[str, str] = {}
    for place, statement in enumerate(notebook.statements):
        names = {
            str(node.value): below_working_folder(str(node.value), drives=drives)
            for node in _starts(statement.node)
            if any(is_below(str(node.value), folder) for folder in SERVICE_FOLDERS)
            and below_working_folder(str(node.value)) not in others
        }
        if not names:
            continue
        for node in _starts(statement.node):
            node.value = names.get(str(node.value), node.value)
        source = _renamed(statement.source, names)
        if ast.dump(ast.parse(source).body[0]) != ast.dump(statement.node):
            source = ast.unparse(statement.node)
        notebook.statements[place] = statement.reading(source)
        moved |= names
    if not moved:
        return []
    listed = [f"{path} became {short}" for path, short in moved.items()]
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return [
        f"{', '.join(listed[:3])}{more}: the script saves and reads below its working folder, where the notebook uses a"
        " folder of its service"
    ]


_CHANGES_FOLDER = re.compile(r"^[^\S\n]*[%!]?cd\s|\bchdir\(", re.MULTILINE)
_COPIES = re.compile(r"\b(?:copy(?:2|file|tree)?|move|make_archive)\(|^[^\S\n]*[!%]\s*(?:cp|mv|zip|tar|rsync)\b", re.M)


def _starts(tree: ast.AST) -> list[ast.Constant]:
    """The texts that may be the start of a path: not those behind another part of a text."""
    later = {
        id(one)
        for node in ast.walk(tree)
        for one in (
            node.values[1:]
            if isinstance(node, ast.JoinedStr)
            else [node.right]
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
            else []
        )
    }
    texts = [one for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return [one for one in texts if id(one) not in later]


def _renamed(source: str, names: dict[str, str]) -> str:
    """The code with the literals of these paths replaced."""
    for path, name in names.items():
        source = re.sub(rf"""(["']){re.escape(path)}(?=\1|{{)""", lambda quoted, name=name: quoted[1] + name, source)
    return source


def _texts(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


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
            for call in calls(node):
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
