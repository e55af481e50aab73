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
    """Route calls, `is`, unpacking and bare expressions through the functions above, and count steps."""

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
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot):
            same = ast.Constant(isinstance(node.ops[0], ast.Is))
            return _helper("__is__", [node.left, node.comparators[0], same])
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
