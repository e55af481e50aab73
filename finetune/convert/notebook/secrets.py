"""Remove secrets from a notebook: they are never copied into the script or the report.

A string counts as a secret because of its format, because of its name (a variable, key, argument, header or parameter),
or because it is a secret elsewhere in the notebook. In code, it is replaced by an environment variable; in comments,
docstrings, shell lines and headings it is removed. Every removal is noted, without the secret.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from finetune.convert.notebook.read import Notebook, Statement
from finetune.convert.source import docstring, expression
from finetune.redact import (
    Secret,
    find_secrets,
    holds_secret,
    is_credible,
    is_placeholder,
    is_secret_name,
    is_words,
    merge,
    redact,
    variable_for,
)

REMOVED = "<removed>"
_COMMIT = re.compile(r"[0-9a-f]{40}")  # also the format of older W&B keys
_COMMIT_NAMES = re.compile(r"rev|commit|sha|hash|digest|checksum|sum$|id$|ref", re.IGNORECASE)
_SCHEME = re.compile(r"(?:bearer|basic|token|bot)\s+(\S.*)", re.IGNORECASE | re.DOTALL)
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{16,}")
# Arguments whose values are never copied, whatever they look like.
_ARGUMENTS = frozenset(
    "token hf_token use_auth_token hub_token api_key auth_token access_token password secret".split()
)


def remove_secrets(notebook: Notebook) -> list[str]:
    """Replace secrets in statements, shell lines and headings, in place. Returns notes for the report, without them."""
    known = _Known.of(notebook)
    notes: list[str] = []
    for number, statement in enumerate(notebook.statements):
        changed, variables, has_comment = _without(statement, known)
        heading = known.removed(statement.heading)
        notebook.statements[number] = replace(changed, heading=heading)
        if "[removed]" in heading or heading != statement.heading:
            notes.append("a token in a heading was removed")
        if variables:
            notes.append(f"cell {statement.cell}: a token in the code was not copied")
        if has_comment:
            notes.append(f"cell {statement.cell}: a token in a comment or docstring was removed")
    for number, shell in enumerate(notebook.shells):
        text = known.removed(shell.text)
        if text != shell.text:
            notes.append(f"cell {shell.cell}: a token in a shell line or file was removed")
        notebook.shells[number] = replace(shell, text=text)
    notebook.unparsed = [(cell, error, known.removed(text)) for cell, error, text in notebook.unparsed]
    return list(dict.fromkeys(notes))


def note_variables(notebook: Notebook, script: str) -> list[str]:
    """A note on the variables of secrets that the script reads, and of a file that it does not load any more."""
    gone = "load_dotenv(" in notebook.text and "load_dotenv(" not in script
    read = {name for node in ast.walk(ast.parse(script)) if (name := _variable_read(node))}
    names = sorted(name for name in read if gone or is_secret_name(name))
    why = "load_dotenv() is left out; " if gone else ""
    login = "; after `hf auth login`, HF_TOKEN is not needed" if "HF_TOKEN" in names else ""
    them = "it" if len(names) == 1 else "them"
    return [f"{why}the script reads {', '.join(names)}: set {them} in your shell{login}"] if names else []


def _variable_read(node: ast.AST) -> str | None:
    """`X` of `os.getenv("X")`, `os.environ.get("X")` and `os.environ["X"]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        place, name = node.value, node.slice
    elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith(("getenv", "environ.get")):
        place, name = node.func, node.args[0]
    else:
        return None
    known = re.search(r"\b(getenv|environ|environ\.get)$", ast.unparse(place))
    return name.value if known and isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def scrub(text: str) -> str:
    """The text without anything that looks like a secret."""
    return redact(text, REMOVED)


@dataclass
class _Known:
    """Known secrets of a notebook: names of variables that hold one, and values -> environment variable."""

    names: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, notebook: Notebook) -> _Known:
        known = cls()
        for statement in notebook.statements:
            known.names |= {
                value.id
                for name, value, _ in _named(statement.node)
                if isinstance(value, ast.Name) and is_secret_name(name)
            }
        for statement in notebook.statements:
            for node, variable in known.by_name(statement.node).items():
                text = _credential(_literal(node) or "")
                if len(text) >= 8 and not is_placeholder(text):
                    known.values.setdefault(text, variable)
        return known

    def by_name(self, root: ast.AST) -> dict[ast.expr, str]:
        """Literals that are secrets because of their name -> environment variable."""
        found: dict[ast.expr, str] = {}
        for name, value, place in _named(root):
            text = _literal(value)
            if text is None:
                continue
            shape = next((item for item in find_secrets(text) if item.end - item.start == len(text)), None)
            if place == "environ" and (shape or self.holds(name, text)):
                found[value] = name if name.isidentifier() else variable_for(name)
            elif place == "argument" and name in _ARGUMENTS and len(text) > 2 or self.holds(name, text):
                found[value] = shape.variable if shape else variable_for(name)
            elif _COMMIT.fullmatch(text) and not _COMMIT_NAMES.search(name):
                found.setdefault(value, "WANDB_API_KEY")
        return found

    def holds(self, name: str, text: str) -> bool:
        """Whether `name` denotes a secret and `text` could be one."""
        weak = name.lower().endswith("key") and _RANDOM.fullmatch(text) and not is_words(text)
        return bool((name in self.names or weak) and is_credible(text)) or holds_secret(name, text)

    def find(self, text: str) -> list[Secret]:
        """Positions of secrets in a text: by format, by a name in the text, or as a known value."""
        found = find_secrets(text)
        for value, variable in self.values.items():
            found += [Secret(*match.span(), variable) for match in re.finditer(re.escape(value), text)]
        return merge(found)

    def removed(self, text: str) -> str:
        parts, last = [], 0
        for item in self.find(text):
            parts += [text[last : item.start], REMOVED]
            last = item.end
        text = "".join([*parts, text[last:]])
        for value in self.values:  # headings lose their underscores as Markdown
            text = text.replace(value.replace("_", ""), REMOVED) if "_" in value else text
        return text


def _named(root: ast.AST) -> Iterator[tuple[str, ast.expr, str]]:
    """(name, value, place) for each named value in the code. `place` is argument, environ or name."""
    for node in ast.walk(root):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _assigned(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign) and node.value is not None:
            yield from _assigned(node.target, node.value)
        elif isinstance(node, ast.Dict):
            yield from ((_literal(key) or "", value, "name") for key, value in zip(node.keys, node.values, strict=True))
        elif isinstance(node, ast.Tuple | ast.List) and len(node.elts) == 2:
            yield _literal(node.elts[0]) or "", node.elts[1], "name"
        elif isinstance(node, ast.arguments):
            parameters = [*node.posonlyargs, *node.args]
            defaults = zip(parameters[len(parameters) - len(node.defaults) :], node.defaults, strict=True)
            yield from ((parameter.arg, value, "name") for parameter, value in defaults)
            only = zip(node.kwonlyargs, node.kw_defaults, strict=True)
            yield from ((parameter.arg, value, "name") for parameter, value in only if value is not None)
        elif isinstance(node, ast.Compare):
            yield from _assigned(node.left, node.comparators[0])
        elif isinstance(node, ast.Call):
            yield from _passed(node)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr, str]]:
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        for one, other in zip(target.elts, value.elts, strict=False):
            yield from _assigned(one, other)
    elif isinstance(target, ast.Name):
        yield target.id, value, "name"
    elif isinstance(target, ast.Subscript):
        is_environment = ast.unparse(target.value).endswith("environ")
        yield _literal(target.slice) or "", value, "environ" if is_environment else "name"
    elif isinstance(target, ast.Attribute):
        yield target.attr, value, "name"


def _passed(call: ast.Call) -> Iterator[tuple[str, ast.expr, str]]:
    function = ast.unparse(call.func)
    is_login = function.rsplit(".", 1)[-1] == "login"
    login = "wandb_api_key" if "wandb" in function else "hf_token"
    if is_login and call.args:
        yield login, call.args[0], "name"
    texts = [_literal(argument) or "" for argument in call.args]
    for name, value in zip(texts, call.args[1:], strict=False):  # setdefault("X", "..."), getenv("X", "...")
        yield name, value, "environ" if "env" in function else "name"
    for keyword in call.keywords:
        if keyword.arg == "key" and (is_login or "wandb" in function):
            yield login, keyword.value, "argument"
        elif keyword.arg == "default" and texts:  # add_argument("--hf_token", default="...")
            yield texts[0], keyword.value, "name"
        elif keyword.arg in ("auth", "basic_auth") and isinstance(keyword.value, ast.Tuple):
            yield "password", keyword.value.elts[-1], "name"
        elif keyword.arg:
            yield keyword.arg, keyword.value, "argument"
    if function.endswith("BasicAuth") and len(call.args) == 2:
        yield "password", call.args[1], "name"


def _literal(node: ast.expr | None) -> str | None:
    """The text of a string or bytes literal, also if concatenated or joined; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        return node.value if isinstance(node.value, str) else node.value.decode("latin-1")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_literal(node.left), _literal(node.right)]
    elif isinstance(node, ast.JoinedStr):
        parts = [_literal(part) for part in node.values]
    elif isinstance(node, ast.FormattedValue) and node.conversion == -1 and node.format_spec is None:
        return _literal(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        if len(node.args) != 1 or not isinstance(node.args[0], ast.List | ast.Tuple):
            return None
        glue, parts = _literal(node.func.value), [_literal(part) for part in node.args[0].elts]
        return None if glue is None or None in parts else glue.join(part or "" for part in parts)
    else:
        return None
    return None if None in parts else "".join(part or "" for part in parts)


# --- one statement ----------------------------------------------------------------------------------------------------


def _without(statement: Statement, known: _Known) -> tuple[Statement, list[str], bool]:
    """The statement without secrets, the environment variables that replace them, and whether a comment had one."""
    edits = _Edits(known, known.by_name(statement.node))
    edits.visit(statement.node)
    source = statement.source
    for node, text in sorted(edits.found, key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True):
        source = _replaced(source, node, text)
    plain = _comments_removed(source, known)
    has_comment = plain != source or edits.in_docstring
    if plain == statement.source:
        return statement, [], False
    try:
        (node,) = ast.parse(plain).body
    except (SyntaxError, ValueError):  # the parser gave a wrong offset: rebuild the source, without comments
        texts = {id(node): text for node, text in edits.found}
        plain = ast.unparse(_Substitute(texts).visit(statement.node))
        (node,) = ast.parse(plain).body
    return replace(statement, source=plain, node=node), list(dict.fromkeys(edits.variables)), has_comment


class _Edits(ast.NodeVisitor):
    """Collects the literals to replace, outermost first, with their replacement source."""

    def __init__(self, known: _Known, by_name: dict[ast.expr, str]) -> None:
        self.known, self.by_name = known, by_name
        self.found: list[tuple[ast.expr, str]] = []
        self.variables: list[str] = []
        self.in_docstring = False

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Expr) and _literal(node.value) is not None:
            text = _literal(node.value) or ""
            if (removed := self.known.removed(text)) != text:
                self.found.append((node.value, docstring(removed)))
                self.in_docstring = True
        elif isinstance(node, ast.expr) and (text := _literal(node)) is not None:
            self._literal(node, text)
        elif isinstance(node, ast.JoinedStr):
            self._joined(node)
        else:
            self.generic_visit(node)

    def _literal(self, node: ast.expr, text: str) -> None:
        is_bytes = isinstance(node, ast.Constant) and isinstance(node.value, bytes)
        if node in self.by_name:
            start = len(text) - len(_credential(text))
            found = [Secret(start, len(text), self.by_name[node])]
        else:
            found = self.known.find(text)
        if not found:
            return
        self.variables += [item.variable for item in found if not is_placeholder(text[item.start : item.end])]
        if len(found) == 1 and (found[0].start, found[0].end) == (0, len(text)):
            new = ast.unparse(_read(found[0].variable))
        else:
            new = ast.unparse(ast.JoinedStr(values=_split(text, found)))
        self.found.append((node, new + ".encode()" if is_bytes else new))

    def _joined(self, node: ast.JoinedStr) -> None:
        """Replace an f-string completely: the parser does not give the positions of its parts."""
        values: list[ast.expr] = []
        changed = False
        for part in node.values:
            text = _literal(part)
            found = self.known.find(text) if text else []
            if text and found:
                self.variables += [item.variable for item in found]
                values += _split(text, found)
                changed = True
                continue
            inner = _Edits(self.known, self.by_name)
            inner.visit(part)
            if inner.found:
                self.variables += inner.variables
                part = cast("ast.expr", _Substitute({id(one): new for one, new in inner.found}).visit(part))
                changed = True
            values.append(part)
        if changed:
            self.found.append((node, ast.unparse(ast.JoinedStr(values=values))))


class _Substitute(ast.NodeTransformer):
    def __init__(self, texts: dict[int, str]) -> None:
        self.texts = texts

    def visit(self, node: ast.AST) -> ast.AST:
        text = self.texts.get(id(node))
        return ast.parse(text, mode="eval").body if text is not None else self.generic_visit(node)


def _split(text: str, found: list[Secret]) -> list[ast.expr]:
    """The parts of an f-string: the text, with each secret replaced by an environment variable."""
    parts: list[ast.expr] = []
    last = 0
    for item in found:
        read = ast.FormattedValue(value=_read(item.variable), conversion=-1)
        parts += [ast.Constant(text[last : item.start]), read]
        last = item.end
    return [part for part in [*parts, ast.Constant(text[last:])] if getattr(part, "value", "") != ""]


def _read(variable: str) -> ast.expr:
    return expression("os.environ[NAME]", NAME=ast.Constant(variable))


def _credential(text: str) -> str:
    """The secret part of a header: everything after `Bearer `."""
    match = _SCHEME.fullmatch(text)
    return match[1] if match else text


def _comments_removed(source: str, known: _Known) -> str:
    """The source without secrets in its comments."""
    if "#" not in source:
        return source
    lines = source.split("\n")
    try:
        for token in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column] + known.removed(token.string)
    except (tokenize.TokenError, IndentationError):
        return source
    return "\n".join(lines)


def _replaced(source: str, node: ast.expr, text: str) -> str:
    """`source` with the text of a node replaced. Columns in the syntax tree count bytes."""
    lines = [line.encode() for line in source.split("\n")]
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset or 0 :]
    lines[first : last + 1] = [before + text.encode() + after]
    return b"\n".join(lines).decode()
