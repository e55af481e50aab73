"""Why a statement up to the training is left out, if nothing that is kept needs it.

A statement stays unless it does nothing outside of a notebook, would go wrong on several ranks or without a GPU, wants
an account or a package that only draws, or works only on what is left out.
"""

from __future__ import annotations

import ast
import re

from finetune.convert.analysis.changes import changed_in_place, moves
from finetune.convert.analysis.environment import MODEL_FLAGS, NO_ENVIRONMENT, environment_key
from finetune.convert.analysis.names import (
    DEFINITIONS,
    Program,
    calls,
    changed_in_loop,
    in_place,
    is_import,
    lone_call,
    method,
    passed,
    root,
)
from finetune.convert.knowledge import explained, matches, named
from finetune.convert.notebook.read import Statement
from finetune.convert.script import rewrite as code
from finetune.convert.script.arguments import CONFIGS
from finetune.convert.script.draft import Draft
from finetune.convert.script.shells import leaves_nothing

TRACKER = "account or service: a tracker"
FETCHED = "a download that nothing kept uses"
GENERATED = "a file with values that are left out"
_OF_LEFT_OUT = "it works on what is left out"
_LOGIN = re.compile(r"(^|\.)(HfApi|whoami|HfFolder|notebook_login|login|userdata|mount|ensurepip|bootstrap|pip)\b")
_PURE = "abs all any dict enumerate int len list max min range repr round set sorted str sum tuple type zip".split()
_SEEDS = re.compile(r"\b(set_seed|manual_seed\w*|seed_everything|\w+\.seed)\(")
_WANDB = ("WANDB_API_KEY", "WANDB_DISABLED", "WANDB_NOTEBOOK_NAME")  # other variables of W&B are settings
_STATISTICS = re.compile(r"torch\.cuda\.|max_memory|gpu_stats|used_memory|start_gpu|nvidia-smi|psutil")


def reasons(draft: Draft) -> dict[int, str | None]:
    """The reason for each statement up to the training; None if it stays."""
    program = draft.program
    found = {place: reason(draft, place) for place in range(draft.train + 1)}
    roles = (draft.trained or draft.models) | draft.trainers | draft.tokenizers
    gone: set[str] = set()  # names of values that are left out, and of functions that work on them
    for place, why in found.items():
        node, e = program.statements[place].node, program.effects[place]
        if is_import(node):
            continue
        reads = code.reads(node)
        writes = code.writes_files(program, node)
        if why is None and place != draft.train and not sets_up(draft, node) and reads & gone:
            found[place] = why = GENERATED if writes else _OF_LEFT_OUT
        shown = why is not None and why != "unused definition" and not why.startswith(_NEVER)
        if shown or isinstance(node, DEFINITIONS) and (reads & gone or _works_without(draft, node)):
            gone |= (e.all_binds | code.filled(node)) - roles - program.imports.keys()
        else:
            gone -= e.binds
    _add_unused(draft, found)
    for place in range(draft.train - 2, -1, -1):  # `print("The answer:")` of an answer that is left out
        one, following = program.statements[place : place + 2]
        call = lone_call(one.node)
        prints = call is not None and program.dotted(call.func) == "print" and not code.reads(one.node)
        if prints and one.cell == following.cell and found[place + 1] in ("inference", "display", _OF_LEFT_OUT):
            found[place] = "display"
    return found


def _works_without(draft: Draft, node: ast.stmt) -> bool:
    """Whether a function or class of the notebook does what is left out elsewhere, and changes nothing that is read
    elsewhere."""
    program = draft.program
    names = [program.dotted(call.func) for call in calls(node)]
    account = any(matches("service", name) or matches("account", name) for name in names)
    if not (account or code.infers(node) or _draws(draft, node) or _runs_pip(node)) or _SEEDS.search(ast.unparse(node)):
        return False
    elsewhere = {
        name for one in program.statements[: draft.train + 1] if one.node is not node for name in code.reads(one.node)
    }
    return not _changes(draft, node) & (elsewhere | program.imports.keys())


