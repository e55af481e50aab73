"""Data flow: what each statement reads, binds and changes, and backward slices of a program."""

from __future__ import annotations

import ast
import builtins
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TypeGuard

from finetune.convert.knowledge import matches, named
from finetune.convert.notebook.read import Statement

_BUILTINS = frozenset(dir(builtins))
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(kw_only=True)
class Effects:
    """Names at module scope. `late` names are read when a function in the statement is called, not at definition;
    `own` are those that a loop, a context manager or a handler binds for its body, where no other set has them."""

    binds: set[str] = field(default_factory=set)
    may_bind: set[str] = field(default_factory=set)
    changes: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)

    @property
    def all_binds(self) -> set[str]:
        return self.binds | self.may_bind

    @property
    def all_reads(self) -> set[str]:
        return self.reads | self.late


def is_import(node: ast.AST) -> TypeGuard[ast.Import | ast.ImportFrom]:
    return isinstance(node, ast.Import | ast.ImportFrom)


def effects(node: ast.stmt) -> Effects:
    found = _Visitor()
    found.visit_statement(node, certain=True)
    return found.effects


def calls(node: ast.AST) -> list[ast.Call]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def lone_call(node: ast.stmt) -> ast.Call | None:
    """The call that is all of a statement."""
    return node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None


def method(call: ast.AST) -> str:
    """The method that a call calls; "" for any other node."""
    return call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


def passed(call: ast.Call, name: str) -> list[ast.expr]:
    """The value of a call's first argument, given by position or as `name`."""
    return [*call.args[:1], *(item.value for item in call.keywords if item.arg == name)]


def root(node: ast.AST) -> str | None:
    """The name at the start of `name.a[0].b(...)`, or None."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def in_place(call: ast.Call) -> bool:
    """`df.dropna(inplace=True)`: a method of pandas that changes its frame. The value may also be unknown."""
    given = [item.value for item in call.keywords if item.arg == "inplace"]
    return any(not isinstance(value, ast.Constant) or bool(value.value) for value in given)


def changed_in_loop(node: ast.stmt) -> set[str]:
    """Names whose elements a loop changes: `for p in model.parameters(): p.requires_grad = False`."""
    if not isinstance(node, ast.For):
        return set()
    body = _Visitor()
    for inner in node.body:
        body.visit_statement(inner, certain=False)
    changed = body.effects.changes & set(target_names(node.target)) or casts_modules(node)
    return free_names(node.iter) if changed else set()


def casts_modules(node: ast.stmt) -> bool:
    """`for name, module in model.named_modules(): module = module.to(...)`: on modules these methods work in place."""
    if not isinstance(node, ast.For) or "modules" not in getattr(getattr(node.iter, "func", None), "attr", ""):
        return False
    targets = set(target_names(node.target))
    return any(method(call) in named("casts") and root(call) in targets for call in calls(node))


def target_names(node: ast.AST) -> Iterator[str]:
    """The plain names that an assignment to `node` binds."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Tuple | ast.List):
        for item in node.elts:
            yield from target_names(item)
    elif isinstance(node, ast.Starred):
        yield from target_names(node.value)


