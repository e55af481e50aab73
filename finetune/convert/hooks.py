"""Which function of the script a statement goes to: environment, tokenizer, data, model, trainer, exports."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from finetune.convert.changes import gives_own_tokenizer
from finetune.convert.harmless import installs, is_pure, is_tracker, makes, only_looks
from finetune.convert.knowledge import explained, matches, named
from finetune.convert.names import (
    Program,
    effects,
    free_names,
    root,
    target_names,
)
from finetune.convert.read import Notebook, Refusal, Statement
from finetune.convert.roles import (
    HOOKS,
    SAVES,
    Disposition,
    Plan,
    calls_in,
    cell_of,
    event_of,
    fetched_package,
    is_alias,
    key_places,
    last_name,
    method_of,
    packages_used,
)
from finetune.convert.services import is_hosted


def _keep(plan: Plan, hook: str, places: Iterable[int]) -> None:
    for place in sorted(set(places) - plan.early_saves):
        if _only_logs_in(plan, plan.program.statements[place].node):
            continue
        if place not in plan.hooks[hook]:
            plan.hooks[hook].append(place)
        plan.dispositions[place] = Disposition(what="kept", where=hook)
    plan.hooks[hook].sort()


def drop_early_saves(plan: Plan) -> None:
    """Leave out saving before training, such as `dataset.push_to_hub(...)`: a script saves once, after training."""
    for place, statement in enumerate(plan.program.statements[: plan.key["train"]]):
        call = statement.node.value if isinstance(statement.node, ast.Expr) else None
        if not isinstance(call, ast.Call):
            continue
        saves_role = root(call.func) in plan.models | plan.trainers | set(plan.tokenizers) and method_of(call) in SAVES
        if saves_role or method_of(call) == "push_to_hub":
            plan.early_saves.add(place)
            plan.dispositions[place] = Disposition(
                what="dropped", why="saved before training; do this once, outside the script"
            )
            plan.notes.append(f"cell {statement.cell}: `{statement.head[:60]}` is left out: it saves before training")


def keep_environment(plan: Plan, notebook: Notebook) -> None:
    """Keep assignments to os.environ, and keep them first: libraries read them when they are imported."""
    for place, statement in enumerate(plan.program.statements[: plan.key["train"]]):
        node = statement.node
        name = environment_key(node)
        if name is None:
            if installs(plan, notebook, statement) and "os.environ[" in ast.unparse(node):
                lines = [
                    ast.unparse(inner)
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.stmt) and environment_key(inner)
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
        if any(not is_pure(plan, item) for item in wanted):
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


def of_launcher(node: ast.stmt) -> bool:
    """Whether it sets or removes a variable that the launcher sets for each rank."""
    name = environment_key(node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        if ast.unparse(node.value.func) in ("os.environ.pop", "environ.pop", "os.unsetenv"):
            name = str(getattr(node.value.args[0], "value", ""))
    return NO_ENVIRONMENT.get(name or "", "").startswith("the launcher")


def environment_key(node: ast.stmt) -> str | None:
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


def keep_tokenizer(plan: Plan) -> None:
    """Collect what changes the tokenizer before training."""
    program, names = plan.program, set(plan.tokenizers)
    own: set[int] = set()
    for place in range(plan.key["train"]):
        node, e = program.statements[place].node, program.effects[place]
        touched = (e.binds | e.may_bind | e.changes) & names
        if not touched or place in key_places(plan) or isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Assign) and is_alias(plan, node.value):
            plan.dispositions[place] = Disposition(what="settings", why="the package provides the tokenizer")
            continue
        if place in plan.dispositions or only_looks(plan, node):
            continue
        if (e.binds | e.may_bind | e.changes) & plan.models:
            if any(
                last_name(plan, call.func) in ("setup_chat_format", "clone_chat_template") for call in calls_in(node)
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
    kept -= key_places(plan)
    refuse_dependence(plan, kept, "changes to the tokenizer")
    _keep(plan, "tokenizer", kept)


_PADS = ("padding_side", "pad_token", "pad_token_id", "truncation_side", "model_max_length")


def refuse_tokenizer_not_given(plan: Plan) -> None:
    """Refuse (R4) a tokenizer that is changed, and that the trainer is not given: it loads the model's own."""
    load, trainer = event_of(plan.trace, "load"), event_of(plan.trace, "trainer")
    if load is None or trainer is None or load["api"] != "transformers":
        return
    if any(trainer["forms"].get(name) is not None for name in ("processing_class", "tokenizer")):
        return
    before = plan.trace["events"][: plan.trace["events"].index(trainer)]
    changes = [one["detail"] for one in before if one["kind"] == "change" and one.get("role") == "tokenizer"]
    if plan.own_tokenizer or any(detail[3] not in _PADS for detail in changes if len(detail) > 3):
        raise Refusal("R4", "the trainer is not given the tokenizer that the notebook prepares; pass processing_class")