def _changes(draft: Draft, node: ast.stmt) -> set[str | None]:
    """Names of what a function changes outside of it, also as its argument: of models, and of tokenizers."""
    inside = list(ast.walk(node))
    local = {one.arg for one in inside if isinstance(one, ast.arg)} - draft.models - draft.tokenizers
    local |= {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    changed = [
        one for one in inside if isinstance(one, ast.Attribute | ast.Subscript) and isinstance(one.ctx, ast.Store)
    ]
    changed += [call.func for call in calls(node) if method(call) in named("mutates") or _casts(draft, call)]
    in_loops = [changed_in_loop(one) & draft.models for one in inside if isinstance(one, ast.For)]
    return ({root(one) for one in changed} - local).union(*in_loops)


def _casts(draft: Draft, call: ast.Call) -> bool:
    """Whether it casts a module: not a tensor that is computed here, as in `model(ids).logits.float()`."""
    made = [one for one in calls(call.func) if not method(one).startswith("get_")]
    return method(call) in named("casts") and not moves(draft.program, call) and not made


def _add_unused(draft: Draft, found: dict[int, str | None]) -> None:
    """Add plain values, and those that only what is left out reads, such as the inputs of an inference."""
    program = draft.program
    readers: dict[str, set[int]] = {}
    for place in range(draft.train + 1):
        for name in code.reads(program.statements[place].node):
            readers.setdefault(name, set()).add(place)
    for place in range(draft.train, -1, -1):
        node = program.statements[place].node
        if found[place] is not None or not isinstance(node, ast.Assign) or sets_up(draft, node):
            continue
        plain = not calls(node) and all(isinstance(one, ast.Name | ast.Tuple) for one in node.targets)
        used = {one for name in code.binds(node) for one in readers.get(name, ()) if one != place}
        only = bool(used) and all(found[one] is not None for one in used) and not code.writes_files(program, node)
        if plain or only:
            found[place] = "unused value"


_NEVER = (
    "the script imports no",
    "installation",
    "each rank has its own device",
    "the launcher",
    "the trainer sets",
    "saved before",
    "left to you",
    FETCHED,
)


def on_device(why: str) -> bool:
    """Whether a statement is left out because it only places the model."""
    return why.startswith(("each rank has its own device", "the trainer sets"))


def made(draft: Draft, place: int, why: str) -> set[str]:
    """The names for which a statement that may be left out is kept if a kept one reads them."""
    node, e = draft.program.statements[place].node, draft.program.effects[place]
    if is_import(node) or why.startswith(_NEVER):
        return set()
    found = set(e.all_binds)
    if why in ("inference", GENERATED):
        found |= code.filled(node)
    elif not why.startswith("account or service") and not (why == "display" and isinstance(node, ast.Expr)):
        found |= e.changes
    return found - draft.program.imports.keys()


def reason(draft: Draft, place: int) -> str | None:
    """Why a statement by itself may be left out if nothing needs it; None if it must stay."""
    statement = draft.program.statements[place]
    node = statement.node
    if is_import(node):
        return "unused import"
    if _is_tracker(draft.program, node):
        return TRACKER
    if place != draft.train and _of_another_model(draft, place):
        return "another model"
    if place == draft.train or sets_up(draft, node):
        return None
    if isinstance(node, DEFINITIONS):
        return None if _runs_when_made(draft.program, node) else "unused definition"
    if _adds_path(draft.program, node):
        return "the script imports no module of the repository"
    if fetched_package(draft.program, node):
        return FETCHED
    rules = (_left_to_you, _cleaning, _installation, _environment, _account, _device, _saving_early, _showing)
    return next((why for rule in rules if (why := rule(draft, statement)) is not None), None)


def _runs_when_made(program: Program, node: ast.AST) -> bool:
    """Whether making a class runs a metaclass or `__init_subclass__` of the notebook's."""
    bases = [program.definition(ast.unparse(base)) for base in getattr(node, "bases", ())]
    inside = [getattr(one, "name", "") for base in bases if base is not None for one in base.body]
    return isinstance(node, ast.ClassDef) and (bool(node.keywords) or "__init_subclass__" in inside)


def _of_another_model(draft: Draft, place: int) -> bool:
    """Whether it only loads, adapts or changes a model that is not trained, such as a copy to compare with."""
    node, e = draft.program.statements[place].node, draft.program.effects[place]
    touched = e.all_binds | e.changes
    plain = not isinstance(node, DEFINITIONS) and calls(node)  # not a name that is a text so far
    if not (plain and draft.trained and touched and touched <= draft.models - draft.trained):
        return False
    # `with_adapter = get_peft_model(model, config)` puts the adapter into `model` as well.
    return not changed_in_place(draft.program, node, draft.models, draft.roles).keys() & draft.trained


def sets_up(draft: Draft, node: ast.stmt) -> bool:
    """Whether it loads, adapts or configures what is trained."""
    words = ("SFTTrainer", "train_on_responses_only", "get_peft_model", "setup_chat_format", "add_callback")
    names = {draft.program.dotted(call.func).rsplit(".", 1)[-1] or method(call) for call in calls(node)}
    if isinstance(node, DEFINITIONS):
        return False
    loaded = code.binds(node) & draft.models if "from_pretrained" in names else set()
    return bool(names & set(words)) or bool(loaded & draft.trained if draft.trained else loaded)


def fetched_package(program: Program, node: ast.stmt) -> str | None:
    """The package whose data a statement only downloads: `nltk.download("punkt")`, also where it is not there yet."""
    if not isinstance(node, ast.Expr | ast.Try | ast.If | ast.For):
        return None
    names = {program.dotted(call.func) for call in calls(node)} - {"", "print"}
    packages = {name.split(".")[0] for name in names}
    return packages.pop() if len(packages) == 1 and any(matches("fetches", name) for name in names) else None


def _left_to_you(draft: Draft, statement: Statement) -> str | None:
    call = lone_call(statement.node)
    remedy = None if call is None else explained("left to you").get(draft.program.dotted(call.func))
    return None if remedy is None else f"left to you: {remedy}"


def _cleaning(draft: Draft, statement: Statement) -> str | None:
    """`shutil.rmtree("outputs")`, of the trainer's own folder."""
    node = statement.node
    paths = [one.args[0] for one in calls(node) if draft.program.dotted(one.func) == "shutil.rmtree" and one.args]
    alone = isinstance(node, ast.Expr) or isinstance(node, ast.If) and len(node.body) == 1 and not node.orelse
    if len(paths) != 1 or not alone:
        return None
    made = [call for one in draft.program.statements for call in calls(one.node)]
    configs = [one for one in made if ast.unparse(one.func).rpartition(".")[2] in CONFIGS]
    given = [value for one in configs for value in passed(one, "output_dir")]
    if ast.unparse(paths[0]) not in map(ast.unparse, given):
        return None
    return "left to you: a run moves the files of an earlier one aside, and deletes nothing"


def _installation(draft: Draft, statement: Statement) -> str | None:
    node = statement.node
    if _runs_pip(node):
        return "installation"
    if isinstance(node, ast.Expr) or environment_key(node) is not None or draft.program.sets_library(node):
        return None
    # What a cell of installations computes for them, and a branch with shell lines in a cell that also installs.
    lines = range(statement.line, statement.line + (node.end_lineno or node.lineno) - node.lineno + 1)
    shells = [one for one in draft.notebook.shells if one.cell == statement.cell and one.line in lines]
    branch = isinstance(node, ast.If | ast.Try) and statement.cell in draft.notebook.install and shells
    return "a branch that installs" if draft.installs(statement.cell) or branch else None


def _runs_pip(node: ast.stmt) -> bool:
    text, commands = ast.unparse(node), code.commands(node)
    if not re.search(r"subprocess|os\.(system|popen)|ensurepip|get_ipython|pip\.main", text):
        return False
    return all(code.only_installs(node) or leaves_nothing(one) for one in commands) if commands else "pip" in text


def _environment(draft: Draft, statement: Statement) -> str | None:
    name = environment_key(statement.node)
    if name is None:
        return None
    if name in NO_ENVIRONMENT or name.startswith(("KAGGLE_", "COMET_")) or name in _WANDB:
        reason = NO_ENVIRONMENT.get(name, "metrics go to TensorBoard; accounts do not belong in a script")
        return reason if reason.startswith("the launcher") else f"account or service: {reason}"
    return None


_TRACKER = re.compile(r"\b(?>\w*?(?:Wandb|Comet|MLflow|Neptune|ClearML|DVCLive|Dagshub|AzureML|SwanLab))\w*Callback")


def _is_tracker(program: Program, node: ast.stmt) -> bool:
    """Whether it makes or adds a tracker's callback, which logs to an account: `trainer.add_callback(Samples(...))`."""
    call = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    if not isinstance(call, ast.Call) or (isinstance(node, ast.Expr) and method(call) != "add_callback"):
        return False
    given = call.args if isinstance(node, ast.Expr) else [call]
    values = [value for one in given for value in program.values.get(getattr(one, "id", ""), [one])]
    classes = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in values]
    return any(_TRACKER.search(_bases(program, name)) for name in classes)


