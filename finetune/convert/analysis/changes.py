"""What a statement changes in place, and changes that no script keeps: of functions of libraries, of the trainer's
arguments and methods after its creation.

The package has its own trainer and loss. What a notebook sets on TRL's would have no effect, without an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set
from typing import NoReturn

from finetune.convert.analysis.environment import MODEL_FLAGS
from finetune.convert.analysis.names import DEFINITIONS, Program, calls, in_place, method, passed, root
from finetune.convert.knowledge import named
from finetune.convert.notebook.read import Refusal, Statement

# The package trains without some functions of these, so a replacement might not be called.
_REPLACED = ("trl", "transformers", "torch", "accelerate", "unsloth", "unsloth_zoo")
_NOT_OF_TRAINING = re.compile(
    r"(torch\.(load|save|serialization|cuda|_dynamo|backends)|transformers\.(utils|logging))\b"
)
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
                trains = package in _REPLACED and not _NOT_OF_TRAINING.match(name) and target.attr != "__doc__"
                if trains and not _is_constant(program, value):
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
                if ast.unparse(target.value) in owners and target.attr not in (*_NO_EFFECT, *_ROWS):
                    _refuse_late(statement, target.attr, "changed", "set it before, in SFTConfig or SFTTrainer")
            if method(inner) in _SETS_UP and ast.unparse(inner.func.value) in owners:  # type: ignore[attr-defined]
                _refuse_late(statement, method(inner), "called", "leave it out")


def _refuse_late(statement: Statement, name: str, what: str, remedy: str) -> NoReturn:
    reason = f"{name} is {what} after the trainer is created (`{statement.head[:80]}`); {remedy}"
    raise Refusal("R4", reason, statement.cell)


# --- changes in place -------------------------------------------------------------------------------------------------

# Methods of models, tokenizers and trainers that change them.
_CHANGING = re.compile(
    r"(?:set|add|register|load|reset|init|merge|unmerge|enable|disable|delete|freeze|unfreeze|tie|prune|quantize|resize"
    r"|replace)_\w+|apply|unload|freeze|unfreeze|quantize|requires_grad_"
)
_RESTORED = ("disable_adapter", "set_epoch", "load_dataset", "add_generation_prompt")  # `with model.disable_adapter():`
# Functions that change the model that they are given, and return it.
_GIVEN = re.compile(
    r"(?:.*\.)?(?:get_peft_model|prepare_model_for_\w+|setup_chat_format|setattr|delattr|PeftModel\w*\.from_pretrained)"
    r"|torch\.nn\.init\..+|torch\.nn\.utils\.(?:prune|parametrize|parametrizations|fusion)\..+|.*\w_"
)
_VIEWS = frozenset("parameters named_parameters modules named_modules children named_children items values".split())
_SAME = frozenset("to cuda half bfloat16 float double train eval requires_grad_ base_model".split())
_SEQUENCES = frozenset("list tuple enumerate zip iter reversed filter sorted cast".split())
_DEVICE = re.compile(r"cuda|cpu|device|mps|xpu|rank|^\d+$|^\W*$", re.IGNORECASE)
_DTYPE = re.compile(r"dtype|float|half")
_TENSORS = re.compile(r"weight|bias|grad|data|logits|loss|\w*hidden_states?|score")


def moves(program: Program, call: ast.Call) -> bool:
    """Whether it moves what it is called on or sets its mode, and casts nothing: `.to("cuda")`, `.to(device)`."""
    if method(call) != "to":
        return method(call) in named("moves")
    given = [*call.args, *(item.value for item in call.keywords)]
    names = {one.id for value in given for one in ast.walk(value) if isinstance(one, ast.Name)}
    values = [value for name in names for value in program.values.get(name, ())]
    keywords = [str(item.arg) for item in call.keywords]
    text = " ".join(
        [*map(ast.unparse, [*given, *values]), *keywords, *(program.imports.get(name, "") for name in names)]
    )
    return not _DTYPE.search(text) and _DEVICE.search(text.strip("'\" ")) is not None


def changed_in_place(program: Program, node: ast.AST, models: Set[str], roles: Set[str]) -> dict[str, str]:
    """The names whose objects a statement changes -> the code that does. Assigning a name is not changing its object.

    Args:
        node: a definition changes what its decorators, defaults and class body change.
        models: names of models, whose methods such as `half` work in place.
        roles: names of models, tokenizers and trainers.
    """
    found: dict[str, str] = {}
    for inner in _runs(node):
        for value, what in _changed(program, inner, models, roles):
            for name in _owners(program, value):
                found.setdefault(name, _text(what))
        function = program.definition(getattr(getattr(inner, "func", None), "id", ""))
        if isinstance(inner, ast.Call) and isinstance(function, ast.FunctionDef):
            found = _by_function(program, inner, function, models, roles) | found
    return found


def _text(node: ast.AST) -> str:
    stored = isinstance(getattr(node, "ctx", None), ast.Store)
    return ast.unparse(node)[:60] + (" = ..." if stored else "")


def _runs(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run with a statement: of the functions that it defines, decorators and defaults."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [one for one in [*node.args.defaults, *node.args.kw_defaults] if one is not None]
        for one in [*node.decorator_list, *defaults]:
            yield from _runs(one)
        for one in node.decorator_list:  # `@model.apply`
            yield ast.Call(func=one, args=[], keywords=[])
        return
    yield node
    for inner in ast.iter_child_nodes(node):
        yield from _runs(inner)


def _changed(program: Program, node: ast.AST, models: Set[str], roles: Set[str]) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Expressions whose objects a node changes, each with the code that does."""
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        if getattr(node, "attr", "") not in MODEL_FLAGS and ast.unparse(node.value) not in ("os.environ", "environ"):
            yield node.value, node
    elif isinstance(node, ast.AugAssign):
        yield node.target, node
    elif isinstance(node, ast.Call):
        name, last, owners = program.dotted(node.func), method(node), set()
        if isinstance(node.func, ast.Attribute):
            owners = _owners(program, node.func.value)
            of_role = owners & roles and _CHANGING.fullmatch(last) and last not in _RESTORED
            if of_role or owners & models and _casts(program, node) or last in named("mutates") or in_place(node):
                yield node.func.value, node
            elif re.fullmatch(r".*[a-z\d]_", last):
                yield node.func.value, node
        unbound = name.startswith("torch.nn.") and last in named("casts")
        if name and _GIVEN.fullmatch(name) or unbound:
            yield from ((one, node) for one in passed(node, "model"))


