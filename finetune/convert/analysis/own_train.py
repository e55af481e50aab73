"""Calls of a method `train()` that the notebook defines, in a class that is no trainer."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from finetune.convert.analysis.objects import Scopes, Variable

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
    """The calls `x.train(...)` in which x is certainly no trainer: a plain class of the notebook has such a method, and
    each trainer is known by the names that it was assigned to. Empty if a trainer may have other names, because it is
    passed on, returned or put away.

    Args:
        nodes: all nodes of the notebook, a node before those inside it.
    """
    classes = plain_classes(nodes)
    if not any(isinstance(one, ast.FunctionDef) and one.name == "train" for c in classes.values() for one in c.body):
        return set()
    names = _Names(nodes, classes)
    return set() if names.escape() else {call for call in names.train_calls() if not names.may_be_trainer(call)}


class _Names:
    """The names of the trainers: variables by their scope, attributes by name alone."""

    def __init__(self, nodes: Sequence[ast.AST], classes: dict[str, ast.ClassDef]) -> None:
        self.nodes, self.classes = nodes, classes
        self.scopes = Scopes(nodes)
        self.parents = self.scopes.parents
        self.kinds = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name.endswith("Trainer")
        }
        self.variables: set[Variable] = set()
        self.attributes: set[str] = set()
        self.lost = False  # whether a trainer has no name
        for node in nodes:
            if isinstance(node, ast.Call) and self._makes_trainer(node):
                self._name(node)

    def _is_kind(self, node: ast.AST) -> bool:
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        like = name.endswith("Trainer") and name[:1].isupper() or name in self.kinds
        return like and name not in self.classes

    def _makes_trainer(self, call: ast.Call) -> bool:
        return self._is_kind(call.func) or ast.unparse(call.func).rsplit(".", 1)[-1] == "train_on_responses_only"

    def _name(self, call: ast.Call) -> None:
        parent = self.parents.get(call)
        if isinstance(parent, ast.Attribute):
            return  # `SFTTrainer(...).train()`
        targets = parent.targets if isinstance(parent, ast.Assign) else [getattr(parent, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name):
                variable = self.scopes.variable(target.id, target)
                self.variables.add(variable)
                if isinstance(variable[0], ast.ClassDef):
                    self.attributes.add(target.id)
            elif isinstance(target, ast.Attribute):
                self.attributes.add(target.attr)
            else:
                self.lost = True

    def _is_named(self, node: ast.AST) -> bool:
        """Whether it is, or may be, a trainer's name."""
        if isinstance(node, ast.Name):
            return self.scopes.variable(node.id, node) in self.variables
        return isinstance(node, ast.Attribute) and node.attr in self.attributes

    def escape(self) -> bool:
        """Whether a trainer may be known by other names, or be trained without a call of its method."""
        return self.lost or any(self._escapes(node) for node in self.nodes)

    def _escapes(self, node: ast.AST) -> bool:
        if not isinstance(getattr(node, "ctx", None), ast.Load):
            return False
        parent = self.parents.get(node)
        if self._is_kind(node):  # only called, derived from, or asked for
            asked = isinstance(parent, ast.Call) and ast.unparse(parent.func).endswith(("signature", "isinstance"))
            return not (
                asked or isinstance(parent, ast.ClassDef) or isinstance(parent, ast.Call) and parent.func is node
            )
        if not self._is_named(node):
            return False
        if isinstance(parent, ast.Call):
            return not (node in parent.args[:1] and self._makes_trainer(parent))
        called = self.parents.get(parent) if parent is not None else None
        method = isinstance(parent, ast.Attribute) and parent.attr == "train"
        return (
            not isinstance(parent, ast.Attribute)
            or method
            and not (isinstance(called, ast.Call) and called.func is parent)
        )

    def train_calls(self) -> list[ast.Call]:
        calls = [node for node in self.nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        return [call for call in calls if call.func.attr == "train"]  # type: ignore[attr-defined]

    def may_be_trainer(self, call: ast.Call) -> bool:
        receiver = call.func.value  # type: ignore[attr-defined]
        if isinstance(receiver, ast.Name | ast.Attribute):
            return self._is_named(receiver)
        own = isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Name) and receiver.func.id
        return not (own == "super" or own in self.classes)
