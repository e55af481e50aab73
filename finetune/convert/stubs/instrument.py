"""Rewrites a statement so that symbols and limits work: calls, loops, comparisons, assignments."""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Iterator
from typing import Any

from .guard import GUARDED_ATTRIBUTES, check_name
from .state import Unsafe, digest


class Instrument(ast.NodeTransformer):
    """Route calls, comparisons, subscripts, conditions, unpacking and bare expressions through helpers, and count
    steps."""

    tries = 0  # how many `try:` surround the node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("super", "locals", "globals", "vars"):
            return node
        for keyword in node.keywords:
            if keyword.arg is None:
                keyword.value = _helper("__spread__", [keyword.value])
        return _helper("__do__", [node.func, *node.args], node.keywords)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr in GUARDED_ATTRIBUTES and isinstance(node.ctx, ast.Load):
            return _helper("__guarded__", [node.value, ast.Constant(node.attr)])
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) > 1 and not all(isinstance(one, ast.Name | ast.Constant) for one in node.comparators[:-1]):
            return node
        sides = [node.left, *node.comparators]
        pairs: list[ast.expr] = [
            _helper("__compare__", [ast.Constant(_SIGNS[type(sign)]), copy.deepcopy(one), other])
            for sign, one, other in zip(node.ops, sides, sides[1:], strict=False)
        ]
        return pairs[0] if len(pairs) == 1 else ast.BoolOp(ast.And(), pairs)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        return _helper("__item__", [node.value, _as_value(node.slice)]) if isinstance(node.ctx, ast.Load) else node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        only_raises = not self.tries and not node.orelse and _leaves(node.body[-1])
        node.test = _helper("__unless__" if only_raises else "__true__", [node.test])
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        node.test = _helper("__true__", [node.test])
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        if not self.tries:
            node.test = _helper("__not__", [_helper("__unless__", [_helper("__not__", [node.test])])])
        return node

    def visit_Match(self, node: ast.Match) -> ast.AST:
        self.generic_visit(node)
        node.subject = _helper("__subject__", [node.subject])
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        self.tries += 1
        self.generic_visit(node)
        self.tries -= 1
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _helper("__not__", [node.operand]) if isinstance(node.op, ast.Not) else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Tuple | ast.List):
            node.value = _unpacking("__unpack__", node.value, node.targets[0])
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.target, ast.Tuple | ast.List):
            node.iter = _unpacking("__each__", node.iter, node.target)
        node.body.insert(0, ast.Expr(_helper("__tick__", [])))
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.target, ast.Tuple | ast.List):
            node.iter = _unpacking("__each__", node.iter, node.target)
        node.ifs.insert(0, ast.BoolOp(ast.Or(), [_helper("__tick__", []), ast.Constant(True)]))
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(_helper("__tick__", [])))
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        return ast.Expr(_helper("__bare__", [node.value]))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._marked(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._marked(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._marked(node)

    def _marked(self, node: Any) -> ast.AST:
        source = digest(_code(node))
        self.generic_visit(node)
        body = node.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body.insert(0, ast.Expr(_helper("__tick__", [])))
        node.decorator_list.append(_helper("__mark__", [ast.Constant(source)]))
        return node


def _code(node: ast.AST) -> str:
    """The code of a definition, to compare it, without docstrings: their layout changes with the indentation."""
    copied = copy.deepcopy(node)
    for inner in ast.walk(copied):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.dump(copied)


_SIGNS: dict[type, str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip


def _as_value(node: ast.expr) -> ast.expr:
    """What is between the brackets, as a value: `a:b` is `slice(a, b, None)`."""
    if isinstance(node, ast.Slice):
        parts = [part or ast.Constant(None) for part in (node.lower, node.upper, node.step)]
        return ast.Call(ast.Name("slice", ast.Load()), parts, [])
    if isinstance(node, ast.Tuple):
        node.elts = [_as_value(one) for one in node.elts]
    return node


def _leaves(node: ast.stmt) -> bool:
    """`raise`, `sys.exit()` and the like: nothing is trained afterwards."""
    if isinstance(node, ast.Raise):
        return True
    call = node.value if isinstance(node, ast.Expr) else None
    call = call.args[0] if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "__bare__" else call
    if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "__do__"):
        return False
    return ast.unparse(call.args[0]) in ("sys.exit", "exit", "quit")


def _helper(name: str, args: list[ast.expr], keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), args, keywords or [])


def _unpacking(name: str, value: ast.expr, target: Any) -> ast.Call:
    star = any(isinstance(item, ast.Starred) for item in target.elts)
    return _helper(name, [value, ast.Constant(len(target.elts)), ast.Constant(star)])


def _names(node: ast.AST) -> Iterator[str]:
    """Every name that a node binds or reads, in any field."""
    if isinstance(node, ast.Constant):
        return
    for key, value in ast.iter_fields(node):
        if key != "type_comment":
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, str):
                    yield from item.split(".")


def prepared(source: str) -> Any:
    """Compile one statement or program. Raises Unsafe for names that are not allowed."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in _names(node):
            check_name(name)
        if isinstance(node, ast.MatchClass) and GUARDED_ATTRIBUTES & set(node.kwd_attrs):
            raise Unsafe("a pattern that reads an attribute that reaches the interpreter")
    tree = ast.fix_missing_locations(Instrument().visit(tree))
    return compile(tree, "notebook", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def execute(code: Any, scope: dict[str, Any]) -> None:
    if code.co_flags & 0x80:  # top-level await
        routine = types.FunctionType(code, scope)()
        try:
            while True:
                routine.send(None)
        except StopIteration:
            return
    exec(code, scope)
