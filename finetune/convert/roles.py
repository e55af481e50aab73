"""The statements that load, adapt and train, and the names of model, tokenizer and trainer."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from finetune.convert.knowledge import matches, named
from finetune.convert.names import (
    Program,
    root,
    target_names,
)
from finetune.convert.read import Notebook, Refusal, Statement
from finetune.convert.trace import Trace

BY_NAME = "SFTTrainer"  # the loader, if the notebook gives the trainer a model name
SAVES = named("saves") | named("exports")
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
    read_first: str | None = None  # the column that is read in place of the texts of `formatting`, if the rows have it
    callbacks: ast.expr | None = None
    own_tokenizer: bool = False  # the tokenizer is not the model's
    scratch: set[str] = field(default_factory=set)  # names of charts, tables, metrics
    collections: set[str] = field(default_factory=set)  # names of lists, dicts, counters
    notes: list[str] = field(default_factory=list)
    environment_comments: list[str] = field(default_factory=list)  # set in branches of the installation
    trace: Trace = field(default_factory=dict)
    key: dict[str, int] = field(default_factory=dict)  # loader, adapter, trainer, responses, train -> place
    own_modules: frozenset[str] = frozenset()  # top-level names of modules of the notebook's repository
    early_saves: set[int] = field(default_factory=set)  # before training; left out


def training_events(trace: Trace) -> list[dict[str, Any]]:
    """The events up to `train()`, that call included: what comes later changes nothing about the training."""
    kinds = [item["kind"] for item in trace["events"]]
    return trace["events"][: kinds.index("train") + 1] if "train" in kinds else trace["events"]


def event_of(trace: Trace, kind: str) -> dict[str, Any] | None:
    """The last event of a kind until `train()`: a repeated call replaces the earlier one."""
    return next((item for item in reversed(training_events(trace)) if item["kind"] == kind), None)


def live_statements(notebook: Notebook) -> list[Statement]:
    return [statement for statement in notebook.statements if not statement.is_dead]


def _once(plan: Plan, trace: Trace) -> None:
    """Refuse (R2) a notebook that trains, or attaches an adapter, more than once."""
    for kind, call in (("train", "train()"), ("adapt", "get_peft_model()")):
        until = trace["events"] if kind == "train" else training_events(trace)
        events = [item for item in until if item["kind"] == kind]
        if len(events) < 2:
            continue
        last = plan.program.statements[plan.program.position(events[-1]["statement"])]
        cells = list(dict.fromkeys(str(cell_of(plan, item)) for item in events))
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


def find_key_statements(plan: Plan, trace: Trace) -> None:
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
            if not failed:
                raise Refusal("R0", what)
            key, text = next(iter(failed.items()))
            stopped = program.statements[program.position(int(key))]
            remedy = "simplify it, or save what it makes to a file and load that with load_dataset"
            if text.startswith("NameError"):
                remedy = "define or import it in a cell above"
            raise Refusal(
                "R4",
                f"{what}, because `{stopped.head[:80]}` (line {stopped.line} of the cell) fails where no library and no"
                f" data is real: {text}; {remedy}",
                stopped.cell,
            )


def _same_tokenizer(plan: Plan, trace: Trace) -> None:
    """Compare the loaded tokenizer with the model's, and note arguments that are left out."""
    item, load = event_of(trace, "load_tokenizer"), event_of(trace, "load")
    if item is None or load is None:
        return
    given, kwargs = item["detail"][0].get("tuple", []), dict(map(tuple, item["detail"][1].get("dict", [])))
    name = given[0] if given else kwargs.pop("pretrained_model_name_or_path", None)
    args = load["detail"][1].get("tuple", [])
    model = args[0] if args else dict(map(tuple, load["detail"][2]["dict"])).get("pretrained_model_name_or_path")
    loader = dict(map(tuple, load["detail"][2]["dict"]))
    arguments = [key for key, value in kwargs.items() if key not in NO_ROW and value != loader.get(key)]
    if name != model:
        plan.own_tokenizer = True
        plan.notes.append(f"the notebook loads a tokenizer other than that of {model}; prepare_tokenizer does the same")
    elif arguments:
        plan.own_tokenizer = True
        plan.notes.append(f"the tokenizer is loaded with {', '.join(arguments)}; prepare_tokenizer does the same")


