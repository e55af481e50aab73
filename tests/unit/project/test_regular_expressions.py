"""Every regular expression of the package takes linear time, whatever the text: no notebook, row, template or error
message makes a command run long."""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

import pytest

import finetune
from finetune.convert import knowledge
from finetune.redact import redact

PACKAGE = Path(finetune.__file__).parent
METHODS = ("compile", "search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer")
UNITS = (
    *"""[](){}<>"'`\\/=#-_.:,;|&?@$%!*~^+aA0 \t\n\0é""",
    *("a ", "a_", "a.", "a-", "a=", "a:", "a\n", "aA", "a0", "A0", "\\n", " \n", "\r\n", "()", "[]", "<a", "</", "''"),
    *(
        "http://",
        "aB3/+",
        "a.b(",
        "# ",
        "- ",
        "= ",
        "token:",
        "AccountKey=",
        "import a\n",
        "x = 1\n",
        "<|a|>",
        "a(a",
        '\\"',
        "\\'",
    ),
)
SEPARATORS = "-_ =./,\n"
BOUND = 1_000  # a repetition of at most so many is a constant
SIZES = (24, 1_000, 10_000)  # characters; each is compared with half of it
NEGLIGIBLE = 0.002  # CPU seconds: a quadratic expression needs more for 10,000 characters
CLEAR = 0.05  # CPU seconds that no other process distorts by much: measured once
RATIO = 3.0  # of the CPU time for twice the text: 2 is linear, 4 quadratic


@dataclass(frozen=True)
class Expression:
    """A regular expression of the source, and how it is applied."""

    where: str
    pattern: str
    flags: int
    method: str  # match, fullmatch, or search for everything that looks at each position

    def apply(self, text: str) -> None:
        compiled = re.compile(self.pattern, self.flags)
        if self.method == "search":
            for _ in compiled.finditer(text):
                pass
        else:
            getattr(compiled, self.method)(text)


# --- the expressions of the source ------------------------------------------------------------------------------------


class Unknown(Exception):
    """The value is not known before the program runs."""


def text_of(node: ast.expr, names: dict[str, ast.expr], *, guess: bool) -> str:
    """The value of an expression of text. `guess`: what is only known when the program runs is the word `name`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, names, guess=guess) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, names, guess=guess)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, names, guess=guess) + text_of(node.right, names, guess=guess)
    if isinstance(node, ast.Name) and node.id in names:
        return text_of(names[node.id], {key: names[key] for key in names if key != node.id}, guess=guess)
    if guess:
        return "name"
    raise Unknown


def assigned(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """The names that are assigned once, directly in `body`."""
    found: dict[str, ast.expr] = {}
    for node in body:
        for one in ast.walk(node) if isinstance(node, ast.FunctionDef) else [node]:
            if isinstance(one, ast.Assign):
                found |= {name.id: value for name, value in pairs_of(one) if isinstance(name, ast.Name)}
    return found


def pairs_of(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """(target, value) of an assignment, those of `a, b = 1, 2` each."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def flags_of(call: ast.Call, position: int) -> int:
    given = [word.value for word in call.keywords if word.arg == "flags"] or call.args[position : position + 1]
    return int(eval(ast.unparse(given[0]), {"re": re})) if given else 0


def in_source(source: str, path: Path) -> Iterator[Expression]:
    """The expressions of a file of the package."""
    tree = ast.parse(source)
    module = "finetune." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    names = assigned(tree.body)
    used: dict[str, set[str]] = {}  # methods, by the name of a compiled expression
    of: dict[int, str] = {}  # that name, or the method applied to it at once
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            used.setdefault(ast.unparse(node.value), set()).add(node.attr)
        elif isinstance(node, ast.Assign):
            of |= {id(value): ast.unparse(target) for target, value in pairs_of(node)}
    local: dict[ast.AST, dict[str, ast.expr]] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            local |= dict.fromkeys(ast.walk(function), assigned([function]))
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "re"
            and node.func.attr in METHODS
        ):
            continue
        kind = node.func.attr
        where = f"{module}:{node.lineno}"
        position = {"compile": 1, "sub": 4, "subn": 4, "split": 3}.get(kind, 2)
        methods = used.get(of.get(id(node), ast.unparse(node)), {"search"}) if kind == "compile" else {kind}
        try:
            pattern = text_of(node.args[0], names | local.get(node, {}), guess=node in local)
        except Unknown:
            yield from in_module(module)
            continue
        for method in methods:
            yield Expression(where, pattern, flags_of(node, position), method if "match" in method else "search")


