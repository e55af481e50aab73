"""What kept statements may not need from outside: processes, services, other models."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from finetune.convert.analysis.names import calls
from finetune.convert.knowledge import explained, matches
from finetune.convert.notebook.read import Refusal
from finetune.convert.script import rewrite as code
from finetune.convert.script.decide import loaders
from finetune.convert.script.draft import AFTER, MAIN, Draft
from finetune.convert.script.shells import note_shells
from finetune.convert.services import is_hosted


def refuse_outside(draft: Draft) -> None:
    """Refuse kept statements that need processes, services or other models; note what shell commands may make."""
    before = {place for place in draft.kept(MAIN) if place <= draft.train}
    gone = {
        node.value
        for place in before
        for node in ast.walk(draft.program.statements[place].node)
        if isinstance(node, ast.Expr) and code.only_installs(node)
    }
    loading, unsafe = loaders(draft), explained("unsafe")
    for place in sorted(before):
        statement = draft.program.statements[place]
        for call in calls(statement.node):
            name = draft.program.dotted(call.func)
            if remedy := unsafe.get(name):
                raise Refusal("R4", f"`{name}` cannot run on several ranks; {remedy}", statement.cell)
            if place not in loading and call not in gone and (why := _dependence(name)):
                raise Refusal("R4", f"the statements before training depend on {why}", statement.cell)
        waits = any(isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) for node in _own_nodes(statement.node))
        if place not in loading and waits:
            raise Refusal("R4", "the statements before training depend on a top-level await", statement.cell)
    note_shells(draft)
    _note_hosted_paths(draft, {*before, *draft.kept(AFTER)})


def _note_hosted_paths(draft: Draft, places: set[int]) -> None:
    for place in sorted(places):
        statement = draft.program.statements[place]
        for node in ast.walk(statement.node):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_hosted(node.value):
                path = f"cell {statement.cell}: {node.value}"
                draft.notes.append(f"{path} is a path on a hosted service; change it in the script")


_STARTS = ("os.system", "os.popen", "input", "google.colab.files.upload")


def _dependence(name: str) -> str | None:
    """What a call of this name depends on outside of the notebook, with the remedy; None if on nothing."""
    if name == "__shell__":
        return "the output of a shell command; write it into the cell"
    if name == "multiprocessing.cpu_count":
        return None  # for num_proc: how many processes map the rows changes no row
    if name.split(".")[0] in ("subprocess", "multiprocessing") or name in _STARTS:
        return f"{name}(); run it first and write its result into a cell"
    if matches("service", name):
        return f"a service ({name}); call it once and save the result to a file"
    if matches("other model", name):
        return f"another model ({name}); leave out what only tries it, or save what it makes to a file"
    return None


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes outside nested functions."""
    yield node
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _own_nodes(inner)