class _Visitor:
    def __init__(self) -> None:
        self.effects = Effects()

    def visit_statement(self, node: ast.stmt, certain: bool) -> None:
        e = self.effects
        if isinstance(node, DEFINITIONS):
            self._bind(node.name, certain)
            reads, late = definition_reads(node)
            e.reads |= reads
            e.late |= late
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                self._bind((alias.asname or alias.name).split(".")[0], certain)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node, ast.AnnAssign):
                self.expression(node.annotation)
            if node.value is not None:
                self.expression(node.value, late=isinstance(node.value, ast.Lambda))
            for target in targets:
                self._target(target, certain, isinstance(node, ast.AugAssign))
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if (name := root(target)) and not isinstance(target, ast.Name):
                    e.changes.add(name)
        elif isinstance(node, ast.Expr):
            self.expression(node.value)
            self._bare(node.value)
        else:
            self._compound(node)

    def _compound(self, node: ast.stmt) -> None:
        self.effects.changes |= changed_in_loop(node)
        inside, targets = _Visitor(), set[str]()
        for name, value in ast.iter_fields(node):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.stmt):
                    inside.visit_statement(item, certain=isinstance(node, ast.With))
                elif isinstance(item, ast.ExceptHandler | ast.match_case):
                    body = _Visitor()
                    for inner in item.body:
                        body.visit_statement(inner, certain=False)
                    inside._add(body.effects, {getattr(item, "name", None) or ""})
                elif isinstance(item, ast.withitem):
                    (inside if targets else self).expression(item.context_expr)
                    targets |= set(target_names(item.optional_vars)) if item.optional_vars is not None else set()
                elif isinstance(item, ast.expr) and name == "target":
                    targets |= set(target_names(item))
                elif isinstance(item, ast.expr):
                    self.expression(item)
        self._add(inside.effects, targets)

    def _add(self, inside: Effects, own: set[str]) -> None:
        """Add the effects of a body, for which its statement binds these names."""
        for one in fields(Effects):
            names: set[str] = getattr(self.effects, one.name)
            names |= getattr(inside, one.name) - own
        self.effects.own |= own - {""}

    def _bind(self, name: str, certain: bool) -> None:
        (self.effects.binds if certain else self.effects.may_bind).add(name)

    def _target(self, target: ast.expr, certain: bool, augmented: bool) -> None:
        if isinstance(target, ast.Name):
            if augmented:
                self.effects.changes.add(target.id)
                self.effects.reads.add(target.id)
            else:
                self._bind(target.id, certain)
        elif isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                self._target(item, certain, augmented)
        elif isinstance(target, ast.Starred):
            self._target(target.value, certain, augmented)
        else:
            if name := root(target):
                self.effects.changes.add(name)
            self.expression(target)

    def _bare(self, value: ast.expr) -> None:
        """A call whose result is unused changes its receiver or its arguments, unless it is known to only look."""
        if isinstance(value, ast.Await):
            value = value.value
        if not isinstance(value, ast.Call):
            return
        called = method(value) or getattr(value.func, "id", "")
        if isinstance(value.func, ast.Attribute) and (name := root(value.func)) and called not in named("looks"):
            self.effects.changes.add(name)
        if called in named("prints") or called.startswith(("save_pretrained", "push_to_hub")):
            return
        for argument in [*value.args, *(item.value for item in value.keywords)]:
            if isinstance(argument, ast.Name):
                self.effects.changes.add(argument.id)

    def expression(self, node: ast.expr, late: bool = False) -> None:
        names = free_names(node)
        (self.effects.late if late else self.effects.reads).update(names)
        self._files(node)
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr) and isinstance(inner.target, ast.Name):
                self._bind(inner.target.id, False)
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
                if (inner.func.attr in named("mutates") or in_place(inner)) and (name := root(inner.func)) in names:
                    self.effects.changes.add(str(name))

    def _files(self, node: ast.expr) -> None:
        """Track files like names: writing a file changes `file:NAME`, mentioning it reads that name."""
        written: set[ast.AST] = set()
        for call in calls(node):
            if (path := written_path(call)) is not None:
                written.add(path)
                if name := root(path):
                    self.effects.changes.add(name)
        for inner in ast.walk(node):
            if (name := file_name(inner)) is not None:
                (self.effects.changes if inner in written else self.effects.reads).add(name)


def written_path(call: ast.Call) -> ast.expr | None:
    """The file that a call writes, as an expression; None if it writes no file that we know of."""
    name = method(call) or getattr(call.func, "id", "")
    if name == "open":
        mode = call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "mode"), None)
        if isinstance(mode, ast.Constant) and isinstance(mode.value, str) and set(mode.value) & set("wax+"):
            return call.args[0] if call.args else None
    if name in ("write_text", "write_bytes") and isinstance(call.func, ast.Attribute):
        inside = call.func.value
        return inside.args[0] if isinstance(inside, ast.Call) and inside.args else inside
    if name in named("writes") and call.args:
        return call.args[0]
    return None


def is_path(value: object) -> bool:
    """Whether a literal looks like the name of a data file."""
    return isinstance(value, str) and bool(
        re.fullmatch(
            r"[\w./~ -]{1,200}\.(jsonl?|csv|tsv|txt|parquet|arrow|xlsx?|pkl|ya?ml|gz|zip|db|xml|html|md|pdf)", value
        )
    )


