"""Decide where each statement of a notebook goes: a function of the script, the settings, or nowhere, with a reason.

A statement is left out only if training does not depend on it and it is of a known harmless kind. A notebook with any
other statement is refused (R4).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.convert.names import (
    Program,
    casts_modules,
    changed_in_loop,
    effects,
    free_names,
    root,
    target_names,
    written_path,
)
from finetune.convert.read import Notebook, Refusal, Shell, Statement, is_dead, process_command
from finetune.convert.trace import Trace

BY_NAME = "SFTTrainer"  # the loader, if the notebook gives the trainer a model name
HOOKS = ("environment", "module", "tokenizer", "dataset", "model", "trainer", "save")


@dataclass(kw_only=True)
class Disposition:
    """The decision on a statement: `kept` in a function, `settings` in the YAML file, `dropped`, or `rewritten`."""

    what: str
    where: str = ""  # the function, if kept
    why: str = ""


@dataclass(kw_only=True)
class Plan:
    """The decisions on a notebook, and the names that its functions take and return."""

    program: Program
    dispositions: dict[int, Disposition] = field(default_factory=dict)
    hooks: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in HOOKS})
    replaced: dict[int, ast.stmt] = field(default_factory=dict)  # place -> the part that is kept
    models: set[str] = field(default_factory=set)
    tokenizers: list[str] = field(default_factory=list)  # in order; the first comes from the loader
    trainers: set[str] = field(default_factory=set)
    train_expression: ast.expr | None = None
    eval_expression: ast.expr | None = None
    formatting: ast.expr | None = None
    callbacks: ast.expr | None = None
    own_tokenizer: bool = False  # the tokenizer is not the model's
    scratch: set[str] = field(default_factory=set)  # names of charts, tables, metrics
    collections: set[str] = field(default_factory=set)  # names of lists, dicts, counters
    notes: list[str] = field(default_factory=list)
    environment_comments: list[str] = field(default_factory=list)  # set in branches of the installation
    trace: Trace = field(default_factory=dict)
    key: dict[str, int] = field(default_factory=dict)  # loader, adapter, trainer, responses, train -> place
    early_saves: set[int] = field(default_factory=set)  # before training; left out


def training_events(trace: Trace) -> list[dict[str, Any]]:
    """The events up to `train()`, that call included: what comes later changes nothing about the training."""
    kinds = [item["kind"] for item in trace["events"]]
    return trace["events"][: kinds.index("train") + 1] if "train" in kinds else trace["events"]


def event_of(trace: Trace, kind: str) -> dict[str, Any] | None:
    """The last event of a kind until `train()`: a repeated call replaces the earlier one."""
    return next((item for item in reversed(training_events(trace)) if item["kind"] == kind), None)


def live_statements(notebook: Notebook) -> list[Statement]:
    return [statement for statement in notebook.statements if not is_dead(statement.node)]


def make_plan(notebook: Notebook, program: Program, traces: list[Trace]) -> Plan:
    """Decide on every statement. Raises Refusal (R0, R2, R4)."""
    plan = Plan(program=program, trace=traces[0])
    _key_statements(plan, traces[0])
    _names_of_roles(plan)
    _names_of_scratch(plan)
    _trainer_call(plan)
    _early_saves(plan)
    _environment(plan, notebook)
    _tokenizer_hook(plan)
    _dataset_hook(plan)
    _model_hook(plan)
    _trainer_hook(plan)
    _refuse_late_template(plan)
    _save_hook(plan)
    _settings(plan)
    _shared_constants(plan)
    _dropped(plan, notebook)
    _note_defaults(plan)
    _shells(plan, notebook)
    _not_run(plan, traces)
    return plan


# --- the statements that set up the training --------------------------------------------------------------------------


def _once(plan: Plan, trace: Trace) -> None:
    """Refuse (R2) a notebook that trains, or attaches an adapter, more than once."""
    for kind, call in (("train", "train()"), ("adapt", "get_peft_model()")):
        until = trace["events"] if kind == "train" else training_events(trace)
        events = [item for item in until if item["kind"] == kind]
        if len(events) < 2:
            continue
        last = plan.program.statements[plan.program.position(events[-1]["statement"])]
        cells = list(dict.fromkeys(str(_cell(plan, item)) for item in events))
        if isinstance(last.node, ast.For | ast.While) and kind == "train":
            reason = (
                f"the notebook trains {len(events)} times in a loop (`{last.head[:80]}`); train once: for epochs set"
                " num_train_epochs, and for a sweep start the script once per value, for example with"
                " --training.learning_rate 1e-4"
            )
        else:
            reason = (
                f"{call} is called {len(events)} times (cell{'s' * (len(cells) > 1)} {', '.join(cells)}); keep one"
                " call, or split the notebook"
            )
        raise Refusal("R2", reason, last.cell)


def _key_statements(plan: Plan, trace: Trace) -> None:
    """Find the statements that load, adapt and train. Raises Refusal (R0, R4) if one is missing or not at top level."""
    program = plan.program
    _once(plan, trace)
    for name, kind in (
        ("loader", "load"),
        ("tokenizer", "load_tokenizer"),
        ("adapter", "adapt"),
        ("trainer", "trainer"),
        ("responses", "responses"),
        ("train", "train"),
        ("kbit", "kbit"),
    ):
        events = [item for item in training_events(trace) if item["kind"] == kind]
        if events:
            place = program.position(events[-1]["statement"])  # a repeated call replaces the earlier one
            plan.key[name] = place
            node = program.statements[place].node
            by_name = name == "loader" and events[-1]["detail"][0] == BY_NAME
            inside = _inside_function(plan, place, "trainer" if by_name else name)
            if isinstance(node, ast.FunctionDef | ast.For | ast.While) or inside:
                raise Refusal(
                    "R4",
                    "the training is set up inside a function or loop; move it to the top level of the cell",
                    program.statements[place].cell,
                )
    _same_tokenizer(plan, trace)
    failed = trace["failed"]
    for name, what in (
        ("loader", "no model is loaded with classes of Unsloth or transformers"),
        ("trainer", "no SFTTrainer is created"),
        ("train", "train() is never reached"),
    ):
        if name not in plan.key:
            why = next(
                (
                    f" (its {_ordinal(program, key)} fails under the recording stubs: {text})"
                    for key, text in failed.items()
                ),
                "",
            )
            raise Refusal("R4" if failed else "R0", what + why)


def _same_tokenizer(plan: Plan, trace: Trace) -> None:
    """Compare the loaded tokenizer with the model's, and note arguments that are left out."""
    item, load = event_of(trace, "load_tokenizer"), event_of(trace, "load")
    if item is None or load is None:
        return
    given, kwargs = item["detail"][0].get("tuple", []), dict(map(tuple, item["detail"][1].get("dict", [])))
    name = given[0] if given else kwargs.pop("pretrained_model_name_or_path", None)
    args = load["detail"][1].get("tuple", [])
    model = args[0] if args else dict(map(tuple, load["detail"][2]["dict"])).get("pretrained_model_name_or_path")
    if name != model:
        plan.own_tokenizer = True
        plan.notes.append(f"the notebook loads a tokenizer other than that of {model}; prepare_tokenizer does the same")
        return
    left_out = [
        key
        for key in kwargs
        if key not in ("trust_remote_code", "use_fast", "padding_side", "token", "use_auth_token", "revision")
    ]
    if left_out:
        plan.notes.append(
            f"the tokenizer arguments {', '.join(left_out)} are left out: the package adds end tokens and padding"
        )


def _ordinal(program: Program, key: str) -> str:
    statement = program.statements[program.position(int(key))]
    return f"cell {statement.cell}, line {statement.line}"


def _inside_function(plan: Plan, place: int, name: str) -> bool:
    """Whether the call is inside a function that the statement calls, not in the statement itself."""
    words = {
        "loader": "from_pretrained",
        "adapter": "get_peft_model",
        "trainer": "Trainer",
        "train": "train",
        "responses": "train_on_responses_only",
        "tokenizer": "from_pretrained",
        "kbit": "prepare_model",
    }
    return not any(
        isinstance(node, ast.Call) and words[name] in _last_name(plan, node.func)
        for node in ast.walk(plan.program.statements[place].node)
    )


def _last_name(plan: Plan, node: ast.expr) -> str:
    return plan.program.dotted(node).rsplit(".", 1)[-1] or getattr(node, "attr", "")


def _cell(plan: Plan, item: dict[str, Any]) -> int:
    return plan.program.statements[plan.program.position(item["statement"])].cell


