"""Tokens and keys that stand in a notebook: never copied, replaced by the environment variable."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from finetune.convert.read import Notebook, Statement

# Shape of a token -> the variable that its library reads.
_SHAPES = (
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "HF_TOKEN"),
    (re.compile(r"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{16,}"), "OPENAI_API_KEY"),
    (re.compile(r"\b(?:ghp|gho|ghs|github_pat)_[A-Za-z0-9_]{16,}"), "GITHUB_TOKEN"),
    (re.compile(r"\bAKIA[0-9A-Z]{16}\b"), "AWS_ACCESS_KEY_ID"),
    (re.compile(r"\bAIza[0-9A-Za-z_-]{30,}"), "GOOGLE_API_KEY"),
    (re.compile(r"\bxox[abp]-[0-9A-Za-z-]{10,}"), "SLACK_TOKEN"),
    (re.compile(r"\bwandb_v1_[A-Za-z0-9_]{20,}|(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])"), "WANDB_API_KEY"),
)
_ARGUMENTS = {
    "token": "HF_TOKEN",
    "hf_token": "HF_TOKEN",
    "use_auth_token": "HF_TOKEN",
    "hub_token": "HF_TOKEN",
    "api_key": "API_KEY",
    "auth_token": "AUTH_TOKEN",
    "access_token": "ACCESS_TOKEN",
    "password": "PASSWORD",
    "secret": "SECRET",
}
_NAMES = re.compile(r"(?:^|_)(token|api_?key|secret|password|apikey)$", re.IGNORECASE)
_GENERIC = re.compile(r"^[A-Za-z0-9_\-]{20,}$")


def remove_secrets(notebook: Notebook) -> list[str]:
    """Replace tokens in every statement, in place. Returns what was done, without the tokens."""
    notes: list[str] = []
    for number, statement in enumerate(notebook.statements):
        changed, variables = _without(statement)
        if changed is not statement:
            notebook.statements[number] = changed
            for variable in variables:
                notes.append(
                    f"cell {statement.cell}: a token stood in the code; it is not copied. The script reads"
                    f" {variable} from the environment"
                )
    notebook.shells = [replace(shell, text=scrub(shell.text)) for shell in notebook.shells]
    return list(dict.fromkeys(notes))


def scrub(text: str) -> str:
    """A text without anything that has the shape of a token."""
    for shape, _ in _SHAPES:
        text = shape.sub("<removed>", text)
    return text


def _without(statement: Statement) -> tuple[Statement, list[str]]:
    found = sorted(_secrets(statement.node), key=lambda item: (item[0].lineno, item[0].col_offset), reverse=True)
    source = statement.source
    variables = []
    for node, variable in found:
        source = _replaced(source, node, f'os.environ["{variable}"]')
        if not _placeholder(node.value):
            variables.append(variable)
    source = scrub(source)  # comments, and tokens inside longer strings
    if source == statement.source:
        return statement, []
    try:
        node = ast.parse(source).body[0]
    except (SyntaxError, IndexError):
        node = ast.parse(source := ast.unparse(_Replace(dict(found)).visit(statement.node))).body[0]
    return replace(statement, source=source, node=node), variables


def _placeholder(value: object) -> bool:
    return bool(re.search(r"your|token_here|\.\.\.|xxx|<", str(value), re.IGNORECASE))


def _secrets(node: ast.stmt) -> list[tuple[ast.Constant, str]]:
    found: dict[ast.Constant, str] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.keyword) and inner.arg in _ARGUMENTS and _text(inner.value):
            found[inner.value] = _ARGUMENTS[inner.arg]  # type: ignore[index]
        elif isinstance(inner, ast.Assign) and _text(inner.value) and _GENERIC.match(inner.value.value):  # type: ignore[attr-defined]
            for target in inner.targets:
                name = _target(target)
                if _NAMES.search(name):
                    found[inner.value] = name.upper()  # type: ignore[index]
        elif isinstance(inner, ast.Call) and _text(inner.args[0] if inner.args else None):
            if ast.unparse(inner.func).rsplit(".", 1)[-1] == "login":
                variable = "WANDB_API_KEY" if "wandb" in ast.unparse(inner.func) else "HF_TOKEN"
                found[inner.args[0]] = variable  # type: ignore[index]
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner not in found:
            for shape, variable in _SHAPES:
                if shape.fullmatch(inner.value.strip()):
                    found[inner] = variable
    inside = {part for inner in ast.walk(node) if isinstance(inner, ast.JoinedStr) for part in ast.walk(inner)}
    return [(item, variable) for item, variable in found.items() if item not in inside]


def _text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 2


def _target(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return getattr(node, "attr", "")


def _replaced(source: str, node: ast.Constant, text: str) -> str:
    """`source` with the text of a node replaced; columns of the syntax tree count bytes."""
    lines = [line.encode() for line in source.split("\n")]
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset or 0 :]
    lines[first : last + 1] = [before + text.encode() + after]
    return b"\n".join(lines).decode()


class _Replace(ast.NodeTransformer):
    def __init__(self, found: dict[ast.Constant, str]):
        self.found = found

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node in self.found:
            return ast.parse(f'os.environ["{self.found[node]}"]', mode="eval").body
        return node