def _both_changed(plan: Plan, statement: Statement) -> Refusal:
    reason, remedy = "one statement changes both the model and the tokenizer", "use one statement for each"
    if any(re.search(r"add_(new_|special_)?tokens$", last_name(plan, call.func)) for call in calls_in(statement.node)):
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


def keep_dataset(plan: Plan) -> None:
    program = plan.program
    stop = frozenset({*plan.tokenizers, *plan.models, *plan.trainers})
    before = plan.key["trainer"]
    names: set[str] = set()
    for expression in (plan.train_expression, plan.eval_expression, plan.formatting):
        names |= free_names(expression) if expression is not None else set()
    places, given = program.slice(names, before, stop)
    places -= key_places(plan) | set(plan.hooks["environment"])
    if given & plan.models:
        cell = next(
            (program.statements[p].cell for p in sorted(places) if program.effects[p].all_reads & plan.models), None
        )
        raise Refusal("R4", "the data depends on the model", cell)
    if given & plan.trainers:
        raise Refusal("R4", "the data depends on the trainer", program.statements[before].cell)
    refuse_dependence(plan, places, "the rows")
    used = packages_used(program, (name for place in places for name in program.effects[place].all_reads))
    places |= {place for place in range(before) if fetched_package(program, program.statements[place].node) in used}
    for place in sorted(places):
        if any(
            matches("sets template", program.dotted(call.func)) for call in calls_in(program.statements[place].node)
        ):
            plan.notes.append(
                f"cell {program.statements[place].cell}: apply_chat_template also sets the tokenizer's template, but"
                " the saved tokenizer may keep the model's template; set model.chat_template to save the new one"
            )
    _note_unseeded(plan, places)
    note_hosted_paths(plan, places)
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


def note_hosted_paths(
    plan: Plan, places: set[int], what_to_do: str = "change it in build_dataset, or pass --data.train_file"
) -> None:
    for place in sorted(places):
        for node in ast.walk(plan.program.statements[place].node):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_hosted(node.value):
                path = f"cell {plan.program.statements[place].cell}: {node.value}"
                plan.notes.append(f"{path} is a path on a hosted service; {what_to_do}")


def _note_unseeded(plan: Plan, places: set[int]) -> None:
    """Each machine prepares the data itself, so without a seed the data would differ between machines."""
    for place in sorted(places):
        for call in calls_in(plan.program.statements[place].node):
            name = getattr(call.func, "attr", "")
            if root(call.func) in plan.program.imports or root(call.func) in seeded_generators(plan.program):
                continue  # random.shuffle, seeded by random.seed; a generator of the notebook's own
            if (
                name in ("shuffle", "train_test_split")
                and not {"seed", "random_state"} & {k.arg for k in call.keywords}
                and not call.args[1:]
            ):
                cell = plan.program.statements[place].cell
                plan.notes.append(
                    f"cell {cell}: {name}() has no seed, so each machine would order the rows differently; set a seed"
                )


def seeded_generators(program: Program) -> set[str]:
    """Names of generators such as `random.Random(42)`."""
    made = r"(?m:^)(?>.*?\b(?:Random|default_rng|RandomState)\().+\)\Z"
    nodes = [statement.node for statement in program.statements]
    return {
        name
        for node in nodes
        if isinstance(node, ast.Assign) and re.search(made, ast.unparse(node.value))
        for name in target_names(node.targets[0])
    }


