"""Which object a name stands for: names by their scopes, and the calls that made what they hold."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from finetune.convert.analysis.names import DEFINITIONS

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.ExceptHandler, ast.match_case)
# What these return is the object that they are given, or a part of it.
_PASS_ON = frozenset(
    "train_on_responses_only get_peft_model prepare_model_for_kbit_training prepare_model_for_training for_training"
    " setup_chat_format prepare".split()
)
_RETURN_SELF = frozenset("to cuda half bfloat16 float train eval merge_and_unload".split())
_PLAIN_BASES = frozenset({"object", "ABC", "abc.ABC", "Protocol", "typing.Protocol"})

Variable = tuple[ast.AST | None, str]


class Scopes:
    """The variables of a program: each with the scope that binds it, None for the top level.

    Args:
        nodes: all nodes, a node before those inside it.
    """

    def __init__(self, nodes: Sequence[ast.AST]) -> None:
        self.nodes = nodes
        self.order = {node: number for number, node in enumerate(nodes)}
        self.parents = {inner: node for node in nodes for inner in ast.iter_child_nodes(node)}
        self._bound: dict[ast.AST | None, set[str]] = {}
        self._global: dict[ast.AST | None, set[str]] = {}
        self._nonlocal: dict[ast.AST | None, set[str]] = {}
        for node in nodes:
            if isinstance(node, ast.Global | ast.Nonlocal):
                kind = self._global if isinstance(node, ast.Global) else self._nonlocal
                kind.setdefault(self.scope(node), set()).update(node.names)
            for name in _binds(node):
                self._bound.setdefault(self.scope(node), set()).add(name)

    def scope(self, node: ast.AST) -> ast.AST | None:
        """The innermost function or class around a node."""
        outer = self.parents.get(node)
        while outer is not None and not isinstance(outer, _FUNCTIONS | ast.ClassDef):
            outer = self.parents.get(outer)
        return outer

    def variable(self, name: str, node: ast.AST) -> Variable:
        """The variable that a name means at a node."""
        scope, own = self.scope(node), True
        while scope is not None:
            if name in self._global.get(scope, set()):
                return None, name
            seen = own or not isinstance(scope, ast.ClassDef)  # the methods of a class do not see its names
            if seen and name in self._bound.get(scope, set()) and name not in self._nonlocal.get(scope, set()):
                return scope, name
            scope, own = self.scope(scope), False
        return None, name


def _binds(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, DEFINITIONS):
        return [node.name]
    return [(node.asname or node.name).split(".")[0]] if isinstance(node, ast.alias) else []


class Objects:
    """The calls that made what expressions stand for, as far as assignments show it."""

    def __init__(self, nodes: Sequence[ast.AST]) -> None:
        self.scopes = Scopes(nodes)
        # Variable -> each place that binds it, with the value there; None if that is unknown.
        self.values: dict[Variable, list[tuple[ast.AST, ast.expr | None]]] = {}
        given = {id(target): value for node in nodes for target, value in _assigned(node)}
        for node in nodes:
            stored = isinstance(getattr(node, "ctx", None), ast.Store)
            if (stored or isinstance(node, ast.arg)) and (variable := self._variable(node)) is not None:
                self.values.setdefault(variable, []).append((node, given.get(id(node))))

    def made_by(self, node: ast.expr, _seen: frozenset[ast.AST] = frozenset()) -> frozenset[ast.Call] | None:
        """The calls that may have made the object; None if it may be another one."""
        if node in _seen:
            return frozenset()
        seen = _seen | {node}
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rsplit(".", 1)[-1]
            if name in _PASS_ON and node.args:
                return self.made_by(node.args[0], seen)
            if name in _RETURN_SELF and isinstance(node.func, ast.Attribute):
                return self.made_by(node.func.value, seen)
            return frozenset({node})
        if isinstance(node, ast.IfExp):
            return self._all([node.body, node.orelse], seen)
        variable = self._variable(node)
        found = self._reaching(variable, node) if variable is not None else []
        if not found and isinstance(node, ast.Attribute) and node.attr == "model":
            trainers = self.made_by(node.value, seen)
            return self._all([self.model_of(one) for one in trainers], seen) if trainers else None
        values: list[ast.expr | None] = []
        for place, value in found:
            if isinstance(place, ast.Name) and variable is not None and self.scopes.scope(place) is not variable[0]:
                return None  # `global` or `nonlocal`: each call of that function binds another object
            values += self._arguments(place) if isinstance(place, ast.arg) else [value]
        return self._all(values, seen) if values else None

    def model_of(self, trainer: ast.Call) -> ast.expr | None:
        """The model that the call of a trainer's class is given."""
        named = [item.value for item in trainer.keywords if item.arg == "model"]
        return next(iter([*named, *trainer.args[:1]]), None) if _last_name(trainer).endswith("Trainer") else None

    def _all(self, values: Sequence[ast.expr | None], seen: frozenset[ast.AST]) -> frozenset[ast.Call] | None:
        found: frozenset[ast.Call] = frozenset()
        for value in values:
            if value is None or (made := self.made_by(value, seen)) is None:
                return None
            found |= made
        return found

    def _variable(self, node: ast.AST) -> Variable | None:
        """The variable of a name, of `x.attribute` or of `x["key"]`. The methods of a class share `self`."""
        start = node
        while (
            isinstance(start, ast.Attribute)
            or isinstance(start, ast.Subscript)
            and isinstance(start.slice, ast.Constant)
        ):
            start = start.value
        if not isinstance(start, ast.Name | ast.arg):
            return None
        scope, _ = self.scopes.variable(start.id if isinstance(start, ast.Name) else start.arg, start)
        owner = self.scopes.parents.get(scope) if scope is not None else None
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(owner, ast.ClassDef):
            first = scope.args.args[:1] if isinstance(scope, ast.FunctionDef) else []
            scope = owner if [one.arg for one in first] == [getattr(start, "id", "")] else scope
        return scope, node.arg if isinstance(node, ast.arg) else ast.unparse(node)

    def _reaching(self, variable: Variable, node: ast.AST) -> list[tuple[ast.AST, ast.expr | None]]:
        """The bindings that a use may see: in the scope of all of them, those since the last one that surely runs."""
        found = self.values.get(variable, [])
        scope = self.scopes.scope(node)
        if any(self.scopes.scope(place) is not scope for place, _ in found):
            return found
        # The value of an assignment is read before its target is bound.
        limit = self.scopes.order[self._statement(node)]
        before = [one for one in found if self.scopes.order[self._statement(one[0])] < limit]
        around = set(self._branches(node))
        certain = [n for n, (place, _) in enumerate(before) if set(self._branches(place)) <= around]
        return before[certain[-1] :] if certain else before

    def _statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt | ast.arguments) and node in self.scopes.parents:
            node = self.scopes.parents[node]
        return node

    def _branches(self, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        """The branches around a node, each with its field: an `if` has two."""
        while (outer := self.scopes.parents.get(node)) is not None:
            if isinstance(outer, _BRANCHES):
                yield (
                    outer,
                    next((name for name, part in ast.iter_fields(outer) if part is node or node in _list(part)), ""),
                )
            node = outer

    def _arguments(self, parameter: ast.arg) -> list[ast.expr | None]:
        """What the calls of its function give for a parameter; None for a call or a function that does not show it."""
        function = self.scopes.scope(parameter)
        if not isinstance(function, ast.FunctionDef):
            return [None]
        names = [one.arg for one in [*function.args.posonlyargs, *function.args.args]]
        owner, called = self.scopes.parents.get(function), function.name
        if isinstance(owner, ast.ClassDef):
            names, called = names[1:], owner.name if called == "__init__" else called
        calls = [one for one in self.scopes.nodes if isinstance(one, ast.Call) and _last_name(one) == called]
        names_of = [getattr(one, "id", getattr(one, "attr", "")) for one in self.scopes.nodes if _is_loaded(one)]
        if not isinstance(owner, ast.ClassDef) and names_of.count(called) > len(calls):
            return [None]  # passed on, so it may be called elsewhere
        found: list[ast.expr | None] = []
        for call in calls:
            given = dict(zip(names, call.args, strict=False)) | {item.arg: item.value for item in call.keywords}
            found.append(given.get(parameter.arg))
        return found or [None]


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
    """The calls `x.train(...)` in which x is certainly an object of a plain class of the notebook, which is no trainer.

    Args:
        nodes: all nodes of the notebook, a node before those inside it.
    """
    classes = plain_classes(nodes)
    if not any(isinstance(one, ast.FunctionDef) and one.name == "train" for c in classes.values() for one in c.body):
        return set()
    objects = Objects(nodes)

    def is_plain(value: ast.expr) -> bool:
        if isinstance(value, ast.Name) and value.id == "self":
            scope = objects.scopes.scope(value)
            owner = objects.scopes.parents.get(scope) if scope is not None else None
            return isinstance(owner, ast.ClassDef) and owner.name in classes
        made = objects.made_by(value)
        return bool(made) and all(isinstance(one.func, ast.Name) and one.func.id in {"super", *classes} for one in made)

    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return {one for one in calls if one.func.attr == "train" and is_plain(one.func.value)}  # type: ignore[attr-defined]


def _is_loaded(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def _list(part: object) -> list[object]:
    return part if isinstance(part, list) else []


def _last_name(call: ast.Call) -> str:
    return ast.unparse(call.func).rsplit(".", 1)[-1]


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets with their values; those of `model, tokenizer = load()` with the whole one."""
    if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if not isinstance(target, ast.Tuple | ast.List):
            yield target, node.value
        elif isinstance(node.value, ast.Tuple | ast.List) and len(node.value.elts) == len(target.elts):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield from ((one, node.value) for one in target.elts)