def file_name(node: ast.AST) -> str | None:
    """The name under which a literal path is tracked."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_path(node.value):
        return f"file:{node.value.removeprefix('./')}"
    return None


def definition_reads(node: DEFINITIONS) -> tuple[set[str], set[str]]:
    """Names read at definition (decorators, defaults, bases), and names read when called."""
    now: set[str] = set()
    for item in node.decorator_list:
        now |= free_names(item)
    if isinstance(node, ast.ClassDef):
        for item in [*node.bases, *(keyword.value for keyword in node.keywords)]:
            now |= free_names(item)
        own = {name for inner in node.body for name in effects(inner).binds}
        inside = [effects(inner) for inner in node.body]
        reads = {name for e in inside for name in e.reads} - own
        return now | reads, {name for e in inside for name in e.late} - own
    arguments = node.args
    for item in [*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)]:
        now |= free_names(item)
    for item in _arguments(arguments):
        if item.annotation is not None:
            now |= free_names(item.annotation)
    if node.returns is not None:
        now |= free_names(node.returns)
    local = {item.arg for item in _arguments(arguments)}
    return now, body_reads(node.body, local)


def body_reads(body: Sequence[ast.stmt], local: set[str]) -> set[str]:
    """Names from outside that a function's body reads."""
    outside: set[str] = set()
    for node in body:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Global | ast.Nonlocal):
                outside |= set(inner.names)
    each = [effects(node) for node in body]
    own = {name for e in each for name in e.all_binds | e.own} | local
    return ({name for e in each for name in e.all_reads} - own) | outside


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    extra = [item for item in (arguments.vararg, arguments.kwarg) if item is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra]


def free_names(node: ast.AST) -> set[str]:
    """Names from outside that an expression reads, without builtins."""
    if isinstance(node, ast.Name):
        return set() if node.id in _BUILTINS and node.id not in ("input",) else {node.id}
    if isinstance(node, ast.Lambda):
        defaults = [*node.args.defaults, *(item for item in node.args.kw_defaults if item is not None)]
        names = free_names(node.body) - {item.arg for item in _arguments(node.args)}
        return names.union(*(free_names(item) for item in defaults))
    if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        bound: set[str] = set()
        names: set[str] = set()
        for part in node.generators:
            names |= free_names(part.iter) - bound
            bound |= set(target_names(part.target))
            for condition in part.ifs:
                names |= free_names(condition) - bound
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        return names.union(*(free_names(item) for item in results)) - (bound - names)
    found: set[str] = set()
    for inner in ast.iter_child_nodes(node):
        found |= free_names(inner)
    return found


def functions_that_change(nodes: Sequence[ast.stmt]) -> dict[str, set[str]]:
    """Functions that fill lists or dicts of the module, or assign its names with `global` -> these names."""
    made = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    collections: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            called = {root(value) for value in values if isinstance(value, ast.Call)}
            if any(isinstance(value, made) for value in values) or called & _COLLECTIONS:
                collections |= {name for target in targets for name in target_names(target)}
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    found = {name: _changed_outside(node, collections) for name, node in functions.items()}
    while True:
        more = {name: found[name] | changed_by_calls(node, found, inside=True) for name, node in functions.items()}
        if more == found:
            return {name: names for name, names in found.items() if names}
        found = more


_COLLECTIONS = frozenset("list dict set defaultdict deque Counter OrderedDict".split())


def _changed_outside(function: ast.FunctionDef, collections: set[str]) -> set[str]:
    """Names of the module that a function assigns with `global`, and collections of it that the function changes."""
    declared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    bound = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    local = ({item.arg for item in _arguments(function.args)} | bound) - declared
    changed: set[str | None] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed.add(root(node))
        elif method(node) in named("fills"):
            changed.add(root(node))
    return (declared & bound) | ({name for name in changed if name is not None} & collections - local)


def changed_by_calls(node: ast.stmt, changing: dict[str, set[str]], *, inside: bool = False) -> set[str]:
    """What a statement changes by calling such functions, or by passing them on, as in `rows.map(function)`.

    `inside`: of a function's body, not of its definition."""
    if isinstance(node, DEFINITIONS) and not inside:
        return set()
    found: set[str] = set()
    for call in calls(node):
        for one in [call.func, *call.args, *(item.value for item in call.keywords)]:
            found |= changing.get(one.id, set()) if isinstance(one, ast.Name) else set()
    return found


# --- backward slices --------------------------------------------------------------------------------------------------


