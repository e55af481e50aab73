"""The notebook's own text of a statement with what was rewritten in it, so that comments and the spelling of numbers
stay."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

Edit = tuple[int, int, str]  # of the bytes from one place to another, the new text


class _Unclear(Exception):
    """What changed has no place in the text."""


def edited(source: str, new: ast.stmt) -> str | None:
    """The text of a statement that became `new`; None if it has to be written anew.

    Args:
        source: one statement. The parts of `new` that are its own have their places in it.
    """
    (old,) = ast.parse(source).body
    text = _Text(source)
    try:
        edits = sorted(text.edits(old, new), reverse=True)
    except _Unclear:
        return None
    raw = source.encode()
    for start, end, replacement in edits:
        raw = raw[:start] + replacement.encode() + raw[end:]
    try:
        found = ast.parse(raw).body
    except SyntaxError:
        return None
    return raw.decode() if [ast.dump(one) for one in found] == [ast.dump(new)] else None


class _Text:
    def __init__(self, source: str) -> None:
        self.raw = source.encode()
        self.lines = [0]
        for line in self.raw.split(b"\n"):
            self.lines.append(self.lines[-1] + len(line) + 1)

    def place(self, node: ast.AST) -> tuple[int, int]:
        """The first and the last byte of an expression or keyword."""
        if not isinstance(node, ast.expr | ast.keyword) or node.end_lineno is None or node.end_col_offset is None:
            raise _Unclear
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def edits(self, old: ast.AST, new: ast.AST) -> list[Edit]:
        if ast.dump(old) == ast.dump(new):
            return []
        if type(old) is type(new) and not isinstance(old, ast.JoinedStr | ast.Constant):
            try:
                if isinstance(old, ast.Call) and isinstance(new, ast.Call):
                    return self.edits(old.func, new.func) + self._pairs(old.args, new.args) + self._keywords(old, new)
                return [edit for name in old._fields for edit in self._field(getattr(old, name), getattr(new, name))]
            except _Unclear:
                pass
        return [(*self.place(old), _source(new))]

    def _field(self, old: object, new: object) -> list[Edit]:
        if isinstance(old, ast.AST) and isinstance(new, ast.AST):
            return self.edits(old, new)
        if isinstance(old, list) and isinstance(new, list):
            return self._pairs(old, new)
        if old != new:
            raise _Unclear
        return []

    def _pairs(self, old: Sequence[object], new: Sequence[object]) -> list[Edit]:
        if len(old) != len(new):
            raise _Unclear
        return [edit for one, other in zip(old, new, strict=True) for edit in self._field(one, other)]

    def _keywords(self, old: ast.Call, new: ast.Call) -> list[Edit]:
        """Keywords that stay have their place; the others are left out or added at the end of the call."""
        kept = {self.place(one): one for one in new.keywords if getattr(one, "end_lineno", None) is not None}
        found: list[Edit] = []
        for one in old.keywords:
            other = kept.pop(self.place(one), None)
            found += self._removed(one) if other is None else self.edits(one, other)
        rest = {id(one) for one in kept.values()}
        added = [one for one in new.keywords if id(one) in rest or getattr(one, "end_lineno", None) is None]
        return found + self._added(old, added)

    def _removed(self, item: ast.keyword) -> list[Edit]:
        """The keyword with its comma, and with its comment if nothing else is on the line."""
        start, end = self.place(item)
        after = re.compile(rb"[^\S\n]*,?(?:[^\S\n]*#[^\n]*(?=\n)|[^\S\n]*)").match(self.raw, end)
        return [(start, after.end() if after else end, "")]

    def _added(self, call: ast.Call, items: Sequence[ast.keyword]) -> list[Edit]:
        if not items:
            return []
        close = self.place(call)[1] - 1
        text, ends = ", ".join(map(_source, items)), [self.place(one)[1] for one in [*call.args, *call.keywords]]
        if not ends or b"," in re.sub(rb"#[^\n]*", b"", self.raw[max(ends) : close]):
            return [(close, close, text)]
        return (
            [(close, close, f", {text}")] if max(ends) == close else [(close, close, text), (max(ends), max(ends), ",")]
        )


def _source(node: ast.AST) -> str:
    return f"**{ast.unparse(node.value)}" if isinstance(node, ast.keyword) and not node.arg else ast.unparse(node)