def in_module(module: str) -> Iterator[Expression]:
    """The compiled expressions among the globals of a module, for those that are made by more than constants."""
    pending: list[Any] = list(vars(importlib.import_module(module)).values())
    while pending:
        value = pending.pop()
        if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
            yield Expression(module, value.pattern, value.flags, "search")
        elif isinstance(value, tuple | list):
            pending += value


def every_expression() -> list[Expression]:
    found = [one for path in sorted(PACKAGE.rglob("*.py")) for one in in_source(path.read_text(encoding="utf-8"), path)]
    return list({(one.pattern, re.compile(one.pattern, one.flags).flags, one.method): one for one in found}.values())


# --- texts for an expression ------------------------------------------------------------------------------------------


def sample(nodes: Any, times: int = 1) -> str:
    """A text that the parsed expression matches, apart from what it asserts: each repetition `times` times at least."""
    return "".join(sample_of(operation, argument, times) for operation, argument in nodes)


def sample_of(operation: Any, argument: Any, times: int) -> str:
    name = str(operation)
    if name == "LITERAL":
        return chr(argument)
    if name == "NOT_LITERAL":
        return "b" if argument == ord("a") else "a"
    if name == "ANY":
        return "a"
    if name == "IN":
        return member(argument)
    if name == "BRANCH":
        return sample(argument[1][0], times)
    if name == "SUBPATTERN":
        return sample(argument[3], times)
    if name == "ATOMIC_GROUP":
        return sample(argument, times)
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, most, inner = argument
        return sample(inner, times) * min(max(least, times), most)
    return ""


CLASSES = {"DIGIT": "0", "NOT_DIGIT": "a", "SPACE": " ", "NOT_SPACE": "a", "WORD": "a", "NOT_WORD": "-"}


def member(items: Any) -> str:
    """A character of a set."""
    if str(items[0][0]) == "NEGATE":
        allowed = re.compile("".join(["[^", *(escaped(item) for item in items[1:]), "]"]))
        return next(one for one in "aA0 -=/\\\n~\0" if allowed.match(one))
    operation, argument = items[0]
    if str(operation) == "LITERAL":
        return chr(argument)
    return chr(argument[0]) if str(operation) == "RANGE" else CLASSES[str(argument).removeprefix("CATEGORY_")]


def escaped(item: Any) -> str:
    operation, argument = item
    if str(operation) == "LITERAL":
        return re.escape(chr(argument))
    if str(operation) == "RANGE":
        return f"{re.escape(chr(argument[0]))}-{re.escape(chr(argument[1]))}"
    letters = {"DIGIT": r"\d", "NOT_DIGIT": r"\D", "SPACE": r"\s", "NOT_SPACE": r"\S", "WORD": r"\w", "NOT_WORD": r"\W"}
    return letters[str(argument).removeprefix("CATEGORY_")]


def children(operation: Any, argument: Any) -> list[Any]:
    name = str(operation)
    if name == "BRANCH":
        return list(argument[1])
    if name == "SUBPATTERN":
        return [argument[3]]
    if name == "ATOMIC_GROUP":
        return [argument]
    if name in ("ASSERT", "ASSERT_NOT"):
        return [argument[1]]
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return [argument[2]]
    return [one for one in argument[1:] if one is not None] if name == "GROUPREF_EXISTS" else []


def is_long(operation: Any, argument: Any) -> bool:
    return "REPEAT" in str(operation) and argument[1] > BOUND