def _call(plan: Plan, place: int, word: str) -> ast.Call:
    for node in ast.walk(plan.program.statements[place].node):
        if isinstance(node, ast.Call) and word in _last_name(plan, node.func):
            return node
    raise Refusal("R4", f"the call to {word} was not found", plan.program.statements[place].cell)


def _names_of_roles(plan: Plan) -> None:
    """Find all names of the model, the tokenizer and the trainer, including aliases."""
    program = plan.program
    loader = program.statements[plan.key["loader"]].node
    targets = loader.targets[0] if isinstance(loader, ast.Assign) else None
    if plan.key["loader"] == plan.key["trainer"]:
        pass  # SFTTrainer(model="...") loads the model, so it has no name in the notebook
    elif isinstance(targets, ast.Tuple) and len(targets.elts) == 2:
        first, second = ([*target_names(item)][:1] for item in targets.elts)
        plan.models.update(first)
        plan.tokenizers += second
    elif isinstance(targets, ast.Name):
        plan.models.add(targets.id)
    else:
        kind = type(loader).__name__.lower()
        found = f"the model is loaded inside `{kind}`" if hasattr(loader, "body") else "the loaded model has no name"
        statement = program.statements[plan.key["loader"]]
        raise Refusal(
            "R4",
            f"{found} (`{statement.head[:80]}`); load it at the top level of the cell, as `model, tokenizer = ...` or"
            " `model = ...`",
            statement.cell,
        )
    if "tokenizer" in plan.key:
        node = program.statements[plan.key["tokenizer"]].node
        plan.tokenizers += [name for target in getattr(node, "targets", []) for name in target_names(target)]
    if plan.own_tokenizer:
        del plan.key["tokenizer"]  # the statement stays, in prepare_tokenizer
    for place, statement in enumerate(program.statements):
        node = statement.node
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1):
            continue
        names = [name for name in target_names(node.targets[0])]
        if place in (plan.key.get("trainer"), plan.key.get("responses")):
            plan.trainers.update(names)
        elif place in (plan.key.get("adapter"), plan.key.get("kbit")):
            plan.models.update(names)
        elif place < plan.key["train"] and _is_alias(plan, node.value):
            plan.tokenizers += [name for name in names if name not in plan.tokenizers]
        elif place < plan.key["train"] and isinstance(node.value, ast.Name) and node.value.id in plan.models:
            plan.models.update(names)
        elif place < plan.key["train"] and _makes_tokenizer(plan, node.value):
            plan.tokenizers += [name for name in names if name not in plan.tokenizers]


# Libraries that only display or measure.
_SHOWING = frozenset(
    "matplotlib seaborn plotly bokeh altair wordcloud rich prettytable ipywidgets evaluate logging".split()
)


def _names_of_scratch(plan: Plan) -> None:
    """Find names bound only to objects of display libraries, and names bound only to collections."""
    bound: dict[str, list[ast.expr | None]] = {}
    for statement in plan.program.statements:
        for node in ast.walk(statement.node):
            for target, value in _bindings(node):
                for name in target_names(target):
                    bound.setdefault(name, []).append(value)
    plan.collections = {name for name, values in bound.items() if all(_is_collection(plan, v) for v in values)}
    while more := {
        name
        for name, values in bound.items()
        if name not in plan.scratch and all(_is_scratch(plan, value) for value in values)
    }:
        plan.scratch |= more


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Assignment targets with their values, or None if the value is unknown."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr
    elif isinstance(node, ast.For | ast.comprehension):
        name = getattr(node.iter.func, "id", "") if isinstance(node.iter, ast.Call) else ""
        given = node.iter.args if isinstance(node.iter, ast.Call) else []
        parts = node.target.elts if isinstance(node.target, ast.Tuple) else []
        if name == "zip" and len(parts) == len(given):
            yield from zip(parts, given, strict=True)
        elif name == "enumerate" and len(parts) == 2:
            yield from ((parts[0], None), (parts[1], given[0]))
        else:
            yield node.target, node.iter


def _is_collection(plan: Plan, value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        name = plan.program.dotted(value.func)
        return name in ("list", "dict", "set") or name.startswith("collections.")
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _is_scratch(plan: Plan, value: ast.expr | None) -> bool:
    if value is None:
        return False
    made = isinstance(value, ast.Call) and (
        plan.program.dotted(value.func).split(".")[0] in _SHOWING or _method(value) in ("plot", "hist", "boxplot")
    )
    return made or root(value) in plan.scratch


def _is_alias(plan: Plan, value: ast.expr) -> bool:
    """`processor.tokenizer`, `getattr(tokenizer, "tokenizer", tokenizer)`, or another name for the tokenizer."""
    if isinstance(value, ast.Name):
        return value.id in plan.tokenizers
    if isinstance(value, ast.Attribute):
        return value.attr == "tokenizer" and root(value) in plan.tokenizers
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "getattr"
        and len(value.args) > 1
        and root(value.args[0]) in plan.tokenizers
        and getattr(value.args[1], "value", None) == "tokenizer"
    )


def _makes_tokenizer(plan: Plan, value: ast.expr) -> bool:
    """`get_chat_template(tokenizer, ...)`, or a function that takes the tokenizer and has `tokenizer` in its name."""
    if not isinstance(value, ast.Call):
        return False
    name = _last_name(plan, value.func)
    takes = any(
        isinstance(item, ast.Name) and item.id in plan.tokenizers
        for item in [*value.args, *(k.value for k in value.keywords)]
    )
    return takes and (
        name == "get_chat_template" or ("tokenizer" in name.lower() and not isinstance(value.func, ast.Attribute))
    )


def _trainer_call(plan: Plan) -> None:
    call = _call(plan, plan.key["trainer"], "Trainer")
    names = ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
    given: dict[str, ast.expr] = dict(zip(names, call.args, strict=False))
    given |= {item.arg: item.value for item in call.keywords if item.arg}
    for item in call.keywords:
        if item.arg is None:
            given |= _spread(plan, item.value)
    none = ast.dump(ast.Constant(None))
    given = {key: value for key, value in given.items() if ast.dump(value) != none}
    cell = plan.program.statements[plan.key["trainer"]].cell
    if "train_dataset" not in given:
        raise Refusal("R4", "SFTTrainer has no train_dataset", cell)
    plan.train_expression = given["train_dataset"]
    plan.eval_expression = given.get("eval_dataset")
    plan.formatting = given.get("formatting_func")
    plan.callbacks = given.get("callbacks")


def _spread(plan: Plan, value: ast.expr) -> dict[str, ast.expr]:
    """The arguments in `**settings`, if settings is a dict literal or `dict(...)`."""
    if isinstance(value, ast.Name):
        for place in range(plan.key["trainer"] - 1, -1, -1):
            node = plan.program.statements[place].node
            if isinstance(node, ast.Assign) and any(value.id in target_names(t) for t in node.targets):
                return _spread(plan, node.value)
    if isinstance(value, ast.Dict):
        return {str(k.value): v for k, v in zip(value.keys, value.values, strict=True) if isinstance(k, ast.Constant)}
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
        return {item.arg: item.value for item in value.keywords if item.arg}
    raise Refusal(
        "R4",
        "cannot determine the arguments of SFTTrainer; pass them as keywords",
        plan.program.statements[plan.key["trainer"]].cell,
    )


# --- functions of the script ------------------------------------------------------------------------------------------


def _keep(plan: Plan, hook: str, places: Iterable[int]) -> None:
    for place in sorted(set(places) - plan.early_saves):
        if place not in plan.hooks[hook]:
            plan.hooks[hook].append(place)
        plan.dispositions[place] = Disposition(what="kept", where=hook)
    plan.hooks[hook].sort()


def _early_saves(plan: Plan) -> None:
    """Leave out saving before training, such as `dataset.push_to_hub(...)`: a script saves once, after training."""
    for place, statement in enumerate(plan.program.statements[: plan.key["train"]]):
        call = statement.node.value if isinstance(statement.node, ast.Expr) else None
        if not isinstance(call, ast.Call):
            continue
        saves_role = (
            root(call.func) in plan.models | plan.trainers | set(plan.tokenizers)
            and _method(call) in EXPORTS | _ORDINARY
        )
        if saves_role or _method(call) == "push_to_hub":
            plan.early_saves.add(place)
            plan.dispositions[place] = Disposition(
                what="dropped", why="saved before training; do this once, outside the script"
            )
            plan.notes.append(f"cell {statement.cell}: `{statement.head[:60]}` is left out: it saves before training")


