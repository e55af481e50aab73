"""The source of a script: the statements that were emitted, and text of the notebook as literals and comments only.

Text becomes source by `repr`, `docstring` or `comment`, an expression by `expression`. `script` compares the finished
script with the statements that were emitted, so text that became code is not written.
"""

from __future__ import annotations

import ast
import copy
import functools
import io
import subprocess
import tokenize
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from finetune.errors import RunError, UserError

LINE = 120


# --- text -------------------------------------------------------------------------------------------------------------


def is_visible(character: str) -> bool:
    """Whether it may be written as it is: no line separator, control character, change of direction or surrogate."""
    return character.isprintable() or unicodedata.category(character) == "Zs"


def one_line(text: str) -> str:
    """The text with an escape such as `\\n` for each character that is not visible."""
    return "".join(one if is_visible(one) else repr(one).strip("'") for one in text)


def docstring(text: str) -> str:
    """A literal in triple quotes with this value. Only its newlines are written as they are."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"""' + "\n".join(map(one_line, escaped.split("\n"))) + '"""'


def comment(text: str) -> str:
    return f"# {one_line(text)}"


def visible_comments(code: str) -> str:
    """Code of the notebook, in whose comments each character that is not visible is an escape: text that changes
    direction would make a reader see other code."""
    if all(map(is_visible, code.replace("\n", ""))):
        return code
    lines = code.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(code, newline="").readline):
        if token.type == tokenize.COMMENT:
            line, start = token.start
            lines[line - 1] = lines[line - 1][:start] + one_line(lines[line - 1][start:])
    return "\n".join(lines)


# --- statements -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """Lines of a script and the statements that they must parse to."""

    text: str
    nodes: Sequence[ast.stmt] = field(default_factory=list)


BLANK = Part(text="")


def own(text: str) -> Part:
    """Code that the converter writes: a template, with names and unparsed expressions of the notebook."""
    return Part(text=text, nodes=ast.parse(text).body)


def block(head: str, parts: Sequence[Part]) -> Part:
    """A compound statement: `head` is its first line, which may end with a comment."""
    (node,) = ast.parse(f"{head}\n    pass").body
    node.body = [inner for part in parts for inner in part.nodes]  # type: ignore[attr-defined]
    return Part(text="\n".join([head, *(indented(part.text) for part in parts)]), nodes=[node])


def in_strings(tree: ast.AST) -> set[int]:
    """The lines, from 1, that begin inside a string."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and (node.end_lineno or 0) > node.lineno:
            if isinstance(node, ast.JoinedStr) or isinstance(node.value, str | bytes):
                inside |= set(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    return inside


def indented(text: str) -> str:
    """Indent each line that does not begin inside a string by four spaces."""
    inside, lines = in_strings(ast.parse(text)), text.split("\n")
    return "\n".join(
        line if not line.strip() or number in inside else f"    {line}" for number, line in enumerate(lines, 1)
    )


def expression(template: str, **parts: ast.expr) -> ast.expr:
    """A template with expressions for some of its names: `expression("ROWS.map(F)", ROWS=rows, F=function)`."""

    class Filled(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return copy.deepcopy(parts[node.id]) if node.id in parts else node

    return Filled().visit(ast.parse(template, mode="eval").body)


# --- the script -------------------------------------------------------------------------------------------------------


def script(title: str, parts: Sequence[Part]) -> str:
    """The formatted script, with `title` as its docstring.

    Raises:
        RunError: its statements are not those of the parts.
    """
    text = formatted("\n".join([docstring(title), *(part.text for part in parts), ""]))
    emitted = [ast.Expr(ast.Constant(title)), *(node for part in parts for node in part.nodes)]
    try:
        found = ast.parse(text.encode()).body  # bytes: as Python reads the file
    except (SyntaxError, ValueError) as error:
        raise RunError(f"the converted script does not parse: {error}. Please report this notebook.") from None
    dumps, wanted = _dumps(found), _dumps(emitted)
    if dumps != wanted:
        pairs = zip(found, dumps, [*wanted, *[""] * len(found)], strict=False)
        line = next((one.lineno for one, text, other in pairs if text != other), 0)
        raise RunError(
            f"the converted script has other statements than were emitted, from line {line}; it was not written."
            " Please report this notebook."
        )
    return text


def _dumps(nodes: Sequence[ast.stmt]) -> list[str]:
    """Statements as texts that are equal for equal trees alone, without what the formatter changes: the whitespace of a
    docstring and the prefix of u"text"."""
    nodes = copy.deepcopy(list(nodes))
    for node in (inner for one in nodes for inner in ast.walk(one)):
        if isinstance(node, ast.Constant):
            node.kind = None
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value = ast.Constant(" ".join(node.value.value.split()))
    return list(map(ast.dump, nodes))


@functools.lru_cache(maxsize=4)  # V6 converts a second time, with the same texts to format
def formatted(source: str) -> str:
    """The source, formatted by `ruff format`, so that editors leave it unchanged."""
    done = run_ruff("format", source, "--line-length", str(LINE))
    if done.returncode:
        raise UserError(
            f"cannot format the converted script: {done.stderr.decode()[:300]}. Please report this notebook."
        )
    return done.stdout.decode()


def run_ruff(command: str, code: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    fixed = ["--isolated", "--target-version", "py311", "--stdin-filename", "script.py"]
    return subprocess.run(
        [ruff(), command, *fixed, *options, "-"], input=code.encode(), capture_output=True, check=False
    )


def ruff() -> str:
    try:
        from ruff import find_ruff_bin
    except ImportError:
        raise UserError(
            "ruff, which formats and checks converted scripts, is not installed. Install it with "
            "`pip install 'finetune-multigpu[convert]'`."
        ) from None
    return find_ruff_bin()