def _bases(program: Program, name: str) -> str:
    """The base classes of a class of the notebook, else the name itself."""
    definition = program.definition(name)
    return "".join(map(ast.unparse, definition.bases)) if isinstance(definition, ast.ClassDef) else name


def _adds_path(program: Program, node: ast.stmt) -> bool:
    """`sys.path.append(folder)`, also under an `if`. `modules.refuse_modules` finds what is imported from there."""
    if isinstance(node, ast.If) and not node.orelse:
        return all(_adds_path(program, one) for one in node.body)
    call = lone_call(node)
    return call is not None and bool(re.fullmatch(r"sys\.path\.(append|insert|extend)", program.dotted(call.func)))


def _account(draft: Draft, statement: Statement) -> str | None:
    node = statement.node
    names = [draft.program.dotted(call.func) or ast.unparse(call.func) for call in calls(node)]
    if any(matches("account", name) or _LOGIN.search(name) for name in names):
        return "account or service"
    made = draft.program.dotted(node.value.func) if isinstance(getattr(node, "value", None), ast.Call) else ""  # type: ignore[attr-defined]
    if isinstance(node, ast.Assign) and matches("service", made) and made.rsplit(".", 1)[-1][:1].isupper():
        return "account or service"  # a client that nothing kept uses
    return None