def _key_places(plan: Plan) -> set[int]:
    return set(plan.key.values())


def _environment(plan: Plan, notebook: Notebook) -> None:
    """Keep assignments to os.environ, and keep them first: libraries read them when they are imported."""
    for place, statement in enumerate(plan.program.statements[: plan.key["train"]]):
        node = statement.node
        name = _environment_key(node)
        if name is None:
            if _installs(plan, notebook, statement) and "os.environ[" in ast.unparse(node):
                lines = [
                    ast.unparse(inner)
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.stmt) and _environment_key(inner)
                ]
                plan.notes += [
                    f"cell {statement.cell}: `{line}` is in an installation branch; it becomes a comment in the script"
                    for line in lines
                ]
                plan.environment_comments += lines
                plan.dispositions[place] = Disposition(
                    what="dropped", why="installation; the environment variables it sets become a comment in the script"
                )
            continue
        if name in NO_ENVIRONMENT or name.startswith(("WANDB_", "KAGGLE_", "COMET_")):
            plan.dispositions[place] = Disposition(
                what="dropped",
                why=NO_ENVIRONMENT.get(name, "metrics go to TensorBoard; accounts do not belong in a script"),
            )
            continue
        wanted, _ = plan.program.slice(free_names_of(node) - {"os"}, place)
        if any(not _pure(plan, item) for item in wanted):
            raise Refusal("R4", f"the environment variable {name} is computed; set it to a constant", statement.cell)
        _keep(plan, "environment", {*wanted, place})


NO_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "the launcher chooses the devices",
    "CUDA_DEVICE_ORDER": "the launcher chooses the devices",
    "HF_TOKEN": "tokens stay outside of a script: set HF_TOKEN in your shell, or run `hf auth login`",
    "HUGGING_FACE_HUB_TOKEN": "tokens stay outside of a script: set HF_TOKEN in your shell, or run `hf auth login`",
    "HUGGINGFACE_TOKEN": "tokens stay outside of a script: set HF_TOKEN in your shell, or run `hf auth login`",
    **dict.fromkeys("RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT".split(), "the launcher sets it"),
    "PYTHONHASHSEED": "Python reads it only at startup; training.seed seeds every rank",
}


def _environment_key(node: ast.stmt) -> str | None:
    """The variable that `os.environ["X"] = ...` or `os.environ.setdefault("X", ...)` sets."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        target = node.targets[0]
        if ast.unparse(target.value) in ("os.environ", "environ") and isinstance(target.slice, ast.Constant):
            return str(target.slice.value)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if ast.unparse(call.func) in ("os.environ.setdefault", "os.putenv", "environ.setdefault") and call.args:
            return str(getattr(call.args[0], "value", "?"))
        if ast.unparse(call.func) == "os.environ.update":
            return ast.unparse(call.args[0]) if call.args else "?"
    return None


def free_names_of(node: ast.stmt) -> set[str]:
    return effects(node).all_reads


def _tokenizer_hook(plan: Plan) -> None:
    """Collect what changes the tokenizer before training."""
    program, names = plan.program, set(plan.tokenizers)
    own: set[int] = set()
    for place in range(plan.key["train"]):
        node, e = program.statements[place].node, program.effects[place]
        touched = (e.binds | e.may_bind | e.changes) & names
        if not touched or place in _key_places(plan) or isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Assign) and _is_alias(plan, node.value):
            plan.dispositions[place] = Disposition(what="settings", why="the package provides the tokenizer")
            continue
        if place in plan.dispositions or _only_looks(plan, node):
            continue
        if (e.binds | e.may_bind | e.changes) & plan.models:
            if any(
                _last_name(plan, call.func) in ("setup_chat_format", "clone_chat_template") for call in _calls(node)
            ):
                raise Refusal(
                    "R4",
                    "it adds tokens and changes the model's embeddings; instead set tokenizer.chat_template to a"
                    " template that uses tokens that the model knows",
                    program.statements[place].cell,
                )
            kept = _tokenizer_part(plan, node)
            if kept is None:
                raise _both_changed(plan, program.statements[place])
            plan.replaced[place] = kept
        own.add(place)
    stop = frozenset(names | plan.models)
    kept = set(own)
    for place in sorted(own):
        needed, given = program.slice(free_names_of(program.statements[place].node) - names, place, stop)
        kept |= needed
        if given & plan.models and place not in plan.replaced:
            raise Refusal("R4", "changes to the tokenizer depend on the model", program.statements[place].cell)
    kept -= _key_places(plan)
    _refuse_dependence(plan, kept, "changes to the tokenizer")
    _keep(plan, "tokenizer", kept)


def _both_changed(plan: Plan, statement: Statement) -> Refusal:
    reason, remedy = "one statement changes both the model and the tokenizer", "use one statement for each"
    if any(re.search(r"add_(new_|special_)?tokens$", _last_name(plan, call.func)) for call in _calls(statement.node)):
        reason, remedy = "it adds tokens to the tokenizer and to the model", "use tokens that the model knows"
    return Refusal("R4", f"{reason} (`{statement.head[:80]}`); {remedy}", statement.cell)


def _tokenizer_part(plan: Plan, node: ast.stmt) -> ast.stmt | None:
    """`if tokenizer.pad_token is None:` without `model.config.pad_token_id = ...`, which the trainer sets."""
    if not isinstance(node, ast.If) or node.orelse:
        return None
    body = [inner for inner in node.body if not _aligned_id(plan, inner)]
    if not body or any(effects(inner).changes & plan.models for inner in body):
        return None
    return ast.copy_location(ast.If(test=node.test, body=body, orelse=[]), node)


def _aligned_id(plan: Plan, node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr in ("pad_token_id", "eos_token_id", "bos_token_id")
        and root(node.targets[0]) in plan.models
    )


def _dataset_hook(plan: Plan) -> None:
    program = plan.program
    stop = frozenset({*plan.tokenizers, *plan.models, *plan.trainers})
    before = plan.key["trainer"]
    names: set[str] = set()
    for expression in (plan.train_expression, plan.eval_expression, plan.formatting):
        names |= free_names(expression) if expression is not None else set()
    places, given = program.slice(names, before, stop)
    places -= _key_places(plan) | set(plan.hooks["environment"])
    if given & plan.models:
        cell = next(
            (program.statements[p].cell for p in sorted(places) if program.effects[p].all_reads & plan.models), None
        )
        raise Refusal("R4", "the data depends on the model", cell)
    if given & plan.trainers:
        raise Refusal("R4", "the data depends on the trainer", program.statements[before].cell)
    _refuse_dependence(plan, places, "the rows")
    for place in sorted(places):
        if any(_TEMPLATES.match(program.dotted(call.func)) for call in _calls(program.statements[place].node)):
            plan.notes.append(
                f"cell {program.statements[place].cell}: apply_chat_template also sets the tokenizer's template, but"
                " the saved tokenizer may keep the model's template; set model.chat_template to save the new one"
            )
    _note_unseeded(plan, places)
    _note_hosted_paths(plan, places)
    _keep(
        plan,
        "dataset",
        {place for place in places if plan.dispositions.get(place, Disposition(what="")).what != "settings"},
    )


def refuse_tokenizer_changed_after_data(plan: Plan) -> None:
    """The script prepares the tokenizer before the data. If the notebook changes it in between, the data can differ.

    Called only if the data differs: most later changes, such as a padding token, do not affect it.

    Raises:
        Refusal: R4, with the cell of the change.
    """
    cells, effects = [one.cell for one in plan.program.statements], plan.program.effects
    users = [place for place in plan.hooks["dataset"] if effects[place].all_reads & set(plan.tokenizers)]
    late = [place for place in plan.hooks["tokenizer"] if users and place > users[0]]
    if late:
        raise Refusal(
            "R4",
            f"the tokenizer is changed after cell {cells[users[0]]} prepares data with it; move the change before that"
            " cell",
            cells[late[-1]],
        )


def _note_hosted_paths(
    plan: Plan, places: set[int], what_to_do: str = "change it in build_dataset, or pass --data.train_file"
) -> None:
    for place in sorted(places):
        for node in ast.walk(plan.program.statements[place].node):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.startswith(("/content/", "/kaggle/", "../input/"))
            ):
                path = f"cell {plan.program.statements[place].cell}: {node.value}"
                plan.notes.append(f"{path} is a path on a hosted service; {what_to_do}")


def _note_unseeded(plan: Plan, places: set[int]) -> None:
    """Each machine prepares the data itself, so without a seed the data would differ between machines."""
    for place in sorted(places):
        for call in _calls(plan.program.statements[place].node):
            name = getattr(call.func, "attr", "")
            if root(call.func) in plan.program.imports:
                continue  # random.shuffle, seeded by random.seed
            if (
                name in ("shuffle", "train_test_split")
                and not {"seed", "random_state"} & {k.arg for k in call.keywords}
                and not call.args[1:]
            ):
                cell = plan.program.statements[place].cell
                plan.notes.append(
                    f"cell {cell}: {name}() has no seed, so each machine would order the rows differently; set a seed"
                )


def _refuse_dependence(plan: Plan, places: set[int], what: str) -> None:
    """Refuse what a function of the script cannot do, such as using shell output or processes."""
    for place in sorted(places):
        statement = plan.program.statements[place]
        for node in ast.walk(statement.node):
            if isinstance(node, ast.Call):
                name = plan.program.dotted(node.func)
                if name == "__shell__":
                    raise Refusal(
                        "R4", f"{what} depend on the output of a shell command; write it into the cell", statement.cell
                    )
                if name == "multiprocessing.cpu_count":
                    continue  # for num_proc: how many processes map the rows changes no row
                if name.split(".")[0] in ("subprocess", "multiprocessing") or name in (
                    "os.system",
                    "os.popen",
                    "input",
                    "google.colab.files.upload",
                ):
                    raise Refusal(
                        "R4",
                        f"{what} depend on {name}(); run it first and write its result into a cell",
                        statement.cell,
                    )
                if _SERVICES.match(name):
                    raise Refusal(
                        "R4",
                        f"{what} depend on a service ({name}); call it once and save the result to a file",
                        statement.cell,
                    )
                if _OTHER_MODELS.search(name):
                    raise Refusal(
                        "R4", f"{what} depend on another model ({name}); save what it makes to a file", statement.cell
                    )
                if name.rsplit(".", 1)[-1] in _COMMAND_LINE and not node.args and not node.keywords:
                    raise Refusal(
                        "R4", f"{what} depend on the command line; pass {name}() an empty list", statement.cell
                    )
        if any(isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) for node in _own_nodes(statement.node)):
            raise Refusal("R4", f"{what} depend on a top-level await", statement.cell)


_TEMPLATES = re.compile(r"unsloth\b.*\bapply_chat_template$")
_SERVICES = re.compile(
    r"(openai|anthropic|groq|cohere|mistralai|litellm|ollama|together|google\.generativeai|google\.genai|vllm|distilabel"
    r"|requests\.post|huggingface_hub\.InferenceClient)\b"
)
_OTHER_MODELS = re.compile(
    r"((AutoModel\w*|Fast\w*Model)\.from_pretrained|^transformers\.pipeline|\bSentenceTransformer)$"
)
_COMMAND_LINE = ("parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config")


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes outside nested functions."""
    yield node
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _own_nodes(inner)