# Arguments of a tokenizer's loader that change no row: the package pads rows on the right and truncates them itself.
NO_ROW = frozenset(
    "trust_remote_code use_fast padding_side truncation_side model_max_length token use_auth_token cache_dir"
    " local_files_only force_download device_map torch_dtype dtype low_cpu_mem_usage padding truncation max_length"
    " clean_up_tokenization_spaces".split()
)


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
        isinstance(node, ast.Call) and words[name] in last_name(plan, node.func)
        for node in ast.walk(plan.program.statements[place].node)
    )


def last_name(plan: Plan, node: ast.expr) -> str:
    return plan.program.dotted(node).rsplit(".", 1)[-1] or getattr(node, "attr", "")


def cell_of(plan: Plan, item: dict[str, Any]) -> int:
    return plan.program.statements[plan.program.position(item["statement"])].cell


def find_call(plan: Plan, place: int, word: str) -> ast.Call:
    for node in ast.walk(plan.program.statements[place].node):
        if isinstance(node, ast.Call) and word in last_name(plan, node.func):
            return node
    raise Refusal("R4", f"the call to {word} was not found", plan.program.statements[place].cell)


def find_names_of_roles(plan: Plan) -> None:
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
        elif place < plan.key["train"] and is_alias(plan, node.value):
            plan.tokenizers += [name for name in names if name not in plan.tokenizers]
        elif place < plan.key["train"] and isinstance(node.value, ast.Name) and node.value.id in plan.models:
            plan.models.update(names)
        elif place < plan.key["train"] and _makes_tokenizer(plan, node.value):
            plan.tokenizers += [name for name in names if name not in plan.tokenizers]


def find_scratch(plan: Plan) -> None:
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
        plan.program.dotted(value.func).split(".")[0] in named("shows")
        or method_of(value) in ("plot", "hist", "boxplot")
    )
    return made or root(value) in plan.scratch


def is_alias(plan: Plan, value: ast.expr) -> bool:
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
    name = last_name(plan, value.func)
    takes = any(
        isinstance(item, ast.Name) and item.id in plan.tokenizers
        for item in [*value.args, *(k.value for k in value.keywords)]
    )
    return takes and (
        name == "get_chat_template" or ("tokenizer" in name.lower() and not isinstance(value.func, ast.Attribute))
    )


def read_trainer_call(plan: Plan) -> None:
    call = find_call(plan, plan.key["trainer"], "Trainer")
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


def key_places(plan: Plan) -> set[int]:
    return set(plan.key.values())


def method_of(call: ast.Call) -> str:
    """The method called, or Unsloth's function that saves."""
    if isinstance(call.func, ast.Name) and call.func.id == "unsloth_save_model":
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def calls_in(node: ast.AST) -> list[ast.Call]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def fetched_package(program: Program, node: ast.stmt) -> str | None:
    """The package whose data a statement only downloads: `nltk.download("punkt")`, also where it is not there yet."""
    if not isinstance(node, ast.Expr | ast.Try | ast.If | ast.For):
        return None
    names = {program.dotted(call.func) for call in calls_in(node)} - {"", "print"}
    packages = {name.split(".")[0] for name in names}
    return packages.pop() if len(packages) == 1 and any(matches("fetches", name) for name in names) else None


def packages_used(program: Program, names: Iterable[str]) -> set[str]:
    """The packages that names come from."""
    return {program.imports[name].split(".")[0] for name in names if name in program.imports}


def only_installs(plan: Plan, notebook: Notebook, cell: int) -> bool:
    """Whether a cell installs packages and has no key statement."""
    return cell in notebook.install and all(plan.program.statements[place].cell != cell for place in plan.key.values())


def refuse_list_of_one(program: Program, function: ast.expr | None) -> None:
    """Refuse (R4) a formatting_func that returns `[text]`: TRL once gave it 1,000 rows at a time, and so made one text
    of them; today it gives it one row, and fails."""
    definition = program.definition(function.id) if isinstance(function, ast.Name) else None
    if not isinstance(definition, ast.FunctionDef):
        return
    values = [node.value for node in ast.walk(definition) if isinstance(node, ast.Return) and node.value is not None]
    if values and all(
        isinstance(one, ast.List) and len(one.elts) == 1 and not isinstance(one.elts[0], ast.Starred) for one in values
    ):
        name = definition.name
        raise Refusal(
            "R4",
            f"{name}() returns a list with one text, of one row in some releases of TRL and of 1,000 rows in others;"
            " return the text itself, without the list",
        )
