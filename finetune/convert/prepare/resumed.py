"""A second `trainer.train(resume_from_checkpoint=...)` of the same trainer, which continues the first one: with the
same settings, its last checkpoint is the end of the training, and nothing is left to train."""

from __future__ import annotations

import ast
import os.path
import re
from collections.abc import Collection
from dataclasses import replace

from finetune.convert.analysis.names import DEFINITIONS, Program, calls, free_names, lone_call, root
from finetune.convert.knowledge import named
from finetune.convert.notebook.read import Notebook

_WHY = "it continues a training that is complete"
_CHECKPOINT = r"[/\\]checkpoint-\d+[/\\]?"


def leave_out_resumed(notebook: Notebook) -> list[str]:
    """Leave out such calls, in place. Returns notes for the report."""
    live = [number for number, one in enumerate(notebook.statements) if not one.is_dead]
    program = Program([notebook.statements[number] for number in live])
    first: dict[str, int] = {}  # trainer -> the place of its training
    gone: set[int] = set()
    notes = []
    for place, statement in enumerate(program.statements):
        call = _train_call(statement.node)
        if call is None:
            continue
        name = str(root(call.func))
        earlier = first.setdefault(name, place)
        if earlier == place:
            continue
        if _same_targets(program, earlier, place) and _unchanged(program, name, earlier, place, gone):
            if _resumes(program, call):
                gone.add(place)
                notebook.statements[live[place]] = replace(statement, left_out=_WHY)
                notes.append(
                    f"cell {statement.cell}: `{statement.head[:60]}` is left out: it continues the training of cell"
                    f" {program.statements[earlier].cell}, whose settings have not changed, so nothing is left to train"
                )
                continue
        first[name] = place
    return notes


def _train_call(node: ast.stmt) -> ast.Call | None:
    """The call of `trainer.train(...)`, if that is all the statement does."""
    call = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "train":
        return call if isinstance(call.func.value, ast.Name) else None
    return None


def _same_targets(program: Program, earlier: int, place: int) -> bool:
    """Whether the result of the second call is unused, or has the name that the first one's has."""
    one, two = program.statements[earlier].node, program.statements[place].node
    return (
        isinstance(two, ast.Expr)
        or isinstance(one, ast.Assign)
        and (
            [ast.unparse(target) for target in one.targets] == [ast.unparse(target) for target in two.targets]  # type: ignore[attr-defined]
        )
    )


def _resumes(program: Program, call: ast.Call) -> bool:
    """Whether it resumes from the last checkpoint of its own folder, or from one that it names."""
    given = [*call.args, *(item.value for item in call.keywords if item.arg == "resume_from_checkpoint")]
    if len(given) != 1 or len(call.args) + len(call.keywords) != 1:
        return False
    value = _value(program, given[0])
    if isinstance(value, ast.Constant) and value.value is True:
        return True
    folder = _folder(program)
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("get_last_checkpoint") and len(value.args) == 1:
        asked = _value(program, value.args[0])
        own = isinstance(asked, ast.Attribute) and asked.attr == "output_dir"
        return own or folder is not None and _path(program, asked) == folder
    path = _path(program, value)
    return None not in (path, folder) and re.fullmatch(re.escape(str(folder)) + _CHECKPOINT, str(path)) is not None


def _value(program: Program, node: ast.expr) -> ast.expr:
    """What a name stands for, if one statement binds it."""
    for _ in range(5):
        bound = [
            one.node for one, e in zip(program.statements, program.effects, strict=True)
            if isinstance(node, ast.Name) and node.id in e.all_binds | e.changes and not _train_call(one.node)
        ]  # fmt: skip
        if len(bound) != 1 or not isinstance(bound[0], ast.Assign) or not isinstance(bound[0].targets[0], ast.Name):
            break
        node = bound[0].value
    return node


def _path(program: Program, node: ast.expr) -> str | None:
    """A path as text, as far as it is made of literals."""
    node = _value(program, node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return os.path.normpath(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
        texts = [part.value if isinstance(part, ast.Constant) else _path(program, part) for part in parts]
        return None if None in texts else os.path.normpath("".join(map(str, texts)))
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.path.join", "str", "Path", "pathlib.Path"):
        texts = [_path(program, one) for one in node.args]
        return None if None in texts or not texts else os.path.normpath(os.path.join(*map(str, texts)))
    return None


def _folder(program: Program) -> str | None:
    """The folder of the checkpoints, if all configurations have the same one."""
    found = [item for one in program.statements for call in calls(one.node) for item in call.keywords]
    given = [item.value for item in found if item.arg == "output_dir"]
    folders = {_path(program, value) for value in given}
    return folders.pop() if len(folders) == 1 else None


def _unchanged(program: Program, name: str, earlier: int, place: int, gone: Collection[int]) -> bool:
    """Whether nothing that the trainer was made of may have changed between two places. `gone` are left out."""
    made = program.slice([name], earlier)
    ours = {name}.union(*(program.effects[one].all_binds for one in made))
    ours |= {read for one in made for read in program.effects[one].reads} - set(program.imports)
    for between in range(earlier + 1, place):
        node, e = program.statements[between].node, program.effects[between]
        if isinstance(node, ast.Import | ast.ImportFrom) or _only_uses(node) or between in gone:
            continue
        definition = isinstance(node, DEFINITIONS)
        if (e.all_binds | e.changes) & ours or not definition and _calls(program, node, between) & made:
            return False
        if not definition and e.reads & ours:
            ours |= e.all_binds  # another name, such as `given = trainer.args`
    return True


def _only_uses(node: ast.stmt) -> bool:
    """A save, an evaluation or the like of a trainer, model or tokenizer."""
    call = lone_call(node)
    if call is None or not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        return False
    return call.func.attr in (named("on the trainer") | named("saves")) - {"train", "data_collator"}


def _calls(program: Program, node: ast.stmt, place: int) -> set[int]:
    """What the notebook's functions that a statement calls depend on."""
    lambdas = {name for name, values in program.values.items() if any(isinstance(one, ast.Lambda) for one in values)}
    functions = {name for name in free_names(node) if program.definition(name) is not None} | free_names(node) & lambdas
    return program.slice(functions, place)