# Methods called on a model before training that the package handles, or that do not affect training.
MODEL_BY_PACKAGE = {
    "to": "each rank puts the model on its own device",
    "cuda": "each rank puts the model on its own device",
    "half": "set by model.dtype",
    "bfloat16": "set by model.dtype",
    "float": "set by model.dtype",
    "train": "the trainer does it",
    "eval": "the trainer sets the mode",
    "for_training": "the trainer does it",
    "for_inference": "inference",
    "gradient_checkpointing_enable": "set by training.gradient_checkpointing",
    "enable_input_require_grads": "the package does it",
    "print_trainable_parameters": "display",
}


MODEL_FLAGS = ("is_parallelizable", "model_parallel")  # for one model on several devices, which ranks do not use


def _model_hook(plan: Plan) -> None:
    """Collect what changes the model before training, except the adapter, and settings of libraries."""
    program = plan.program
    attached = _adapter_place(plan)
    own = {
        place
        for place, statement in enumerate(program.statements[: plan.key["train"]])
        if place not in plan.dispositions and program.sets_library(statement.node)
    }
    for place in range(plan.key["loader"] + 1, plan.key["train"]):
        statement, e = program.statements[place], program.effects[place]
        node = statement.node
        if (
            place in plan.dispositions
            or place in _key_places(plan)
            or not (e.binds | e.may_bind | e.changes) & plan.models
        ):
            continue
        if place in own:
            continue
        if re.search(rf"\.({'|'.join(MODEL_FLAGS)}) = ", ast.unparse(node)):
            plan.dispositions[place] = Disposition(
                what="dropped", why="each rank has the whole model on its own device"
            )
            continue
        if isinstance(node, ast.Import | ast.ImportFrom) or _only_looks(plan, node):
            continue
        if (why := _by_package(plan, node)) is not None:
            plan.dispositions[place] = Disposition(what="dropped", why=why)
            continue
        if e.binds & plan.models:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in plan.models:
                plan.dispositions[place] = Disposition(what="settings", why="another name for the model")
                continue
            if not _gives_back_the_model(plan, node):
                raise _replaced(plan, statement)
        if (reasons := _all_by_package(plan, node)) is not None:
            plan.dispositions[place] = Disposition(what="dropped", why=reasons)
            continue
        if attached is not None and _only_freezes(node):
            plan.dispositions[place] = Disposition(what="dropped", why="PEFT freezes the base model")
            continue
        resized = "adapter" not in plan.key and ".resize_token_embeddings(" in ast.unparse(node)  # in either order
        if attached is not None and place < attached and not (resized or _sets_config(plan, node)):
            raise Refusal(
                "R4",
                f"the model is changed before the adapter is attached (`{statement.head[:80]}`), but prepare_model runs"
                " afterwards; change the model after attaching the adapter, or leave this out",
                statement.cell,
            )
        own.add(place)
    stop = frozenset({*plan.tokenizers, *plan.models})
    kept = set(own)
    for place in own:  # skip imported libraries: seeding torch counts as a change, but only the import is needed
        names = free_names_of(program.statements[place].node) - stop - program.imports.keys()
        kept |= program.slice(names, place, stop)[0]
    _refuse_dependence(plan, kept, "changes to the model")
    _keep(plan, "model", kept - _key_places(plan))


def _adapter_place(plan: Plan) -> int | None:
    """The statement that attaches the adapter: get_peft_model, or a trainer with a peft_config."""
    trainer = event_of(plan.trace, "trainer")
    given = trainer is not None and trainer["forms"].get("peft_config") is not None
    return plan.key.get("adapter", plan.key["trainer"] if given else None)


def _only_freezes(node: ast.stmt) -> bool:
    """`for p in model.parameters(): p.requires_grad = False`"""
    return isinstance(node, ast.For) and all(
        isinstance(inner, ast.Assign) and ast.unparse(inner).endswith(".requires_grad = False") for inner in node.body
    )


def _by_package(plan: Plan, node: ast.stmt) -> str | None:
    value = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if root(value.func) in plan.models or any(root(item) in plan.models for item in value.args):
            return MODEL_BY_PACKAGE.get(value.func.attr)
    return None


def _sets_config(plan: Plan, node: ast.stmt) -> bool:
    """`model.config.x = ...`, also under a condition or in a function of the notebook called with the model."""
    if isinstance(node, ast.If):
        return all(_sets_config(plan, inner) for inner in [*node.body, *node.orelse])
    if (called := _call_with_model(plan, node)) is not None:
        body, name = called
        inside = replace(plan, models={name})
        return all(_sets_config(inside, inner) or _by_package(inside, inner) is not None for inner in body) and not (
            _moves(body)
        )
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and bool(re.search(r"\.(config|generation_config)\.", ast.unparse(node.targets[0])))
    )


def _all_by_package(plan: Plan, node: ast.stmt) -> str | None:
    """The reason to leave out a function called with the model, if the package does everything that it does."""
    if (called := _call_with_model(plan, node)) is None:
        return None
    reasons = [_by_package(replace(plan, models={called[1]}), inner) for inner in called[0]]
    return "; ".join(dict.fromkeys(filter(None, reasons))) if reasons and all(reasons) else None