class Program:
    """Statements in order, with their effects and backward slices."""

    def __init__(self, statements: Sequence[Statement]):
        self.statements = list(statements)
        self.effects = [effects(statement.node) for statement in self.statements]
        self._definitions = {
            node.name: node
            for node in (statement.node for statement in self.statements)
            if isinstance(node, DEFINITIONS)
        }
        self.imports = dotted_imports(statement.node for statement in self.statements)
        changing = functions_that_change([statement.node for statement in self.statements])
        for statement, found in zip(self.statements, self.effects, strict=True):
            found.changes |= self.written(statement.node) | changed_by_calls(statement.node, changing)
            if self.sets_library(statement.node):
                found.changes.clear()  # a process-wide setting, which no value depends on

    def written(self, node: ast.stmt) -> set[str]:
        """The files that a statement writes, itself or by a function of the notebook: `file:NAME`, or the path's
        variable."""
        if isinstance(node, DEFINITIONS):
            return set()
        paths = [path for call in calls(node) for path in [written_path(call), *self._paths_written(call)]]
        return {name for path in paths if path is not None and (name := file_name(path) or root(path))}

    def _paths_written(self, call: ast.Call) -> list[ast.expr]:
        """The files that the notebook's function writes: the call's arguments for its parameters, and literals."""
        definition = self.definition(getattr(call.func, "id", ""))
        if not isinstance(definition, ast.FunctionDef):
            return []
        names = [item.arg for item in [*definition.args.posonlyargs, *definition.args.args]]
        given = [*zip(names, call.args, strict=False), *((item.arg, item.value) for item in call.keywords)]
        paths = [path for inner in calls(definition) if (path := written_path(inner)) is not None]
        names_written = {root(path) for path in paths}
        return [value for name, value in given if name in names_written] + [path for path in paths if file_name(path)]

    def definition(self, name: str) -> DEFINITIONS | None:
        """The function or class with this name; the last one if several cells define it."""
        return self._definitions.get(name)

    def called(self, node: ast.AST) -> list[DEFINITIONS]:
        """The functions and classes of the notebook that a node calls by their names."""
        names = {call.func.id for call in calls(node) if isinstance(call.func, ast.Name)}
        return [self._definitions[name] for name in sorted(names & self._definitions.keys())]

    @cached_property
    def methods(self) -> set[str]:
        """The names of the methods of the notebook's classes."""
        classes = [one.node for one in self.statements if isinstance(one.node, ast.ClassDef)]
        return {one.name for node in classes for one in node.body if isinstance(one, ast.FunctionDef)}

    @cached_property
    def values(self) -> dict[str, list[ast.AST]]:
        """All that each name is assigned, at any depth."""
        found: dict[str, list[ast.AST]] = {}
        for node in (node for statement in self.statements for node in ast.walk(statement.node)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For | ast.comprehension):
                value = node.iter if isinstance(node, ast.For | ast.comprehension) else node.value or ast.Pass()
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name in target_names(target):
                        found.setdefault(name, []).append(value)
        return found

    def slice(self, names: Iterable[str], before: int, stop: Set[str] = frozenset()) -> set[int]:
        """The positions of what the values of `names` depend on just before position `before`.

        Args:
            stop: names that are not followed, because they are passed in from outside.
        """
        wanted = [(name, before) for name in names]
        seen: set[tuple[str, int]] = set()
        passed: set[tuple[str, int]] = set()
        places: set[int] = set()
        while wanted:
            name, limit = wanted.pop()
            if name in stop or (name, limit) in seen:
                continue
            seen.add((name, limit))
            for place in self._reaching(name, limit, passed):
                e = self.effects[place]
                places.add(place)
                wanted += [(read, place) for read in e.reads]
                wanted += [(read, limit) for read in e.late]
        return places

    def _reaching(self, name: str, limit: int, passed: set[tuple[str, int]]) -> Iterator[int]:
        """Positions before `limit` that bind or change `name`, back to the last unconditional binding.

        `passed`: what a slice has followed so far (added to). It stops where it came by before, unless a statement on
        the way reads names when it is called, which depend on `limit`.
        """
        touching, is_late = self._touching.get(name, ([], False))
        for place in reversed(touching[: bisect_left(touching, limit)]):
            if (name, place) in passed and not is_late:
                return
            passed.add((name, place))
            yield place
            if name in self.effects[place].binds:
                return

    @cached_property
    def _touching(self) -> dict[str, tuple[list[int], bool]]:
        """Name -> the positions that may bind or change it, and whether one of them reads names when called."""
        found: dict[str, list[int]] = {}
        for place, e in enumerate(self.effects):
            for name in e.all_binds | e.changes:
                found.setdefault(name, []).append(place)
        return {name: (places, any(self.effects[one].late for one in places)) for name, places in found.items()}

    def sets_library(self, node: ast.stmt) -> bool:
        """Whether it sets an option of a library, as in `torch._dynamo.config.x = ...`."""
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            return self.dotted(node.targets[0]).split(".")[0] in named("configured")
        call = lone_call(node)
        return call is not None and matches("sets library", self.dotted(call.func))

    def dotted(self, node: ast.AST) -> str:
        """The full dotted name of an expression, resolved by the notebook's imports, or ''."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.imports.get(node.id, node.id), *reversed(parts)])


def dotted_imports(nodes: Iterable[ast.stmt]) -> dict[str, str]:
    """Local name -> full dotted name, for every import at any depth."""
    found: dict[str, str] = {}
    for outer in nodes:
        for node in ast.walk(outer):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found