def pumped(nodes: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """(head, unit): what leads to each long repetition of an expression, and what it repeats."""
    for index, (operation, argument) in enumerate(nodes):
        start = before + sample(nodes[:index])
        if is_long(operation, argument):
            unit = sample(argument[2]) or "a"
            after = list(nodes[index + 1 :])
            near = next((n for n, (kind, given) in enumerate(after) if is_long(kind, given)), len(after))
            yield start, unit
            yield start, sample(after)
            yield start, sample(after[:near])  # up to the next long repetition
            yield from (("", start + part + end) for part in ("", unit) for end in ("", *SEPARATORS))
        for child in children(operation, argument):
            yield from pumped(child, start)


def texts(expression: Expression) -> list[tuple[str, str]]:
    """(head, unit) of the texts for an expression. None if its repetitions are bounded: then so is its work per
    position."""
    parsed = _parser.parse(expression.pattern, expression.flags)
    own = list(pumped(parsed))
    if not own:
        return []
    whole, twice = sample(parsed), sample(parsed, 2)
    own += [("", unit) for one in (whole, twice) for unit in (one, one[:-1], one[1:], one + "\n")]
    heads = {"", *(head for head, _ in own)} if expression.method != "search" else {""}
    own += [(head, unit) for unit in UNITS for head in heads]
    return [(head, unit) for head, unit in dict.fromkeys(own) if unit]


# --- the work ---------------------------------------------------------------------------------------------------------


def seconds(call: Callable[[str], Any], head: str, unit: str, size: int, repeats: int) -> float:
    text = head + unit * (size // len(unit)) + "\0"
    found = []
    for _ in range(repeats):
        start = time.process_time()
        call(text)
        found.append(time.process_time() - start)
        if found[-1] > CLEAR:
            break
    return min(found)


def is_slow(call: Callable[[str], Any], head: str, unit: str) -> bool:
    """Whether twice the text takes much more than twice the CPU time. Short texts come first: under an expression that
    is worse than quadratic, longer ones would not end."""
    for size in SIZES:
        if seconds(call, head, unit, size, 1) < NEGLIGIBLE:
            continue
        for one in (size, 2 * size if size > 100 else size):  # again: the machine may be busy
            half, whole = (seconds(call, head, unit, length, 3) for length in (one // 2, one))
            if whole < NEGLIGIBLE or whole < RATIO * half:
                break
        else:
            return True
    return False


@pytest.mark.campaign
def test_twice_the_text_takes_twice_the_time() -> None:
    """Every expression of the package on texts that repeat its own parts, and those that others stumble over."""
    expressions = every_expression()
    assert len(expressions) > 200
    slow = [
        f"{one.where}: {one.pattern!r}, {one.method}, on {head!r} and {unit!r} repeated"
        for one in expressions
        if (found := next(((head, unit) for head, unit in texts(one) if is_slow(one.apply, head, unit)), None))
        for head, unit in [found]
    ]
    assert not slow, "\n".join(["more than linear:", *slow])


REPEATED = (
    "token:",
    "token=",
    "AccountKey=",
    "a:",
    'token:"',
    "token:'a",
    '\\"token":\\"',
    "--token ",
    "bot a",
    "curl -u a:",
)


@pytest.mark.parametrize("name", ["redact", "knowledge"])
def test_twice_the_text_of_a_function(name: str) -> None:
    """What searches again from where the last match ended, and expressions that are made of a table."""
    if name == "redact":
        cases = [(redact, unit) for unit in REPEATED]
    else:
        cases = [
            (lambda text, kind=kind: knowledge.matches(kind, text), unit)
            for kind in knowledge.KINDS
            for unit in ("\n", "Vision", "Trainer.", "Model", "a.")
        ]
    assert [unit for call, unit in cases if is_slow(call, "", unit)] == []


# Expressions that the package had, the same with bounds, and one that takes twice the time with each character.
SLOW = [
    (r"<[^>]*>|!?\[([^\]]*)\]\([^)]*\)", "search"),
    (r"^\s*(?:from|import) unsloth", "search"),
    (r"\w+For[A-Z]\w+|Fast\w*Model", "fullmatch"),
    (r"\s+#.*$", "search"),
    (r"\"(?:[^\"\\]|\\.)*\"|'[^']*'", "search"),
    (r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}", "search"),
    (r"remove_columns\W.*\b(prompt|completion)\b", "search"),
    (r"(a|aa)+$", "match"),
]


@pytest.mark.parametrize(("pattern", "method"), SLOW)
@pytest.mark.campaign
def test_what_is_not_linear_is_found(pattern: str, method: str) -> None:
    one = Expression("here", pattern, re.MULTILINE, method)
    assert any(is_slow(one.apply, head, unit) for head, unit in texts(one))


def test_expressions_are_found_in_the_source() -> None:
    """As they are written: constants, parts of others, several at once, compiled first, and of values at run time."""
    path = PACKAGE / "here.py"
    source = (
        '_A = r"x+"\n_B, _C = re.compile(_A + r"y*", re.I), re.compile(f"{_A}z")\n'
        "_B.match('')\nlist(map(_C.fullmatch, []))\n"
        'def f(text, given):\n    part = "q*"\n    re.sub(rf"{part}w", "", text, flags=re.M)\n'
        '    re.findall(rf"{given}+", text)\n'
    )
    found = [(one.pattern, one.flags, one.method) for one in in_source(source, path)]
    assert found == [
        ("x+y*", re.I, "match"),
        ("x+z", 0, "fullmatch"),
        ("q*w", re.M, "search"),
        ("name+", 0, "search"),
    ]