def _call_with_model(plan: Plan, node: ast.stmt) -> tuple[list[ast.stmt], str] | None:
    """If the statement calls a function of the notebook with the model: its body, and the parameter for the model."""
    call = node.value if isinstance(node, ast.Assign | ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        return None
    function = plan.program.definition(call.func.id)
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    names = [item.arg for item in [*function.args.posonlyargs, *function.args.args]]
    given = list(zip(names, call.args, strict=False)) + [(item.arg or "", item.value) for item in call.keywords]
    models = [name for name, value in given if isinstance(value, ast.Name) and value.id in plan.models]
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    body = body[:-1] if body and isinstance(body[-1], ast.Return) else body
    return (body, models[0]) if len(models) == 1 else None


def _moves(body: list[ast.stmt]) -> bool:
    """Whether the model may change device or dtype, which kept functions must not do."""
    return any(_method(call) in ("to", "cuda", "half", "float", "bfloat16") for inner in body for call in _calls(inner))


def _gives_back_the_model(plan: Plan, node: ast.stmt) -> bool:
    """`model = prepare(model)`, if the function returns its argument."""
    called = _call_with_model(plan, node)
    if called is None or not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return False
    body, name = called
    assert isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
    last = getattr(plan.program.definition(node.value.func.id), "body", [None])[-1]
    again = any(name in effects(inner).binds | effects(inner).may_bind for inner in body)
    again = again or _moves(body)
    early = any(isinstance(one, ast.Return) for inner in body for one in _own_nodes(inner))
    return (
        isinstance(last, ast.Return)
        and isinstance(last.value, ast.Name)
        and last.value.id == name
        and not (again or early)
    )


def _replaced(plan: Plan, statement: Statement) -> Refusal:
    remedy = "leave it out, or change the model in place"
    if any(plan.program.dotted(call.func) == "torch.compile" for call in _calls(statement.node)):
        remedy = "leave it out, or pass torch_compile=True to SFTConfig"
    return Refusal(
        "R4",
        f"the model is replaced by another object before training (`{statement.head[:80]}`); {remedy}",
        statement.cell,
    )


def _trainer_hook(plan: Plan) -> None:
    """Collect what changes the trainer between its creation and train()."""
    program = plan.program
    stop = frozenset({*plan.tokenizers, *plan.models, *plan.trainers})
    kept: set[int] = set()
    for place in range(plan.key["trainer"] + 1, plan.key["train"]):
        statement, e = program.statements[place], program.effects[place]
        node = statement.node
        touched = (e.binds | e.may_bind | e.changes) & plan.trainers
        if not touched or place in _key_places(plan) or place in plan.dispositions or _only_looks(plan, node):
            continue
        text = ast.unparse(node)
        if re.search(r"\.(train_dataset|eval_dataset|data_collator|compute_loss|optimizer|lr_scheduler)\s*=", text):
            raise Refusal(
                "R4",
                f"the trainer is changed after it is created (`{statement.head[:80]}`); pass it as an argument",
                statement.cell,
            )
        if match := re.search(r"\.args\.(\w+)\s*=[^=]", text):
            raise Refusal(
                "R4",
                f"{match[1]} is set after the trainer is created (`{statement.head[:80]}`); pass it to SFTConfig"
                " instead, so that it becomes a setting",
                statement.cell,
            )
        if isinstance(node, ast.Expr) and re.match(r"\w+\.(evaluate|log|log_metrics|save_metrics)\(", text):
            plan.dispositions[place] = Disposition(what="dropped", why="the package evaluates before training")
            continue
        kept.add(place)
        kept |= program.slice(free_names_of(node) - stop, place, stop)[0]
    if plan.callbacks is not None:
        kept |= program.slice(free_names(plan.callbacks) - stop, plan.key["trainer"], stop)[0]
    _refuse_dependence(plan, kept, "changes to the trainer")
    _keep(plan, "trainer", kept - _key_places(plan))


# --- after training ---------------------------------------------------------------------------------------------------

EXPORTS = frozenset(
    "save_pretrained_merged save_pretrained_gguf save_pretrained_torchao save_pretrained_ggml push_to_hub"
    " push_to_hub_merged"
    " push_to_hub_gguf push_to_hub_ggml push_to_hub_torchao merge_and_unload save_lora unsloth_save_model".split()
)
_ORDINARY = frozenset("save_pretrained save_model save_state".split())
_PLACEHOLDER = re.compile(
    r"YOUR_|your[-_]|hf_username|HF_USERNAME|HF_ACCOUNT|USERNAME|<.*>|repo_id/|^hf/", re.IGNORECASE
)


def _method(call: ast.Call) -> str:
    """The method called, or Unsloth's function that saves."""
    if isinstance(call.func, ast.Name) and call.func.id == "unsloth_save_model":
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _texts_given(plan: Plan, place: int, calls: list[ast.Call]) -> list[str]:
    """The strings in these calls of a statement, and the values that their arguments had when it ran."""
    written = [n.value for call in calls for n in ast.walk(call) if isinstance(n, ast.Constant)]
    ran = [item for item in plan.trace["events"] if item["kind"] == "call" and item.get("method") in EXPORTS]
    given = [value for item in ran if plan.program.position(item["statement"]) == place for value in item["detail"][1]]
    return [value for value in [*written, *given] if isinstance(value, str)]


def _refuse_late_template(plan: Plan) -> None:
    """Refuse a chat template that is set after training for the saved tokenizer: it is not the one trained with."""
    program = plan.program
    late = None
    for place in range(plan.key["train"] + 1, len(program.statements)):
        node = program.statements[place].node
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Attribute) and target.attr == "chat_template" and root(target) in plan.tokenizers:
            late = program.statements[place]
        saves = any(_method(call) == "save_pretrained" and root(call.func) in plan.tokenizers for call in _calls(node))
        if late is not None and saves:
            raise Refusal(
                "R4",
                f"the tokenizer is saved with a chat template that is set after training (`{late.head[:80]}`); set it"
                " before the data is prepared",
                late.cell,
            )