def refuse_dependence(plan: Plan, places: set[int], what: str, left_out: Collection[ast.AST] = ()) -> None:
    """Refuse what a function of the script cannot do, such as using shell output or processes. `left_out`: calls that
    the script does not have."""
    for place in sorted(places):
        statement = plan.program.statements[place]
        for node in ast.walk(statement.node):
            if isinstance(node, ast.Call) and node not in left_out:
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
                if matches("service", name):
                    raise Refusal(
                        "R4",
                        f"{what} depend on a service ({name}); call it once and save the result to a file",
                        statement.cell,
                    )
                if matches("other model", name):
                    raise Refusal(
                        "R4", f"{what} depend on another model ({name}); save what it makes to a file", statement.cell
                    )
                if name.rsplit(".", 1)[-1] in named("command line") and not node.args and not node.keywords:
                    raise Refusal(
                        "R4", f"{what} depend on the command line; pass {name}() an empty list", statement.cell
                    )
        if any(isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) for node in _own_nodes(statement.node)):
            raise Refusal("R4", f"{what} depend on a top-level await", statement.cell)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes outside nested functions."""
    yield node
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _own_nodes(inner)


MODEL_FLAGS = ("is_parallelizable", "model_parallel")  # for one model on several devices, which ranks do not use


def keep_model(plan: Plan) -> None:
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
            or place in key_places(plan)
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
        if isinstance(node, ast.Import | ast.ImportFrom) or only_looks(plan, node):
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
        if attached is not None and place < attached and _only_freezes(node):
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
    refuse_dependence(plan, kept, "changes to the model")
    _keep(plan, "model", kept - key_places(plan))


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
            return explained("by the package").get(value.func.attr)
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
    return any(
        method_of(call) in ("to", "cuda", "half", "float", "bfloat16") for inner in body for call in calls_in(inner)
    )


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
    if any(plan.program.dotted(call.func) == "torch.compile" for call in calls_in(statement.node)):
        remedy = "leave it out, or pass torch_compile=True to SFTConfig"
    return Refusal(
        "R4",
        f"the model is replaced by another object before training (`{statement.head[:80]}`); {remedy}",
        statement.cell,
    )


def keep_trainer(plan: Plan) -> None:
    """Collect what changes the trainer between its creation and train()."""
    program = plan.program
    stop = frozenset({*plan.tokenizers, *plan.models, *plan.trainers})
    kept: set[int] = set()
    for place in range(plan.key["trainer"] + 1, plan.key["train"]):
        statement, e = program.statements[place], program.effects[place]
        node = statement.node
        touched = (e.binds | e.may_bind | e.changes) & plan.trainers
        if not touched or place in key_places(plan) or place in plan.dispositions or only_looks(plan, node):
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
        if gives_own_tokenizer(program, place):
            plan.dispositions[place] = Disposition(what="dropped", why="the trainer has this tokenizer already")
            continue
        if is_tracker(program, node):
            plan.dispositions[place] = Disposition(what="dropped", why="account or service")
            plan.notes.append(f"cell {statement.cell}: `{statement.head[:60]}` is left out: account or service")
            continue
        if isinstance(node, ast.Expr) and re.match(r"\w+\.(evaluate|log|log_metrics|save_metrics)\(", text):
            plan.dispositions[place] = Disposition(what="dropped", why="the package evaluates before training")
            continue
        kept.add(place)
        kept |= program.slice(free_names_of(node) - stop, place, stop)[0]
    if plan.callbacks is not None:
        kept |= program.slice(free_names(plan.callbacks) - stop, plan.key["trainer"], stop)[0]
    refuse_dependence(plan, kept, "changes to the trainer")
    _keep(plan, "trainer", kept - key_places(plan))


PLACEHOLDER = re.compile(
    r"YOUR_|your[-_]|hf_username|HF_USERNAME|HF_ACCOUNT|USERNAME|<[^<>\n]*>|repo_id/|^hf/", re.IGNORECASE
)


_SYMBOL = re.compile(r"<<[0-9a-f]{16}>>")  # an unknown value under the recording stubs


def _texts_given(plan: Plan, place: int, calls: list[ast.Call]) -> list[str]:
    """The strings in these calls of a statement, and the values that their arguments had when it ran."""
    written = [n.value for call in calls for n in ast.walk(call) if isinstance(n, ast.Constant)]
    ran = [item for item in plan.trace["events"] if item["kind"] == "call" and item.get("method") in named("exports")]
    given = [value for item in ran if plan.program.position(item["statement"]) == place for value in item["detail"][1]]
    return [_SYMBOL.sub("", value) for value in [*written, *given] if isinstance(value, str)]


def refuse_late_template(plan: Plan) -> None:
    """Refuse a chat template that is set after training for the saved tokenizer: it is not the one trained with."""
    program = plan.program
    late = None
    for place in range(plan.key["train"] + 1, len(program.statements)):
        node = program.statements[place].node
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Attribute) and target.attr == "chat_template" and root(target) in plan.tokenizers:
            late = program.statements[place]
        saves = any(
            method_of(call) == "save_pretrained" and root(call.func) in plan.tokenizers for call in calls_in(node)
        )
        if late is not None and saves:
            raise Refusal(
                "R4",
                f"the tokenizer is saved with a chat template that is set after training (`{late.head[:80]}`); set it"
                " before the data is prepared",
                late.cell,
            )


def keep_exports(plan: Plan) -> None:
    """Turn ordinary saves into training.output_dir, and keep exports with everything they need."""
    program = plan.program
    exports: list[int] = []
    roles = plan.models | plan.trainers | set(plan.tokenizers)
    merged: set[str] = set()  # results of `model.merge_and_unload()`; saving one is an export
    folders: set[str] = set()
    again: set[str] = set()
    for place in range(plan.key["train"] + 1, len(program.statements)):
        statement = program.statements[place]
        calls = [call for call in calls_in(statement.node) if method_of(call)]
        if isinstance(statement.node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            continue
        if makes(plan, statement.node, "from_pretrained"):
            again |= program.effects[place].binds & (roles | merged)
        saving = [call for call in calls if root(call.func) in roles | merged and method_of(call) in SAVES]
        if not saving or place in plan.dispositions:
            continue
        of_merged = [call for call in saving if root(call.func) in merged]
        folders |= {ast.unparse(call.args[0]) for call in of_merged if call.args}
        if isinstance(statement.node, ast.Assign) and any(method_of(call) == "merge_and_unload" for call in saving):
            merged |= program.effects[place].binds
        whole = bool(of_merged) or any(call.args and ast.unparse(call.args[0]) in folders for call in saving)
        if any(root(call.func) in again for call in saving):
            again |= program.effects[place].binds
            why = "uses a model loaded again after training; do this separately, from the saved folder"
            plan.dispositions[place] = Disposition(what="dropped", why=why)
            plan.notes.append(f"cell {statement.cell}: `{statement.head[:60]}` is left out: it {why}")
        elif all(method_of(call) in named("saves") for call in saving) and not whole:
            if any(method_of(call) in named("exports") for call in calls):
                why = "do this from training.output_dir, where the trained model and its tokenizer are"
                plan.notes.append(f"cell {statement.cell}: the export in `{statement.head[:60]}` is left out: {why}")
            plan.dispositions[place] = Disposition(
                what="settings",
                why="the final model and tokenizer are saved into training.output_dir, by the main rank",
            )
        elif any(root(call.func) in plan.trainers for call in saving):
            if any(method_of(call) == "merge_and_unload" for call in saving):
                raise Refusal(
                    "R4",
                    f"the trainer's model is merged (`{statement.head[:60]}`); merge `model` instead, because an export"
                    " gets the model but not the trainer",
                    statement.cell,
                )
            why = "publish the finished folder with `hf upload`"
            plan.dispositions[place] = Disposition(what="dropped", why=why)
            plan.notes.append(f"cell {statement.cell}: `{statement.head[:60]}` is left out: {why}")
        elif any(PLACEHOLDER.search(text) for text in _texts_given(plan, place, saving)):
            plan.dispositions[place] = Disposition(what="dropped", why="the account or token is a placeholder")
        else:
            exports.append(place)
    exports = _with_a_model(plan, exports, plan.models | merged)
    if not exports:
        return
    for statement in (program.statements[place] for place in exports):
        if any(method_of(call).startswith("push_to_hub") for call in calls_in(statement.node)):
            plan.notes.append(
                f"cell {statement.cell}: `{statement.head[:60]}` publishes after the training, as in the notebook;"
                " check that the account is yours"
            )
    stop = frozenset({*plan.tokenizers, *plan.models})
    kept = set(exports)
    for place in exports:
        needed, given = program.slice(free_names_of(program.statements[place].node) - stop, place, stop | plan.trainers)
        if given & plan.trainers or any(p in plan.hooks["dataset"] and not is_pure(plan, p) for p in needed):
            raise Refusal(
                "R4", "an export after training needs the trainer or the data", program.statements[place].cell
            )
        kept |= needed
    for place in range(plan.key["train"] + 1, max(exports)):  # changes to the model in between, such as quantize_
        statement, e = program.statements[place], program.effects[place]
        if (
            place in plan.dispositions
            or not e.changes & plan.models
            or only_looks(plan, statement.node)
            or _by_package(plan, statement.node)
        ):
            continue
        kept |= {place} | program.slice(free_names_of(statement.node) - stop, place, stop)[0]
    _keep(plan, "save", kept - key_places(plan))
    note_hosted_paths(plan, kept - key_places(plan), "change it in export")


def _with_a_model(plan: Plan, exports: list[int], models: Collection[str]) -> list[int]:
    """The exports, without pushes of the tokenizer if the model's own push is left out."""
    nodes = {place: plan.program.statements[place].node for place in exports}
    if any(root(call.func) in models for node in nodes.values() for call in calls_in(node)):
        return exports
    pushes = {
        p for p in exports if all(method_of(c) == "push_to_hub" for c in calls_in(nodes[p]) if method_of(c) in SAVES)
    }
    for place in sorted(pushes):
        statement, why = plan.program.statements[place], "publish the finished folder with `hf upload`"
        plan.dispositions[place] = Disposition(what="dropped", why=why)
        plan.notes.append(f"cell {statement.cell}: `{statement.head[:60]}` is left out: {why}")
    return [place for place in exports if place not in pushes]


