"""Write some of a notebook's code in the way that the converter reads, with the same meaning."""

from __future__ import annotations

import ast
from dataclasses import replace

from finetune.convert.analysis.names import calls, effects, lone_call
from finetune.convert.notebook.read import Notebook, Statement


def settle_globals(notebook: Notebook) -> None:
    """Decide conditions on names in place: `if "name" not in globals():`, where the cells above always or never bind
    the name. Also write `os.environ.update({...})` as one assignment per variable."""
    known: set[str] = set()
    perhaps: set[str] = set()
    statements: list[Statement] = []
    for statement in notebook.statements:
        body = _settled(statement.node, known, perhaps)
        body = _variables(statement.node) if body is None else body
        if body is None:
            statements.append(statement)
        else:
            statements += [statement.reading(ast.unparse(one)) for one in body]
        for one in [statement.node] if body is None else body:
            found = effects(one)
            known |= found.binds
            perhaps |= found.may_bind
            gone = {
                inner.id for inner in ast.walk(one) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Del)
            }
            known -= gone
            perhaps |= gone
    notebook.statements = [replace(statement, id=number) for number, statement in enumerate(statements)]


def _variables(node: ast.stmt) -> list[ast.stmt] | None:
    """The assignments of `os.environ.update({"A": "1"}, B="2")`; None for any other statement."""
    call = lone_call(node)
    if call is None or ast.unparse(call.func) not in ("os.environ.update", "environ.update"):
        return None
    pairs: list[tuple[ast.expr | None, ast.expr]] = []
    for given in call.args:
        if not isinstance(given, ast.Dict):
            return None
        pairs += zip(given.keys, given.values, strict=True)
    pairs += [(ast.Constant(item.arg) if item.arg else None, item.value) for item in call.keywords]
    if any(key is None for key, _ in pairs):
        return None
    owner = ast.unparse(call.func).removesuffix(".update")
    texts = [f"{owner}[{ast.unparse(key)}] = {ast.unparse(value)}" for key, value in pairs if key is not None]
    return [ast.parse(text).body[0] for text in texts] or None


def _settled(node: ast.stmt, known: set[str], perhaps: set[str]) -> list[ast.stmt] | None:
    """The branch that runs; None for any other statement, or if either may run."""
    test = node.test if isinstance(node, ast.If) else None
    if not (isinstance(test, ast.Compare) and isinstance(test.left, ast.Constant) and len(test.ops) == 1):
        return None
    name, place = test.left.value, ast.unparse(test.comparators[0])
    if not isinstance(test.ops[0], ast.In | ast.NotIn):
        return None
    if place not in ("globals()", "locals()", "vars()", "dir()") or (name in perhaps and name not in known):
        return None
    assert isinstance(node, ast.If)
    taken = node.body if (name in known) == isinstance(test.ops[0], ast.In) else node.orelse
    inner = [(one, _settled(one, known, perhaps)) for one in taken]
    return [part for one, parts in inner for part in ([one] if parts is None else parts)]


def train_by_method(notebook: Notebook) -> None:
    """Write Unsloth's `unsloth_train(trainer)` as `trainer.train()`, which it is on today's versions, in place."""
    for place, statement in enumerate(notebook.statements):
        found = [one for one in calls(statement.node) if one.args and getattr(one.func, "id", "") == "unsloth_train"]
        for call in found:
            call.func, call.args = ast.Attribute(call.args[0], "train", ast.Load()), call.args[1:]
        if found:
            notebook.statements[place] = statement.reading(ast.unparse(statement.node))
