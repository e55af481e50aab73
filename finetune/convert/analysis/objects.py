"""Classes of the notebook that derive from none of a library, and calls of their methods named `train`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

_PLAIN_BASES = frozenset({"object", "ABC", "abc.ABC", "Protocol", "typing.Protocol"})


def plain_classes(nodes: Iterable[ast.AST]) -> dict[str, ast.ClassDef]:
    """Classes of the notebook that derive from no class of a library."""
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    found: dict[str, ast.ClassDef] = {}
    while more := {
        name: node
        for name, node in classes.items()
        if name not in found and all((base := ast.unparse(one)) in _PLAIN_BASES or base in found for one in node.bases)
    }:
        found |= more
    return found


def own_train_calls(nodes: Sequence[ast.AST]) -> set[ast.AST]:
    """The calls `x.train(...)` in which x is an object of a plain class of the notebook, which is no trainer: `self` in
    such a class, a call of the class, or a name that is assigned nothing else. A parameter is one by its annotation."""
    classes = plain_classes(nodes)
    trains = [node for node in nodes if getattr(getattr(node, "func", None), "attr", "") == "train"]
    if not trains or not classes:
        return set()
    inside = {inner for one in classes.values() for inner in ast.walk(one)}
    values: dict[str, list[ast.expr | None]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                values.setdefault(ast.unparse(target), []).append(node.value)
        elif isinstance(node, ast.arg):
            made = ast.Call(func=node.annotation, args=[], keywords=[]) if node.annotation else None
            values.setdefault(node.arg, []).append(made)

    def is_plain(value: ast.expr | None, seen: frozenset[str] = frozenset()) -> bool:
        if isinstance(value, ast.Call):
            return isinstance(value.func, ast.Name) and value.func.id in {"super", *classes}
        name = "" if value is None else ast.unparse(value)
        known = [] if name in seen else values.get(name, [])
        return bool(known) and all(is_plain(one, seen | {name}) for one in known)

    found: set[ast.AST] = set()
    for call in trains:
        receiver = call.func.value  # type: ignore[attr-defined]
        is_self = ast.unparse(receiver) == "self" and call in inside
        found |= {call} if is_self or is_plain(receiver) else set()
    return found
