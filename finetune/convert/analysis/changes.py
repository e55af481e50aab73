"""Changes that no script keeps: of functions of libraries, of the trainer's arguments and methods after its creation.

The package has its own trainer and loss. What a notebook sets on TRL's would have no effect, without an error.
"""

from __future__ import annotations

import ast
from collections.abc import Set
from typing import NoReturn

from finetune.convert.analysis.names import DEFINITIONS, Program, method
from finetune.convert.notebook.read import Refusal, Statement

# The package trains without some functions of these, so a replacement might not be called.
_REPLACED = ("trl", "transformers", "torch", "accelerate", "unsloth", "unsloth_zoo")
_NO_EFFECT = ("is_model_parallel", "place_model_on_device", "can_return_loss", "label_names")
_ROWS = ("train_dataset", "eval_dataset")  # SFTTrainer takes others
_SETS_UP = ("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "init_hf_repo")


def refuse_patches(program: Program, train: int) -> None:
    """Refuse (R4) a statement that replaces a function or class of a library that trains."""
    for statement in program.statements[: train + 1]:
        for node in ast.walk(statement.node):
            for target, value in _set_attributes(node):
                name = program.dotted(target)
                package = name.partition(".")[0]
                if package in _REPLACED and target.attr != "__doc__" and not _is_constant(program, value):
                    raise Refusal(
                        "R4",
                        f"`{statement.head[:80]}` replaces {name.removeprefix(package + '.')} of {package}, which the"
                        " script may not call; leave it out, or train with trl.SFTTrainer in a script of your own",
                        statement.cell,
                    )


def _set_attributes(node: ast.AST) -> list[tuple[ast.Attribute, ast.expr]]:
    """Attributes that a node sets, with their values: `a.b = c`, `a.b += c` and `setattr(a, "b", c)`."""
    if isinstance(node, ast.AugAssign):
        return [(node.target, node.value)] if isinstance(node.target, ast.Attribute) else []
    if isinstance(node, ast.Assign):
        return [(one, node.value) for one in node.targets if isinstance(one, ast.Attribute)]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
        owner, name, value = node.args
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return [(ast.Attribute(value=owner, attr=name.value, ctx=ast.Store()), value)]
    return []


def _is_constant(program: Program, value: ast.expr) -> bool:
    """Whether it is an option, not code: a literal, or a constant in capitals of a library."""
    name = program.dotted(value)
    if "." in name:
        return name.rsplit(".", 1)[-1].isupper() or name.startswith("torch.") and name.count(".") == 1
    try:
        ast.literal_eval(value)
    except ValueError:
        return isinstance(value, ast.Name) and not _is_definition(program, value.id)
    return True


def _is_definition(program: Program, name: str) -> bool:
    lambdas = (
        statement.node.value
        for statement in program.statements
        if isinstance(statement.node, ast.Assign) and name in {getattr(one, "id", "") for one in statement.node.targets}
    )
    return name in program.imports or program.definition(name) is not None or any(
        isinstance(one, ast.Lambda) for one in lambdas
    )  # fmt: skip


def refuse_late_changes(program: Program, trainers: Set[str], train: int) -> None:
    """Refuse (R4) statements between the trainer's creation and `train()` that change it or its arguments. What a
    function changes, SFTTrainer refuses when the script runs."""
    owners: set[str] = set()  # the trainer and its arguments, once it is created
    for place, statement in enumerate(program.statements[:train]):
        node, e = statement.node, program.effects[place]
        call = getattr(node, "value", None)
        if isinstance(node, ast.Assign) and isinstance(call, ast.Call) and e.binds & trainers:
            given = {item.arg: item.value for item in call.keywords}.get("args")
            owners |= {name for one in e.binds & trainers for name in (one, f"{one}.args")}
            owners |= {given.id} if isinstance(given, ast.Name) else set()
            continue
        owners -= e.binds
        if not owners or isinstance(node, DEFINITIONS):
            continue
        for inner in ast.walk(node):
            for target, _ in _set_attributes(inner):
                allowed = (*_NO_EFFECT, *_ROWS, *(_TOKENIZER if gives_own_tokenizer(program, place) else ()))
                if ast.unparse(target.value) in owners and target.attr not in allowed:
                    _refuse_late(statement, target.attr, "changed", "set it before, in SFTConfig or SFTTrainer")
            if method(inner) in _SETS_UP and ast.unparse(inner.func.value) in owners:  # type: ignore[attr-defined]
                _refuse_late(statement, method(inner), "called", "leave it out")


def _refuse_late(statement: Statement, name: str, what: str, remedy: str) -> NoReturn:
    reason = f"{name} is {what} after the trainer is created (`{statement.head[:80]}`); {remedy}"
    raise Refusal("R4", reason, statement.cell)


def gives_own_tokenizer(program: Program, place: int) -> bool:
    """`trainer.tokenizer = tokenizer`, of a trainer that was created with the same object; or with none, if tokenizer
    and model come from the same place."""
    node = program.statements[place].node
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    if not (isinstance(target, ast.Attribute) and target.attr in _TOKENIZER and isinstance(target.value, ast.Name)):
        return False
    trainer, value = target.value.id, node.value  # type: ignore[attr-defined]
    for earlier in range(place - 1, -1, -1):
        e, made = program.effects[earlier], getattr(program.statements[earlier].node, "value", None)
        if trainer in e.all_binds:
            call = made if trainer in e.binds and isinstance(made, ast.Call) else None
            if call is None or not program.dotted(call.func).endswith("SFTTrainer"):
                return False
            given = [ast.unparse(item.value) for item in call.keywords if item.arg in _TOKENIZER]
            models = [*call.args[:1], *(item.value for item in call.keywords if item.arg == "model")]
            if not given and target.attr == "tokenizer" and all(item.arg for item in call.keywords):
                return len(_origins(program, value)) == 1 and _origins(program, value) == _origins(program, *models)
            return isinstance(value, ast.Name) and given == [value.id]
        if isinstance(value, ast.Name) and value.id in e.all_binds:
            return False
    return False


def _origins(program: Program, *names: ast.expr) -> set[str]:
    """What a tokenizer or model is loaded from."""
    wanted = {one.id for one in names if isinstance(one, ast.Name)}
    calls = [
        one.node.value
        for one, e in zip(program.statements, program.effects, strict=True)
        if e.all_binds & wanted and isinstance(one.node, ast.Assign) and isinstance(one.node.value, ast.Call)
    ]
    loads = [call for call in calls if ast.unparse(call.func).endswith(".from_pretrained")]
    given = [[*call.args[:1], *(item.value for item in call.keywords if item.arg in _NAME)] for call in loads]
    return {ast.unparse(one) for values in given for one in values[:1]}


_NAME = ("pretrained_model_name_or_path", "model_name")
_TOKENIZER = ("processing_class", "tokenizer")