def _save_hook(plan: Plan) -> None:
    """Turn ordinary saves into training.output_dir, and keep exports with everything they need."""
    program = plan.program
    exports: list[int] = []
    roles = plan.models | plan.trainers | set(plan.tokenizers)
    merged: set[str] = set()  # results of `model.merge_and_unload()`; saving one is an export
    folders: set[str] = set()
    again: set[str] = set()
    for place in range(plan.key["train"] + 1, len(program.statements)):
        statement = program.statements[place]
        calls = [call for call in _calls(statement.node) if _method(call)]
        if isinstance(statement.node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            continue
        if _makes(plan, statement.node, "from_pretrained"):
            again |= program.effects[place].binds & (roles | merged)
        saving = [call for call in calls if root(call.func) in roles | merged and _method(call) in EXPORTS | _ORDINARY]
        if not saving or place in plan.dispositions:
            continue
        of_merged = [call for call in saving if root(call.func) in merged]
        folders |= {ast.unparse(call.args[0]) for call in of_merged if call.args}
        if isinstance(statement.node, ast.Assign) and any(_method(call) == "merge_and_unload" for call in saving):
            merged |= program.effects[place].binds
        whole = bool(of_merged) or any(call.args and ast.unparse(call.args[0]) in folders for call in saving)
        if any(root(call.func) in again for call in saving):
            again |= program.effects[place].binds
            why = "uses a model loaded again after training; do this separately, from the saved folder"
            plan.dispositions[place] = Disposition(what="dropped", why=why)
            plan.notes.append(f"cell {statement.cell}: `{statement.head[:60]}` is left out: it {why}")
        elif all(_method(call) in _ORDINARY for call in saving) and not whole:
            if any(_method(call) in EXPORTS for call in calls):
                why = "do this from training.output_dir, where the trained model and its tokenizer are"
                plan.notes.append(f"cell {statement.cell}: the export in `{statement.head[:60]}` is left out: {why}")
            plan.dispositions[place] = Disposition(
                what="settings",
                why="the final model and tokenizer are saved into training.output_dir, by the main rank",
            )
        elif any(root(call.func) in plan.trainers for call in saving):
            if any(_method(call) == "merge_and_unload" for call in saving):
                raise Refusal(
                    "R4",
                    f"the trainer's model is merged (`{statement.head[:60]}`); merge `model` instead, because an export"
                    " gets the model but not the trainer",
                    statement.cell,
                )
            why = "publish the finished folder with `hf upload`"
            plan.dispositions[place] = Disposition(what="dropped", why=why)
            plan.notes.append(f"cell {statement.cell}: `{statement.head[:60]}` is left out: {why}")
        elif any(_PLACEHOLDER.search(text) for text in _texts_given(plan, place, saving)):
            plan.dispositions[place] = Disposition(what="dropped", why="the account or token is a placeholder")
        else:
            exports.append(place)
    if not exports:
        return
    stop = frozenset({*plan.tokenizers, *plan.models})
    kept = set(exports)
    for place in exports:
        needed, given = program.slice(free_names_of(program.statements[place].node) - stop, place, stop | plan.trainers)
        if given & plan.trainers or any(p in plan.hooks["dataset"] and not _pure(plan, p) for p in needed):
            raise Refusal(
                "R4", "an export after training needs the trainer or the data", program.statements[place].cell
            )
        kept |= needed
    for place in range(plan.key["train"] + 1, max(exports)):  # changes to the model in between, such as quantize_
        statement, e = program.statements[place], program.effects[place]
        if (
            place in plan.dispositions
            or not e.changes & plan.models
            or _only_looks(plan, statement.node)
            or _by_package(plan, statement.node)
        ):
            continue
        kept |= {place} | program.slice(free_names_of(statement.node) - stop, place, stop)[0]
    _keep(plan, "save", kept - _key_places(plan))


# --- settings, constants, the rest ------------------------------------------------------------------------------------


def _settings(plan: Plan) -> None:
    """Turn the key statements, and what only they need, into settings."""
    program = plan.program
    stop = frozenset({*plan.tokenizers, *plan.models, *plan.trainers})
    for name, place in plan.key.items():
        node = program.statements[place].node
        names = free_names_of(node)
        if name == "train":
            names = set()
        needed, _ = program.slice(names - stop, place, stop)
        for item in sorted(needed):
            if item not in plan.dispositions and not isinstance(
                program.statements[item].node, ast.Import | ast.ImportFrom
            ):
                plan.dispositions[item] = Disposition(what="settings", why=f"used for the {name}")
        plan.dispositions[place] = Disposition(
            what="settings",
            why={
                "loader": "model and data sections",
                "adapter": "lora section",
                "trainer": "training section",
                "responses": "data.instruction_part and data.response_part",
                "train": "script.run trains",
                "tokenizer": "the package loads the tokenizer",
                "kbit": "the package prepares quantized models",
            }[name],
        )


def _note_defaults(plan: Plan) -> None:
    """Note environment variables that the notebook reads, but the script does not, because the values are settings."""
    for item in plan.trace["events"]:
        place = plan.program.position(item["statement"]) if item["kind"] == "asked" else None
        if place is not None and plan.dispositions[place].what == "settings":
            name, default = item["detail"]
            plan.notes.append(
                f"cell {_cell(plan, item)}: {name} is read from the environment; the settings have its"
                f" default, {default!r}"
            )


def _shared_constants(plan: Plan) -> None:
    """Move constants and functions that several functions of the script need to its top level."""
    hooks = [name for name in HOOKS if name not in ("environment", "module")]
    places = [place for name in hooks for place in plan.hooks[name]]
    shared = {place for place in places if places.count(place) > 1}
    shared -= {
        place for place in shared if isinstance(plan.program.statements[place].node, ast.Import | ast.ImportFrom)
    }
    lifted = set(shared)
    for place in shared:
        needed, _ = plan.program.slice(free_names_of(plan.program.statements[place].node), place)
        lifted |= {
            item for item in needed if not isinstance(plan.program.statements[item].node, ast.Import | ast.ImportFrom)
        }
    for place in sorted(lifted):
        if not _pure(plan, place):
            raise Refusal(
                "R4", "two parts of the training depend on the same computed value", plan.program.statements[place].cell
            )
    for name in hooks:
        plan.hooks[name] = [place for place in plan.hooks[name] if place not in lifted]
    _keep(plan, "module", lifted)


_DISPLAY = frozenset("print display HTML Audio Markdown Image pprint clear_output show_state".split())
_LOOKS = frozenset(
    "decode batch_decode apply_chat_template print_trainable_parameters head tail describe info show plot hist"
    " items keys"
    " values format join split strip replace lower upper startswith endswith get get_memory_footprint num_parameters"
    " select shuffle map filter take skip unique train_test_split to_pandas removeprefix removesuffix splitlines encode"
    " tokenize convert_ids_to_tokens convert_tokens_to_ids parameters named_parameters modules named_modules numel size"
    " get_secret"
    " dim shape generate for_inference for_training eval to cuda cpu item tolist copy count index sum mean max min"
    " std len"
    " value_counts sample iloc loc groupby agg apply notnull isnull astype reset_index sort_values rename concat"
    " remove_columns rename_column cast_column add_column flatten get_input_embeddings get_output_embeddings"
    " named_children"
    " get_vocab set_verbosity set_verbosity_error set_verbosity_info filterwarnings simplefilter basicConfig getLogger"
    " setLevel strftime now time perf_counter total_seconds isoformat as_default current_device empty_cache collect"
    " train_on_responses_only ipc_collect text text_generation parse_response raise_for_status json findall search"
    " match"
    " sub group evaluate state_dict device_count from_list from_dict from_pandas stack unsqueeze squeeze encode_plus"
    " get_added_vocab get_nb_trainable_parameters features isoformat zfill title capitalize isdigit nunique dropna"
    " fillna"
    " mkdir most_common get_train_dataloader get_eval_dataloader data_collator"
    " drop merge idxmax to_dict to_list isin str len iterrows itertuples read readlines".split()
)
_PURE_ROOTS = frozenset(
    "torch platform gc psutil time math os re json random collections itertools functools datetime copy string"
    " numpy pandas"
    " datasets transformers unsloth trl peft warnings logging textwrap typing sys matplotlib seaborn tqdm IPython"
    " requests"
    " huggingface_hub accelerate bitsandbytes importlib packaging xformers triton scipy sklearn plotly inspect"
    " pprint locale dataclasses enum rich tabulate nvidia_smi pynvml GPUtil urllib google kaggle_secrets dotenv"
    " evaluate bokeh altair wordcloud prettytable ipywidgets"
    " types pathlib omegaconf easydict munch box ml_collections".split()
)
_NOT_PURE = re.compile(
    r"^(os\.(system|popen|exec\w*|spawn\w*|kill|fork|remove|unlink|rename|replace|rmdir|removedirs)"
    r"|sys\.(settrace|setprofile)|requests\.(post|put|delete|patch)|urllib\.request\.urlretrieve|datasets\..*push_to_hub"
    r"|huggingface_hub\.(upload_\w+|create_repo|delete_\w+|HfApi.*)|unsloth\.dataprep\b.*|torch\.distributed\..*"
    r"|torch\.set_(default|float32|deterministic)\w*|torch\.use_deterministic\w*|accelerate\..*launch\w*|.*\.SyntheticDataKit.*)$"
)
# Accounts and services: training does not depend on them.
_ACCOUNTS = re.compile(
    r"^(wandb\.(login|init|finish|log|config.*|Settings)|huggingface_hub\.(login|notebook_login|interpreter_login|HfFolder.*|get_token|whoami)"
    r"|google\.colab\..*|kaggle_secrets\..*|dotenv\.load_dotenv|mlflow\..*|comet_ml\..*|trackio\..*|login|notebook_login"
    r"|getpass\.getpass|neptune\..*|nltk\.download)$"
)


def _calls(node: ast.AST) -> list[ast.Call]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def _harmless(
    plan: Plan, call: ast.Call, seen: frozenset[str] = frozenset(), local: frozenset[str] = frozenset()
) -> bool:
    """Whether a call has no lasting effect. `local`: local names of the enclosing function."""
    import builtins

    name = plan.program.dotted(call.func)
    last = name.rsplit(".", 1)[-1] if name else getattr(call.func, "attr", "")
    if name.startswith(("subprocess.", "os.")) and (command := process_command(call)):
        return bool(_INSTALLS.match(command) or _NO_TRACE.match(command))
    if _NOT_PURE.match(name):
        return False
    if last == "open" or last in ("write", "dump", "write_text", "save"):
        return _reads_file(call)
    if last in _DISPLAY or _ACCOUNTS.match(name) or last in _LOOKS:
        return True
    if root(call.func) not in local and _on_scratch(plan, call):
        return True
    if name.split(".")[0] in ("unsloth", "peft", "trl") and last[:1].islower() and last != "pipeline":
        if any(isinstance(item, ast.Name) and item.id in plan.models for item in call.args):
            return False  # such as add_new_tokens(model, ...)
    if isinstance(call.func, ast.Name):
        if call.func.id in {*plan.tokenizers, *plan.models, *local}:
            return True
        definition = plan.program.definition(call.func.id)
        if definition is not None and call.func.id not in seen:
            return isinstance(definition, ast.ClassDef) or _harmless_function(plan, definition, seen | {call.func.id})
        if call.func.id in plan.program.imports:
            return name.split(".")[0] in _PURE_ROOTS
        return hasattr(builtins, call.func.id) and call.func.id not in (
            "exec",
            "eval",
            "compile",
            "__import__",
            "setattr",
            "exit",
            "quit",
        )
    if isinstance(call.func, ast.Lambda):
        return True
    if root(call.func) in local and last not in _CHANGING - {"append", "extend", "update"}:
        return True
    return bool(name) and name.split(".")[0] in _PURE_ROOTS and root(call.func) in plan.program.imports


_FILLS = frozenset(
    "add append appendleft clear discard extend insert pop popitem remove reverse setdefault sort subtract"
    " update".split()
)


def _on_scratch(plan: Plan, call: ast.Call) -> bool:
    """A method of a display object, or one that fills a collection. If training needs the result, it is kept anyway."""
    if not isinstance(call.func, ast.Attribute):
        return False
    name, method = root(call.func), call.func.attr
    if name in plan.collections:
        return method in _FILLS and not isinstance(call.func.value, ast.Call | ast.Attribute)
    return name in plan.scratch and method not in EXPORTS | _ORDINARY


def _harmless_function(plan: Plan, node: ast.stmt, seen: frozenset[str]) -> bool:
    """Whether a function of the notebook only computes: it calls nothing harmful and changes nothing outside."""
    names = [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)]
    given = [inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)]
    made = {  # objects created by the function, which it may change
        name
        for inner in ast.walk(node)
        if isinstance(inner, ast.Assign) and not isinstance(inner.value, ast.Name | ast.Attribute | ast.Subscript)
        for name in target_names(inner.targets[0])
    }
    stores = [inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute | ast.Subscript)]
    if any(isinstance(inner.ctx, ast.Store) and root(inner) not in made for inner in stores):
        return False
    return all(_harmless(plan, inner, seen, frozenset([*names, *given])) for inner in _calls(node))


