"""The notebook's own text of a statement with what was rewritten in it, so that comments and the spelling of numbers
stay."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from finetune.convert.source import in_strings

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
        edits = text.edits(old, new)
    except _Unclear:
        return None
    raw = source.encode()
    # At one place, what is inserted first comes first, before what is replaced there.
    order = sorted(enumerate(edits), key=lambda one: (one[1][0], one[1][1] > one[1][0], one[0]), reverse=True)
    for _, (start, end, replacement) in order:
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
        if old and all(isinstance(one, ast.stmt) for one in old):
            return self._statements(old, new)  # type: ignore[arg-type]
        if len(old) != len(new):
            raise _Unclear
        return [edit for one, other in zip(old, new, strict=True) for edit in self._field(one, other)]

    def _statements(self, old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> list[Edit]:
        """Statements of a body that stay, that a new `if` is around, that are left out, or that are new."""
        found: list[Edit] = []
        rest, end = {(one.lineno, one.col_offset): one for one in old}, self._lines(old[0], alone=False)[0]
        indent = self.raw[end : end + old[0].col_offset].decode()
        unit = "\t" if "\t" in indent else "    "
        for one in new:
            inner = one.body[0] if isinstance(one, ast.If) and _is_new(one) else one
            was = None if _is_new(inner) else rest.pop((inner.lineno, inner.col_offset), None)
            if was is None:  # also `pass`, in place of all
                found.append((end, end, f"{indent}{_source(one)}\n"))
                continue
            start, end = self._lines(was, alone=inner is not one)
            found += self.edits(was, inner)
            if inner is not one:
                head = _source(one).partition("\n")[0]
                inside = in_strings(was)
                places = [place for n, place in enumerate(self.lines, 1) if start < place < end and n not in inside]
                found += [
                    (start, start, f"{indent}{head}\n{unit}"),
                    *((place, place, unit) for place in places),
                ]
        for one in rest.values():
            start, end = self._lines(one)
            found.append((start, end, ""))
        return found

    def _lines(self, node: ast.stmt, *, alone: bool = True) -> tuple[int, int]:
        """The first byte of a statement's first line and the first one behind its last. Raises _Unclear if other code
        is on them, and it must be `alone`."""
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]) - 1
        last = node.end_lineno or node.lineno
        start, end = self.lines[first], self.lines[last]
        rest = self.raw[self.lines[last - 1] + (node.end_col_offset or 0) : end].strip()
        if alone and (self.raw[start : start + node.col_offset].strip() or rest and not rest.startswith(b"#")):
            raise _Unclear
        return start, end

    def _keywords(self, old: ast.Call, new: ast.Call) -> list[Edit]:
        """Keywords that stay have their place; the others are left out or added at the end of the call."""
        kept = {self.place(one): one for one in new.keywords if getattr(one, "end_lineno", None) is not None}
        found: list[Edit] = []
        for one in old.keywords:
            other = kept.pop(self.place(one), None)
            found += self._removed(one) if other is None else self.edits(one, other)
        rest = {id(one) for one in kept.values()}
        added = [one for one in new.keywords if id(one) in rest or getattr(one, "end_lineno", None) is None]
        return found + self._added(old, added, comma=bool(old.keywords) and not self._stays(old.keywords[-1], new))

    def _removed(self, item: ast.keyword) -> list[Edit]:
        """The keyword with its comma, and with its comment if nothing else is on the line."""
        start, end = self.place(item)
        after = re.compile(rb"[^\S\n]*,?(?:[^\S\n]*#[^\n]*(?=\n)|[^\S\n]*)").match(self.raw, end)
        return [(start, after.end() if after else end, "")]

    def _stays(self, item: ast.keyword, new: ast.Call) -> bool:
        return any(getattr(one, "end_lineno", None) and self.place(one) == self.place(item) for one in new.keywords)

    def _added(self, call: ast.Call, items: Sequence[ast.keyword], *, comma: bool) -> list[Edit]:
        """`comma`: whether one stands before the end of the call, because its last keyword is left out."""
        if not items:
            return []
        close = self.place(call)[1] - 1
        text, ends = ", ".join(map(_source, items)), [self.place(one)[1] for one in [*call.args, *call.keywords]]
        if comma or not ends or b"," in re.sub(rb"#[^\n]*", b"", self.raw[max(ends) : close]):
            return [(close, close, text)]
        return (
            [(close, close, f", {text}")] if max(ends) == close else [(close, close, text), (max(ends), max(ends), ",")]
        )


def _is_new(node: ast.stmt) -> bool:
    """Whether a statement is none of the notebook's."""
    return ast.unparse(node).startswith(("PartialState()", "if PartialState()", "pass"))


def _source(node: ast.AST) -> str:
    return f"**{ast.unparse(node.value)}" if isinstance(node, ast.keyword) and not node.arg else ast.unparse(node)
