"""Results that a notebook saves in folders of a hosted service: a script saves them below its working folder."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from finetune.convert.analysis.classify import is_model_name
from finetune.convert.analysis.names import target_names, written_path
from finetune.convert.knowledge import named
from finetune.convert.notebook.files import renamed
from finetune.convert.notebook.read import Notebook
from finetune.convert.services import SERVICE_FOLDERS, below_working_folder, is_below

_ARGUMENTS = frozenset({"output_dir", "logging_dir", "save_directory"})
_BUILDS = frozenset(
    "join Path PurePath PosixPath PurePosixPath str fspath format abspath expanduser normpath realpath joinpath"
    " resolve absolute as_posix with_suffix with_name rstrip strip field getenv get".split()
)
_NEUTRAL = frozenset(
    "makedirs mkdir exists isdir isfile is_dir is_file rmtree rmdir print basename dirname get_last_checkpoint train"
    " startswith endswith display info debug warning".split()
)
_SAVES = frozenset({"save", "savefig", "dump"})
_COPIES = frozenset({"copy", "copy2", "copyfile", "copytree", "move", "make_archive"})
_SHELL_COPY = re.compile(r"^[^\S\n]*[!%]\s*(?:cp|mv|zip|tar|rsync)\b", re.MULTILINE)
_RESULTS = frozenset({"result", "file"})
_PARTS = ast.JoinedStr | ast.FormattedValue | ast.IfExp | ast.Starred
_CONTAINERS = ast.List | ast.Tuple | ast.Set


def results_in_working_folder(notebook: Notebook) -> list[str]:
    """Take the service's folder from the paths of results, in place. Returns notes for the report."""
    paths = _Paths(notebook)
    renames = paths.of_results()
    notes = []
    for place, statement in enumerate(notebook.statements):
        found = [node for node in ast.walk(statement.node) if isinstance(node, ast.Constant) and node in renames]
        if not found:
            continue
        names = {str(node.value): renames[node] for node in found}
        read = {str(node.value) for node in found if paths.is_read(node)}
        for node in found:
            node.value = renames[node]
        source = renamed(statement.source, names)
        if ast.dump(ast.parse(source).body[0]) != ast.dump(statement.node):
            source = ast.unparse(statement.node)
        notebook.statements[place] = replace(statement, source=source, node=ast.parse(source).body[0])
        notes += [
            f"cell {statement.cell}: {path} became {short}: the script saves below its working folder, not on the"
            f" hosted service{'; what is read from it is expected there as well' if path in read else ''}"
            for path, short in sorted(names.items())
        ]
    return notes