def _reads_file(call: ast.Call) -> bool:
    mode = call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "mode"), None)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name == "open" and (
        mode is None or (isinstance(mode, ast.Constant) and not set(str(mode.value)) & set("wax+"))
    )


def _only_looks(plan: Plan, node: ast.stmt) -> bool:
    """Whether a statement only displays, measures or generates, so that training is unaffected."""
    if isinstance(node, ast.Expr):
        calls = _calls(node)
        return all(_harmless(plan, call) for call in calls) and not _changes_role(plan, node)
    if _sets_elements(node) & {*plan.models, *plan.tokenizers, *plan.trainers}:
        return False
    if isinstance(node, ast.For | ast.If | ast.With | ast.While | ast.Try | ast.AsyncFor | ast.AsyncWith):
        inner = [item for item in ast.iter_child_nodes(node) if isinstance(item, ast.stmt)]
        inner += [item for handler in getattr(node, "handlers", []) for item in handler.body]
        heads = [item for item in ast.iter_child_nodes(node) if isinstance(item, ast.expr | ast.withitem)]
        return all(_harmless(plan, call) for head in heads for call in _calls(head)) and all(
            isinstance(item, ast.Pass | ast.Break | ast.Continue | ast.Raise | ast.Import | ast.ImportFrom)
            or (isinstance(item, ast.Assign | ast.AugAssign | ast.AnnAssign) and _leaves_roles(plan, item))
            or _only_looks(plan, item)
            for item in inner
        )
    return isinstance(node, ast.Assert | ast.Delete | ast.Pass | ast.Raise)


def _sets_elements(node: ast.stmt) -> set[str]:
    """Names that a loop changes by assigning to attributes of their elements or by casting modules."""
    stores = [
        n for n in ast.walk(node) if isinstance(n, ast.Attribute | ast.Subscript) and isinstance(n.ctx, ast.Store)
    ]
    return changed_in_loop(node) if stores or casts_modules(node) else set()


def _leaves_roles(plan: Plan, node: ast.stmt) -> bool:
    e = effects(node)
    roles = plan.models | plan.trainers | set(plan.tokenizers)
    return not (e.binds | e.may_bind | e.changes) & roles and all(_harmless(plan, call) for call in _calls(node))


_CHANGING = frozenset(
    "add_tokens add_special_tokens resize_token_embeddings add_callback remove_callback append extend update".split()
)


def _changes_role(plan: Plan, node: ast.Expr) -> bool:
    return any(_method(call) in _CHANGING and not _on_scratch(plan, call) for call in _calls(node))


_PURE_MAKERS = frozenset(
    "re os json textwrap string math types pathlib yaml omegaconf easydict munch box ml_collections".split()
)


def _pure(plan: Plan, place: int) -> bool:
    """Whether a statement only computes a value from constants and other pure values."""
    node = plan.program.statements[place].node
    if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        reads = effects(node).all_reads
        return not reads & (plan.models | plan.trainers | set(plan.tokenizers))
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        import builtins

        safe = all(
            (
                isinstance(call.func, ast.Name)
                and (hasattr(builtins, call.func.id) or plan.program.definition(call.func.id) is not None)
            )
            or (
                isinstance(call.func, ast.Attribute)
                and call.func.attr in _LOOKS
                and root(call.func) not in plan.program.imports
            )
            or plan.program.dotted(call.func).split(".")[0] in _PURE_MAKERS
            for call in _calls(node)
        )
        return safe and not effects(node).all_reads & (plan.models | plan.trainers | set(plan.tokenizers))
    return False


def _dropped(plan: Plan, notebook: Notebook) -> None:
    """Give each remaining statement a reason to be dropped, or refuse the notebook."""
    program = plan.program
    for place, statement in enumerate(program.statements):
        if place in plan.dispositions:
            continue
        after = place > plan.key["train"]
        why = _why_dropped(plan, place, statement)
        if why is None and _installs(plan, notebook, statement):
            why = "installation"
        if why is None and after:
            why = "after training, so not part of it"
        if why is None:
            raise Refusal(
                "R4",
                f"a script cannot reproduce this statement before training: `{statement.head[:120]}`",
                statement.cell,
            )
        plan.dispositions[place] = Disposition(what="dropped", why=why)
        for call in _calls(statement.node):
            remedy = None if after else _LEFT_TO_THE_READER.get(program.dotted(call.func))
            if after and _method(call) in EXPORTS | _ORDINARY and _method(call) != "save_state":
                remedy = "do this from training.output_dir, where the trained model and its tokenizer are"
            if after and _method(call).startswith("upload_"):
                remedy = "publish the finished folder with `hf upload`"
            if remedy is not None:
                plan.notes.append(f"cell {statement.cell}: `{statement.head[:60]}` is left out: {remedy}")


_LEFT_TO_THE_READER = {
    "google.colab.files.upload": "put the files next to the script",
    "os.chdir": "start the script in that folder",
}


def _only_installs(plan: Plan, notebook: Notebook, cell: int) -> bool:
    """Whether a cell installs packages and has no key statement."""
    return cell in notebook.install and all(plan.program.statements[place].cell != cell for place in plan.key.values())


def _installs(plan: Plan, notebook: Notebook, statement: Statement) -> bool:
    """Whether it is a branch in an installation cell, or a branch with shell lines in a cell that also installs."""
    node = statement.node
    if not isinstance(node, ast.If | ast.Try) or statement.cell not in notebook.install:
        return False
    last = statement.line + (node.end_lineno or node.lineno) - node.lineno
    return _only_installs(plan, notebook, statement.cell) or any(
        shell.cell == statement.cell and statement.line <= shell.line <= last for shell in notebook.shells
    )