def _casts(program: Program, call: ast.Call) -> bool:
    """Whether it casts a module: not a tensor, as in `model(ids).logits.float()`."""
    if method(call) not in named("casts") or moves(program, call):
        return False
    receiver = call.func.value  # type: ignore[attr-defined]
    values = program.values.get(receiver.id, ()) if isinstance(receiver, ast.Name) else ()
    tensors = any("parameters" in ast.unparse(one) or "state_dict" in ast.unparse(one) for one in values)
    return not tensors and not _TENSORS.fullmatch(getattr(receiver, "attr", ""))


def _owners(program: Program, value: ast.AST) -> set[str]:
    """The names of the objects that an expression may be, or be a part of."""
    found: set[str] = set()
    more = _parts(value)
    while more:
        found |= more
        more = {part for name in more for one in program.values.get(name, ()) for part in _parts(one)} - found
    return found


def _parts(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.NamedExpr):
        return _parts(node.value)
    if isinstance(node, ast.Tuple | ast.List):
        return {name for one in node.elts for name in _parts(one)}
    if isinstance(node, ast.IfExp):
        return _parts(node.body) | _parts(node.orelse)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and (
            node.func.attr in _VIEWS | _SAME or node.func.attr.startswith("get_") and node.func.attr != "get_peft_model"
        ):
            return _parts(node.func.value)
        if getattr(node.func, "id", "") in _SEQUENCES or ast.unparse(node.func).endswith("get_peft_model"):
            return {name for one in node.args for name in _parts(one)}
    return set()


def _by_function(
    program: Program, call: ast.Call, function: ast.FunctionDef, models: Set[str], roles: Set[str]
) -> dict[str, str]:
    """What calling a function of the notebook changes: its arguments, and names of the notebook."""
    names = [one.arg for one in [*function.args.posonlyargs, *function.args.args]]
    given: Mapping[str | None, ast.expr] = dict(zip(names, call.args, strict=False)) | {
        item.arg: item.value for item in call.keywords
    }
    roots = {name: root(value) for name, value in given.items()}
    inner = [{str(name) for name, owner in roots.items() if owner in some} | some for some in (models, roles)]
    bound = {one.id for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    found: dict[str, str] = {}
    for statement in function.body:
        if any(one is call for one in calls(statement)):
            continue  # it calls itself
        for node in _runs(statement):
            for value, what in _changed(program, node, inner[0], inner[1]):
                for name in _owners(program, value):
                    owner = roots.get(name, None if name in {*names, *bound} else name)
                    if owner is not None:
                        found.setdefault(owner, _text(what))
    return found