def _only_logs_in(plan: Plan, node: ast.stmt) -> bool:
    """`login(token=key)`, which only seems to change the key."""
    return isinstance(node, ast.Expr) and any(
        matches("account", plan.program.dotted(call.func)) for call in calls_in(node)
    )


def note_settings(plan: Plan) -> None:
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
            if item not in plan.dispositions and not _acts_on_library(plan, item):
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


def _acts_on_library(plan: Plan, place: int) -> bool:
    """Whether it imports or changes a library, and so is no value that a setting could have."""
    node, e = plan.program.statements[place].node, plan.program.effects[place]
    return isinstance(node, ast.Import | ast.ImportFrom) or bool(
        e.changes and e.changes <= plan.program.imports.keys() and not e.binds | e.may_bind
    )


def note_defaults(plan: Plan) -> None:
    """Note environment variables that the notebook reads, but the script does not, because the values are settings."""
    for item in plan.trace["events"]:
        place = plan.program.position(item["statement"]) if item["kind"] == "asked" else None
        if place is not None and plan.dispositions[place].what == "settings":
            name, default = item["detail"]
            if default is None and (name in NO_ENVIRONMENT or re.search(r"TOKEN|KEY|SECRET|PASSWORD", name)):
                continue  # an account, which no setting depends on
            holds = "hold if it is not set" if default is None else f"have its default, {default!r}"
            plan.notes.append(f"cell {cell_of(plan, item)}: {name} is read from the environment; the settings {holds}")


def lift_shared_constants(plan: Plan) -> None:
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
        if not is_pure(plan, place):
            raise Refusal(
                "R4", "two parts of the training depend on the same computed value", plan.program.statements[place].cell
            )
    for name in hooks:
        plan.hooks[name] = [place for place in plan.hooks[name] if place not in lifted]
    _keep(plan, "module", lifted)