def _why_dropped(plan: Plan, place: int, statement: Statement) -> str | None:
    node = statement.node
    text = ast.unparse(node)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return "unused import"
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return "unused definition"
    calls = _calls(node)
    if any(_ACCOUNTS.match(plan.program.dotted(call.func)) for call in calls):
        return "account or service: a script does not log in (set HF_TOKEN, or run `hf auth login`)"
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        service = plan.program.dotted(node.value.func)
        if (
            _SERVICES.match(service)
            and service.rsplit(".", 1)[-1][:1].isupper()
            and _leaves_arguments(plan, node.value)
        ):
            return "client of a service that the training does not use"
    if re.search(r"\b(set_seed|manual_seed\w*|seed_everything|\w+\.seed)\(", text) and isinstance(node, ast.Expr):
        return "training.seed seeds every rank"
    if re.search(r"torch\.(cuda|backends)|max_memory|gpu_stats|used_memory|trainer_stats|start_gpu", text) and _leaves(
        plan, node
    ):
        return "memory and time statistics"
    if place < plan.key["trainer"] and _makes(plan, node, "SFTTrainer", "get_peft_model", "from_pretrained"):
        return "repeated later"
    if re.search(r"\.generate\(|for_inference|TextStreamer|TextIteratorStreamer|pipeline\(|_inference\(", text):
        return "inference" if _leaves(plan, node) or place > plan.key["train"] else None
    if isinstance(node, ast.Expr) and not calls:
        return "display"
    writing = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    path = None if writing is None else written_path(writing)
    if path is not None and not _kept_names(plan, path):
        if all(_harmless(plan, call) for call in calls if call is not writing):
            return "file that no kept statement reads"
    if _only_looks(plan, node):
        return "display" if isinstance(node, ast.Expr | ast.For | ast.While) else "check or display"
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and _leaves(plan, node):
        return "unused value" if calls else "unused literal"
    return None


def _leaves_arguments(plan: Plan, call: ast.Call) -> bool:
    """Whether the arguments of a call only compute."""
    given = [*call.args, *(item.value for item in call.keywords)]
    return all(_harmless(plan, inner) for value in given for inner in _calls(value))


def _kept_names(plan: Plan, path: ast.expr) -> bool:
    """Whether something kept mentions the file or folder, or a name or literal in its path."""
    kept = [plan.program.statements[place].node for hook in HOOKS for place in plan.hooks[hook]]
    read = {name for node in kept for name in effects(node).all_reads} - plan.program.imports.keys()
    texts = {node.value for node in ast.walk(path) if isinstance(node, ast.Constant)}
    return bool(free_names(path) & read) or any(
        isinstance(inner, ast.Constant) and inner.value in texts for node in kept for inner in ast.walk(node)
    )


def _makes(plan: Plan, node: ast.stmt, *names: str) -> bool:
    """Whether it assigns the result of one of these calls, such as a trainer that a later cell creates again."""
    return (
        isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _last_name(plan, node.value.func) in names
    )


def _leaves(plan: Plan, node: ast.stmt) -> bool:
    return all(_harmless(plan, call) for call in _calls(node))


# --- lines that are not Python ----------------------------------------------------------------------------------------

_INSTALLS = re.compile(
    r"(?:^|&&\s*|;\s*)(?:sudo\s+)?(?:\S*python3?\s+-m\s+)?(?:pip3?|uv|conda|mamba|apt|apt-get|npm|brew|poetry)\b|^%(?:pip|conda|uv)\b"
)
_NO_TRACE = re.compile(
    r"^(?:sudo\s+)?(?:nvidia-smi|rocm-smi|rocminfo|amd-smi|ls|pwd|df|du|free|whoami|which|lscpu|nvcc|cat|head|tail|wc|uname|date|echo|export"
    r"|huggingface-cli|hf|wandb|kill|pkill|sleep|env|printenv|clear|mkdir|chmod|set|tree|python3?\s+--?V|git\s+(?:config|--version|lfs)"
    r"|ldconfig|export\s|source|unset|nproc|top|ps)\b"
)
_READS_LOCAL = re.compile(
    r"data_files|read_csv|read_json|read_parquet|read_excel|from_csv|from_json|load_from_disk|data_dir|open\(|/content/|\.jsonl|\.csv|\.parquet"
)


def _shells(plan: Plan, notebook: Notebook) -> None:
    """Leave out shell lines, unless something kept needs a file that they create."""
    kept = [plan.program.statements[place].source for name in HOOKS for place in plan.hooks[name]]
    text = "\n".join(kept)
    literals = _literals(plan)
    trained = plan.program.statements[plan.key["train"]].cell
    local = bool(_READS_LOCAL.search(text))
    for shell in notebook.shells:
        if shell.cell > trained:
            continue
        if match := re.match(r"[%!]?cd\s+(\S+)\s*$", shell.text):
            if local:
                plan.notes.append(f"cell {shell.cell}: paths are relative to {match[1]}; start the script there")
            continue
        if shell.kind == "file":
            if shell.writes and (
                shell.writes.rsplit("/", 1)[-1] in text
                or re.search(
                    rf"\b(import|from) {re.escape(shell.writes.rsplit('/', 1)[-1].removesuffix('.py'))}\b", text
                )
            ):
                raise Refusal("R4", f"training uses {shell.writes}, which a cell writes", shell.cell)
            continue
        if _INSTALLS.search(shell.text) or (_NO_TRACE.match(shell.text) and ">" not in shell.text):
            continue
        if shell.kind == "magic" and not shell.text.startswith(
            ("%run", "%cp", "%mv", "%rm", "%cd", "%writefile", "%store", "%bash", "%sx", "%system")
        ):
            continue
        if (file := _made_file(shell)) is not None:
            if file in text or any(file in literal for literal in literals):
                raise Refusal(
                    "R4", f"training needs {file}, which a shell command creates (`{shell.text[:80]}`)", shell.cell
                )
            continue
        named = any(word in literal for word in _words(shell.text) for literal in literals)
        if _only_installs(plan, notebook, shell.cell) and not named:
            continue
        if local or named:
            raise Refusal(
                "R4",
                f"training reads files that a shell command may create (`{shell.text[:80]}`)",
                shell.cell,
            )
        if re.search(r"&\s*$|\b(serve|server|ollama|vllm|synthetic-data-kit|docker)\b", shell.text):
            raise Refusal("R4", f"a shell command starts a service or creates data (`{shell.text[:80]}`)", shell.cell)


def _literals(plan: Plan) -> list[str]:
    """Strings in kept statements and in the settings."""
    places = [place for place, decision in plan.dispositions.items() if decision.what in ("kept", "settings")]
    return [
        node.value
        for place in places
        for node in ast.walk(plan.program.statements[place].node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 300
    ]


def _made_file(shell: Shell) -> str | None:
    """The name of the file that a download creates."""
    makes = ">" in shell.text or re.match(r"\S*(?:wget|curl|gdown|aria2c|hf|huggingface-cli)\b", shell.text)
    output = r"(?:-O|-o|--output|--output-document|>)\s*=?\s*([^\s;&|>-][^\s;&|]*)"
    if makes and (match := re.search(output, shell.text)):
        name = match.group(1).strip("'\"").rsplit("/", 1)[-1]
        return None if match.group(1).startswith(("/dev/", "&")) else name or None
    if match := re.match(r"(?:wget|curl|gdown)\b.*?(https?://\S+)", shell.text):
        name = match.group(1).strip("'\"").split("?")[0].rstrip("/").rsplit("/", 1)[-1]
        return name if "." in name else None
    return None


def _words(text: str) -> list[str]:
    return [
        word.strip("'\"").rstrip("/").rsplit("/", 1)[-1]
        for word in text.split()[1:]
        if len(word) > 5 and not word.startswith("-")
    ]


def _not_run(plan: Plan, traces: list[Trace]) -> None:
    """Refuse if a kept statement fails under the stubs, because it could not be compared."""
    for trace in traces:
        for key, why in trace["failed"].items():
            place = plan.program.position(int(key))
            disposition = plan.dispositions.get(place)
            statement = plan.program.statements[place]
            before = place < plan.key["train"]
            if why.startswith("endless") and before:
                raise Refusal(
                    "R4",
                    f"the statement does not finish under the recording stubs, so it cannot be verified ({why}):"
                    f" {statement.head[:80]}",
                    statement.cell,
                )
            if why.startswith("unsafe") and before and disposition is not None and disposition.what != "dropped":
                raise Refusal(
                    "R4",
                    f"the statement cannot run safely under the recording stubs ({why}): {statement.head[:80]}",
                    statement.cell,
                )
            if disposition is not None and (disposition.what == "kept" or (disposition.what == "settings" and before)):
                raise Refusal(
                    "R4",
                    f"the statement fails under the recording stubs, so it cannot be verified ({why}):"
                    f" {statement.head[:80]}",
                    statement.cell,
                )


# --- for the drop-in form (drop_in_form.py), which decides on statements by the same rules ----------------------------

accounts = _ACCOUNTS
environment_key = _environment_key
installs = _installs
leaves = _leaves
names_of_scratch = _names_of_scratch
note_hosted_paths = _note_hosted_paths
only_looks = _only_looks
placeholder = _PLACEHOLDER
refuse_dependence = _refuse_dependence
refuse_shells = _shells