class _Paths:
    """The paths of services' folders in a notebook, and what they are used for. Variables are known by name alone, so
    a path may have more uses than it really has."""

    def __init__(self, notebook: Notebook) -> None:
        live = [one for one in notebook.statements if not one.is_dead]
        self.nodes: list[ast.AST] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        self.places: dict[ast.AST, int] = {}
        for place, statement in enumerate(live):
            for node in ast.walk(statement.node):
                self.nodes.append(node)
                self.places[node] = place
                self.parents |= {inner: node for inner in ast.iter_child_nodes(node)}
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        definitions = [node for node in self.nodes if isinstance(node, ast.FunctionDef)]
        self.functions = {node.name: node for node in definitions}
        self.classes = {node.name for node in self.nodes if isinstance(node, ast.ClassDef)}
        trains = [
            one for one in calls if _called(one) == "train" and not is_model_name(getattr(one.func, "value", one))
        ]
        self.train = max((self.places[one] for one in trains), default=len(live))
        self.copied = any(_called(one) in _COPIES for one in calls) or bool(_SHELL_COPY.search(notebook.text))
        # Each path that starts with a service's folder, with what it is used for.
        self.all: dict[ast.Constant, set[str]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and self._starts(node):
                if any(is_below(node.value, folder) for folder in SERVICE_FOLDERS):
                    self.all[node] = {*self._uses(node, set())}

    def of_results(self) -> dict[ast.Constant, str]:
        """Paths that results are saved to, with what is read there -> below the working folder. Rows beside results
        keep their path, unless the notebook writes them itself."""
        saved = {self._text(node) for node, uses in self.all.items() if uses & _RESULTS} - {*SERVICE_FOLDERS}
        files = {self._text(node) for node, uses in self.all.items() if "file" in uses} - {*SERVICE_FOLDERS}
        read = {self._text(node) for node, uses in self.all.items() if not uses & _RESULTS and not self._clean(node)}
        lost = {one for one in files for folder in read if one != folder and is_below(one, folder)}
        found: dict[ast.Constant, str] = {}
        for node, uses in self.all.items():
            made = saved - lost if uses & _RESULTS or self._clean(node) else files - lost
            whole = bool(uses & _RESULTS) and self._text(node) in SERVICE_FOLDERS
            if whole or any(is_below(self._text(node), one) for one in made):
                found[node] = below_working_folder(str(node.value), drives=self.copied)
        return found

    def is_read(self, node: ast.Constant) -> bool:
        """Whether something else may be read there before the training."""
        return not self._clean(node) and "file" not in self.all[node]

    def _text(self, node: ast.Constant) -> str:
        return str(node.value).rstrip("/")

    def _clean(self, node: ast.Constant) -> bool:
        return self.places[node] > self.train or not self.all[node] - _RESULTS - {"neutral"}

    def _starts(self, node: ast.Constant) -> bool:
        """Whether a path starts here, not in the middle of a text."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.JoinedStr):
            return parent.values[0] is node
        return not (isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add) and parent.right is node)

    def _uses(self, node: ast.AST, seen: set[str | ast.AST]) -> Iterator[str]:
        """What an expression of a path is used for: result, file (written, perhaps to be read), neutral or unknown."""
        if node in seen:
            return
        seen.add(node)
        parent = self.parents.get(node)
        if isinstance(parent, _PARTS) or (isinstance(parent, ast.BinOp) and not isinstance(parent.op, ast.BitOr)):
            yield from self._uses(parent, seen)
        elif isinstance(parent, ast.Compare | ast.Expr):
            yield "neutral"
        elif isinstance(parent, ast.Attribute):
            yield from self._method(parent, seen)
        elif isinstance(parent, ast.Call):
            yield from self._uses(parent, seen) if parent.func is node else self._argument(parent, node, None, seen)
        elif isinstance(parent, ast.Return):
            yield from self._variable(self._function(parent), seen)
        elif isinstance(parent, ast.keyword) and isinstance(call := self.parents[parent], ast.Call):
            yield from self._argument(call, node, parent.arg, seen)
        elif isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            for target in parent.targets if isinstance(parent, ast.Assign) else [parent.target]:
                yield from self._stored(target, seen)
        elif isinstance(parent, ast.Dict) and node in parent.values:
            key = parent.keys[parent.values.index(node)]  # type: ignore[arg-type]
            yield from self._variable(key.value if isinstance(key, ast.Constant) else None, seen)
        elif isinstance(parent, ast.arguments):
            yield from self._variable(_parameter(parent, node), seen)
        elif isinstance(parent, _CONTAINERS) and isinstance(loop := self.parents.get(parent), ast.For):
            for name in target_names(loop.target):
                yield from self._variable(name, seen)
        else:
            yield "unknown"

    def _function(self, node: ast.AST | None) -> str | None:
        while node is not None and not isinstance(node, ast.FunctionDef):
            node = self.parents.get(node)
        return node.name if node is not None else None

    def _stored(self, target: ast.expr, seen: set[str | ast.AST]) -> Iterator[str]:
        if isinstance(target, ast.Subscript):
            key = target.slice
            yield from self._variable(key.value if isinstance(key, ast.Constant) else None, seen)
        elif isinstance(target, ast.Name | ast.Attribute):
            yield from self._variable(target.id if isinstance(target, ast.Name) else target.attr, seen)
        else:
            yield "unknown"

    def _variable(self, name: object, seen: set[str | ast.AST]) -> Iterator[str]:
        """The uses of all that has this name: variables, attributes and entries."""
        if not isinstance(name, str):
            yield "unknown"
            return
        if name in _ARGUMENTS:
            yield "result"
        if name in seen:
            return
        seen.add(name)
        for node in self.nodes:
            loaded = isinstance(getattr(node, "ctx", None), ast.Load)
            entry = (
                isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == name
            )
            if loaded and (entry or name in (getattr(node, "id", None), getattr(node, "attr", None))):
                yield from self._uses(node, seen)

    def _method(self, attribute: ast.Attribute, seen: set[str | ast.AST]) -> Iterator[str]:
        call = self.parents.get(attribute)
        if isinstance(call, ast.Call) and call.func is attribute and attribute.attr not in _BUILDS:
            yield self._kind(call, attribute.value)
        else:  # `path.parent`, or `path.joinpath("x")`
            yield from self._uses(call if isinstance(call, ast.Call) and call.func is attribute else attribute, seen)

    def _argument(self, call: ast.Call, node: ast.AST, key: str | None, seen: set[str | ast.AST]) -> Iterator[str]:
        name = _called(call)
        if name in _BUILDS:
            yield from self._uses(call, seen)
        elif name == "add_argument":
            option = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
            yield from self._variable(str(option).lstrip("-").replace("-", "_"), seen)
        elif key in _ARGUMENTS or (key is None and name.endswith(("SFTConfig", "TrainingArguments"))):
            yield "result"
        elif name in self.functions and isinstance(call.func, ast.Name):
            parameters = self.functions[name].args
            names = [one.arg for one in [*parameters.posonlyargs, *parameters.args]]
            place = call.args.index(node) if key is None else 0  # type: ignore[arg-type]
            yield from self._variable(key or (names[place] if place < len(names) else None), seen)
        elif key is not None and (name in self.classes or name in ("dict", "SimpleNamespace")):
            yield from self._variable(key, seen)
        else:
            yield self._kind(call, node)

    def _kind(self, call: ast.Call, node: ast.AST) -> str:
        name = _called(call)
        if name in named("saves") | named("exports") | _SAVES:
            return "result"
        if written_path(call) is not None:
            return "file"
        if name in _COPIES:
            return "neutral" if node in call.args[:1] and name != "make_archive" else "result"
        # After the training, only what saves is kept.
        return "neutral" if name in _NEUTRAL or self.places[call] > self.train else "unknown"


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _parameter(arguments: ast.arguments, default: ast.AST) -> str | None:
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
    pairs += [(one, value) for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value]
    return next((one.arg for one, value in pairs if value is default), None)
