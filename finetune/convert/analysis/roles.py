"""The names of model, tokenizer and trainer, and of what only displays."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from finetune.convert.analysis.names import (
    Program,
    root,
    target_names,
)
from finetune.convert.knowledge import matches, named
from finetune.convert.notebook.read import Notebook, Refusal, Statement

SAVES = named("saves") | named("exports")


@dataclass(kw_only=True)
class Roles:
    """The names of the model, the tokenizer and the trainer of a notebook, and of what only displays or collects."""

    program: Program
    train: int  # the place of the statement that trains
    models: set[str] = field(default_factory=set)
    tokenizers: list[str] = field(default_factory=list)
    trainers: set[str] = field(default_factory=set)
    scratch: set[str] = field(default_factory=set)  # names of charts, tables, metrics
    collections: set[str] = field(default_factory=set)  # names of lists, dicts, counters
    own_modules: frozenset[str] = frozenset()  # top-level names of modules of the notebook's repository


def live_statements(notebook: Notebook) -> list[Statement]:
    return [statement for statement in notebook.statements if not statement.is_dead]


def find_scratch(roles: Roles) -> None:
    """Find names bound only to objects of display libraries, and names bound only to collections."""
    bound: dict[str, list[ast.expr | None]] = {}
    for statement in roles.program.statements:
        for node in ast.walk(statement.node):
            for target, value in _bindings(node):
                for name in target_names(target):
                    bound.setdefault(name, []).append(value)
    roles.collections = {name for name, values in bound.items() if all(_is_collection(roles, v) for v in values)}
    while more := {
        name
        for name, values in bound.items()
        if name not in roles.scratch and all(_is_scratch(roles, value) for value in values)
    }:
        roles.scratch |= more


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Assignment targets with their values, or None if the value is unknown."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr
    elif isinstance(node, ast.For | ast.comprehension):
        name = getattr(node.iter.func, "id", "") if isinstance(node.iter, ast.Call) else ""
        given = node.iter.args if isinstance(node.iter, ast.Call) else []
        parts = node.target.elts if isinstance(node.target, ast.Tuple) else []
        if name == "zip" and len(parts) == len(given):
            yield from zip(parts, given, strict=True)
        elif name == "enumerate" and len(parts) == 2:
            yield from ((parts[0], None), (parts[1], given[0]))
        else:
            yield node.target, node.iter


def _is_collection(roles: Roles, value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        name = roles.program.dotted(value.func)
        return name in ("list", "dict", "set") or name.startswith("collections.")
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _is_scratch(roles: Roles, value: ast.expr | None) -> bool:
    if value is None:
        return False
    made = isinstance(value, ast.Call) and (
        roles.program.dotted(value.func).split(".")[0] in named("shows")
        or method_of(value) in ("plot", "hist", "boxplot")
    )
    return made or root(value) in roles.scratch


def method_of(call: ast.Call) -> str:
    """The method called, or Unsloth's function that saves."""
    if isinstance(call.func, ast.Name) and call.func.id == "unsloth_save_model":
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def calls_in(node: ast.AST) -> list[ast.Call]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def fetched_package(program: Program, node: ast.stmt) -> str | None:
    """The package whose data a statement only downloads: `nltk.download("punkt")`, also where it is not there yet."""
    if not isinstance(node, ast.Expr | ast.Try | ast.If | ast.For):
        return None
    names = {program.dotted(call.func) for call in calls_in(node)} - {"", "print"}
    packages = {name.split(".")[0] for name in names}
    return packages.pop() if len(packages) == 1 and any(matches("fetches", name) for name in names) else None


def packages_used(program: Program, names: Iterable[str]) -> set[str]:
    """The packages that names come from."""
    return {program.imports[name].split(".")[0] for name in names if name in program.imports}


def only_installs(roles: Roles, notebook: Notebook, cell: int) -> bool:
    """Whether a cell installs packages and does not train."""
    return cell in notebook.install and roles.program.statements[roles.train].cell != cell


def refuse_list_of_one(program: Program, function: ast.expr | None) -> None:
    """Refuse (R4) a formatting_func that returns `[text]`: TRL once gave it 1,000 rows at a time, and so made one text
    of them; today it gives it one row, and fails."""
    definition = program.definition(function.id) if isinstance(function, ast.Name) else None
    if not isinstance(definition, ast.FunctionDef):
        return
    values = [node.value for node in ast.walk(definition) if isinstance(node, ast.Return) and node.value is not None]
    if values and all(
        isinstance(one, ast.List) and len(one.elts) == 1 and not isinstance(one.elts[0], ast.Starred) for one in values
    ):
        name = definition.name
        raise Refusal(
            "R4",
            f"{name}() returns a list with one text, of one row in some releases of TRL and of 1,000 rows in others;"
            " return the text itself, without the list",
        )