def _device(draft: Draft, statement: Statement) -> str | None:
    node = statement.node
    call = node.value if isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call) else None
    if isinstance(node, ast.If) and not node.orelse and node.body:
        inner = [_device(draft, Statement(id=0, cell=0, line=0, node=one, source="")) for one in node.body]
        return inner[0] if all(inner) else None
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") in MODEL_FLAGS:
        return "each rank has its own device"
    if call is None:
        return None
    name, last = draft.program.dotted(call.func), method(call)
    own = root(call.func) in draft.models or any(root(one) in draft.models for one in call.args)
    if name == "torch.cuda.set_device":
        return "each rank has its own device"
    if own and re.fullmatch(r"prepare(_model)?", last) and "accelerator" in str(root(call.func)).lower():
        return "the trainer sets up the model on each rank"
    if own and moves(draft.program, call):
        return "each rank has its own device" if last in ("to", "cuda") else "the trainer sets the model's mode"
    return None


def _saving_early(draft: Draft, statement: Statement) -> str | None:
    node = statement.node
    if (call := lone_call(node)) is not None:
        of_role = root(call.func) in draft.roles and code.saves(node)
        if of_role or code.is_push(draft.program, call):
            return "saved before training; do this once, outside the script"
    return None


def _showing(draft: Draft, statement: Statement) -> str | None:
    """Inference, statistics of a GPU, charts, and expressions that only Jupyter displays."""
    node, text = statement.node, ast.unparse(statement.node)
    if isinstance(node, ast.Delete) and all(isinstance(one, ast.Name) for one in node.targets):
        return "display"
    if _own_file(draft, node):
        return "the notebook itself"
    inside = [one for one in ast.walk(node) if isinstance(one, ast.stmt) and one is not node]
    sets = any(draft.program.sets_library(one) or environment_key(one) is not None for one in inside)
    if sets or code.writes_files(draft.program, node):
        return None
    if code.infers(node):
        return "inference"
    if _SEEDS.search(text):
        return None
    if _STATISTICS.search(text):
        return "memory and time statistics"
    if any(draft.program.dotted(call.func) == "accelerate.Accelerator" for call in calls(node)):
        return "a trainer has an Accelerator of its own"
    return "display" if _only_computes(draft, node) or _draws(draft, node) else None


def _only_computes(draft: Draft, node: ast.stmt) -> bool:
    """Whether it is an expression whose value only Jupyter displays: `df.head()`, `tokenizer.decode(ids).strip()`."""
    known = {*_PURE, *draft.tokenizers}

    def computes(call: ast.Call) -> bool:
        if isinstance(call.func, ast.Name):
            return call.func.id in known
        name = method(call)
        looks = name in named("looks") or hasattr(str, name)
        return looks and name not in draft.program.methods and not in_place(call)

    return isinstance(node, ast.Expr) and all(map(computes, calls(node)))


def _draws(draft: Draft, node: ast.stmt) -> bool:
    """Whether it uses a package that draws, which a script may not have: `plt.show()`, `df["n"].hist()`."""
    packages = {draft.program.dotted(call.func).split(".")[0] for call in calls(node)}
    return bool(packages & named("shows")) or any(method(one) in ("plot", "hist", "boxplot") for one in calls(node))


def _own_file(draft: Draft, node: ast.stmt) -> bool:
    """Whether it opens a notebook."""
    opened = [call.args[0] for call in calls(node) if ast.unparse(call.func).endswith("open") and call.args]
    names = {one.id for path in opened for one in ast.walk(path) if isinstance(one, ast.Name)}
    parts = [*opened, *(value for name in names for value in draft.program.values.get(name, ()))]
    texts = [one.value for part in parts for one in ast.walk(part) if isinstance(one, ast.Constant)]
    return any(str(text).endswith(".ipynb") for text in texts)
