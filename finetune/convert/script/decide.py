"""Decide what becomes of each statement of a notebook.

Every statement stays, in the notebook's order, unless it is known to do nothing for the training: display,
installation, accounts, inference.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import re
from collections.abc import Iterator, Set
from pathlib import Path

from finetune.convert.analysis.changes import changed_in_place, refuse_late_changes, refuse_patches
from finetune.convert.analysis.classify import Others, most, not_trainers, trains
from finetune.convert.analysis.environment import environment_key
from finetune.convert.analysis.names import (
    DEFINITIONS,
    Program,
    calls,
    free_names,
    is_import,
    method,
    passed,
    root,
    target_names,
    written_path,
)
from finetune.convert.knowledge import named
from finetune.convert.notebook.read import Notebook, Refusal
from finetune.convert.prepare.files import Mentioned, is_named
from finetune.convert.prepare.modules import imports
from finetune.convert.script import leave_out
from finetune.convert.script import rewrite as code
from finetune.convert.script.draft import AFTER, MAIN, TOP, Decision, Draft


def decide(notebook: Notebook, program: Program, own_modules: Set[str]) -> Draft:
    """Decide on every statement but the imports.

    Raises:
        Refusal: R0, R2 or R4, for what cannot run on several ranks.
    """
    unsloth = any(dotted.split(".")[0] == "unsloth" for dotted in program.imports.values())
    draft = Draft(notebook=notebook, program=program, train=_train(program), unsloth=unsloth)
    _roles(draft)
    _refuse_unsupported(draft)
    _refuse_generated(draft)
    _before(draft)
    _after(draft, own_modules)
    _refuse_lost(draft)
    _refuse_gone(draft)
    return draft


# --- what the notebook does -------------------------------------------------------------------------------------------


def _train(program: Program) -> int:
    """The place of the statement that trains: it calls train(), or a function or method that does."""
    units = _units(program)
    others = not_trainers((0, node) for one in program.statements for node in ast.walk(one.node))
    training = {name for name, node in units.items() if trains(node, others)}
    while more := {n for n, node in units.items() if n not in training and _called(node, program, others) & training}:
        training |= more
    outside = [one.node for one in program.statements if not isinstance(one.node, DEFINITIONS)]
    sites: list[ast.AST] = [*outside, *(units[name] for name in sorted(training))]
    cells = {id(one.node): one.cell for one in program.statements}
    for node in sites:
        _refuse_loops(node, cells.get(id(node)), training, program, others)
    for name in sorted(training):

        def calls_it(node: ast.AST, name: str = name) -> bool:
            return isinstance(node, ast.Call) and name in _called(node, program, others, inside=False)

        if sum(most(node, calls_it) for node in sites) > 1:
            found = [ast.unparse(call)[:60] for node in sites for call in calls(node) if calls_it(call)]
            listed = "; ".join(f"`{text}`" for text in found[:6])
            what = name.removeprefix(".")
            raise Refusal(
                "R2",
                f"{what}() trains and is called more than once ({listed}); start the script once per call instead",
            )
    for place, statement in enumerate(program.statements):
        reached = trains(statement.node, others) or _called(statement.node, program, others) & training
        if reached and not isinstance(statement.node, DEFINITIONS):
            _refuse_generating(place, program, units, others)
            return place
    raise Refusal("R0", "train() is never reached; call trainer.train() in a cell")


def _units(program: Program) -> dict[str, ast.AST]:
    """What calls can run: functions by name, classes by name (their constructor), methods as `.name`. The trainer calls
    the methods of a callback."""
    found: dict[str, ast.AST] = {}
    for statement in program.statements:
        node = statement.node
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef) and not any("Callback" in ast.unparse(base) for base in node.bases):
            for one in node.body:
                if isinstance(one, ast.FunctionDef):
                    name = node.name if one.name == "__init__" else f".{one.name}"
                    same = [found[name]] if name in found else []  # of another class
                    both: list[ast.stmt] = [*same, one]  # type: ignore[list-item]
                    found[name] = ast.Module(body=both, type_ignores=[]) if same else one
    return found


def _called(node: ast.AST, program: Program, others: Others, *, inside: bool = True) -> set[str]:
    """Names of the functions and, after a dot, of the methods that it calls; a trainer's `train` is judged by
    `trains`. `inside`: also what is called inside of a call."""
    made = calls(node) if inside else [node] if isinstance(node, ast.Call) else []
    made = [call for call in made if root(call.func) not in program.imports]
    names = {call.func.id for call in made if isinstance(call.func, ast.Name)}
    methods = {call: method(call) for call in made}
    return names | {f".{name}" for call, name in methods.items() if name and (name != "train" or call in others)}


_LOOPS = ast.For | ast.While | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def _refuse_loops(node: ast.AST, cell: int | None, training: set[str], program: Program, others: Others) -> None:
    for loop in ast.walk(node):
        if not isinstance(loop, _LOOPS) or not (trains(loop, others) or _called(loop, program, others) & training):
            continue
        handlers = [one.type for one in ast.walk(loop) if isinstance(one, ast.ExceptHandler) and one.type is not None]
        if any(re.search(r"OutOfMemory|RuntimeError|\bException", ast.unparse(one)) for one in handlers):
            raise Refusal(
                "R4",
                "the notebook trains again after an error such as running out of memory; a rank that does so alone"
                " leaves the others waiting. Keep one setting",
                cell,
            )
        head = ast.unparse(loop).partition("\n")[0][:80]
        raise Refusal(
            "R2",
            f"the notebook trains in a loop (`{head}`); train once: for epochs set num_train_epochs, and for a sweep"
            " start the script once per value, for example with --finetune training.learning_rate=1e-4",
            cell,
        )


def _refuse_generating(place: int, program: Program, units: dict[str, ast.AST], others: Others) -> None:
    """Refuse a class whose methods generate text before they train: the rows may depend on it."""
    reached: set[str] = set()
    before = [one.node for one in program.statements[: place + 1] if not isinstance(one.node, ast.ClassDef)]
    more = {name for node in before for name in _called(node, program, others)} & units.keys()
    while more - reached:
        reached |= more
        more = {name for one in reached for name in _called(units[one], program, others)} & units.keys()
    for name in sorted(reached):
        if name.startswith(".") and re.search(r"\.generate\(|\bpipeline\(", ast.unparse(units[name])):
            reason = f"{name[1:]}() generates text before the training; do it once and load the rows from a file"
            raise Refusal("R4", reason, program.statements[place].cell)


def _roles(draft: Draft) -> None:
    """The names of models, tokenizers and trainers, wherever they are bound."""
    program = draft.program
    for statement in program.statements:
        for node in ast.walk(statement.node):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                last = getattr(program.definition(getattr(node.value.func, "id", "")), "body", [None])[-1]
                made = last.value if isinstance(last, ast.Return) else None  # `return X.from_pretrained(name)`
                call = made if isinstance(made, ast.Call) else node.value
                _bound_role(draft, list(target_names(node.targets[0])), call)
            if isinstance(node, ast.Call) and program.dotted(node.func).endswith("SFTTrainer"):
                _given_roles(draft, node)
    draft.trained = _trained(draft)


def _bound_role(draft: Draft, names: list[str], call: ast.Call) -> None:
    name = draft.program.dotted(call.func)
    last = name.rsplit(".", 1)[-1] or method(call)
    owner = name.rpartition(".")[0].rpartition(".")[2] if last == "from_pretrained" else ""
    if last in ("SFTTrainer", "train_on_responses_only"):
        draft.trainers.update(names)
    elif last in ("from_pretrained", "setup_chat_format") and len(names) == 2:
        draft.models.add(names[0])
        draft.tokenizers.add(names[1])
    elif last in ("get_peft_model", "prepare_model_for_kbit_training", "merge_and_unload") or "Model" in owner:
        draft.models.update(names)
    elif last == "get_chat_template" or "Tokenizer" in owner or owner.endswith("AutoProcessor"):
        draft.tokenizers.update(names)


def _given_roles(draft: Draft, call: ast.Call) -> None:
    given = {item.arg: item.value for item in call.keywords}
    tokenizer = given.get("processing_class", given.get("tokenizer"))
    draft.models |= {one.id for one in passed(call, "model") if isinstance(one, ast.Name)}
    draft.tokenizers |= {tokenizer.id} if isinstance(tokenizer, ast.Name) else set()


def _refuse_unsupported(draft: Draft) -> None:
    text = "\n".join(ast.unparse(statement.node) for statement in draft.program.statements)
    quantized = re.search(r"load_in_(4|8)bit\s*=\s*True", text)
    adapted = re.search(r"get_peft_model|peft_config|PeftModel|full_finetuning\s*=\s*True", text)
    if quantized and not adapted and not draft.unsloth:  # which loads an adapter by its folder
        raise Refusal("R4", "a quantized model is trained without an adapter; add get_peft_model or peft_config")
    before = "\n".join(statement.source for statement in draft.program.statements[: draft.train + 1])
    if re.search(r"streaming\s*=\s*True", before) and not re.search(r"\bDataset\.from_|islice\(", before):
        raise Refusal("R4", "the rows are a stream, but all rows are prepared before training; remove streaming=True")
    refuse_patches(draft.program, draft.train)
    refuse_late_changes(draft.program, draft.trainers, draft.train)
    for place, statement in enumerate(draft.program.statements):
        for node in ast.walk(statement.node):
            if place < draft.train:
                _refuse_former(draft, node, statement.cell)
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                raise Refusal(
                    "R4",
                    f"`{statement.head[:60]}` imports every name; import the names used, or paste its code into a cell",
                    statement.cell,
                )
            if isinstance(node, ast.ImportFrom) and node.level:
                raise Refusal("R4", f"`{statement.head[:60]}` imports a module of a package; copy it", statement.cell)


_FORMER = {
    "load_in_4bit": "quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
    "load_in_8bit": "quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
}


def _refuse_former(draft: Draft, node: ast.AST, cell: int) -> None:
    """Refuse arguments of a loader that transformers 5 has no more and that only the user can replace."""
    name = draft.program.dotted(node.func) if isinstance(node, ast.Call) else ""
    if not re.search(r"^transformers\.(?>\w*?Model)\w*\.from_pretrained$", name):
        return
    given = {item.arg: item.value for item in node.keywords}  # type: ignore[attr-defined]
    for old, new in _FORMER.items():
        off = old not in given or (isinstance(given[old], ast.Constant) and not given[old].value)  # type: ignore[attr-defined]
        if old in given and code.quantizes_by(ast.keyword(old, given[old]), given.keys()):  # type: ignore[attr-defined]
            continue
        if not off and "quantization_config" not in given:
            raise Refusal("R4", f"transformers 5 has no `{old}`; pass {new}", cell)


@functools.cache
def _trl_source() -> str:
    spec = importlib.util.find_spec("trl")
    return Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""


def _refuse_gone(draft: Draft) -> None:
    """Refuse names that TRL had once, if a kept statement needs them and the script's imports do not have them."""
    kept = [draft.program.statements[place].node for place, one in draft.decisions.items() if one.outcome == "kept"]
    needed = {name for node in kept for name in code.reads(node)}
    for statement in draft.program.statements:
        for node in ast.walk(statement.node):
            if not isinstance(node, ast.ImportFrom) or (node.module or "") not in ("trl", "trl.trainer"):
                continue
            for alias in node.names:
                gone = alias.name not in code.PROVIDED and not re.search(rf"\b{re.escape(alias.name)}\b", _trl_source())
                if gone and _trl_source() and ((alias.asname or alias.name) in needed or node is not statement.node):
                    instead = "; SFTConfig has packing=True" if alias.name == "ConstantLengthDataset" else ""
                    raise Refusal("R4", f"TRL 1.15 has no `{alias.name}`; remove it{instead}", statement.cell)


def _refuse_generated(draft: Draft) -> None:
    """Refuse rows that the model or the trainer generates: each rank would generate others."""
    expressions = [
        item.value
        for statement in draft.program.statements[: draft.train + 1]
        for call in calls(statement.node)
        if draft.program.dotted(call.func).endswith("SFTTrainer")
        for item in call.keywords
        if item.arg in ("train_dataset", "eval_dataset", "formatting_func")
    ]
    names = {name for one in expressions for name in free_names(one)}
    stop = draft.roles
    for place in sorted(draft.program.slice(names - stop, draft.train, stop)):
        statement = draft.program.statements[place]
        text = ast.unparse(statement.node)
        if code.reads(statement.node) & draft.models and re.search(r"\.generate\(|\bpipeline\(", text):
            reason = "the rows are generated by the model; generate them once and load them from a file"
            raise Refusal("R4", reason, statement.cell)


def _trained(draft: Draft) -> set[str]:
    """The names of the trainer's model, and of the models that it is made from."""
    program, nodes = draft.program, [statement.node for statement in draft.program.statements]
    trained: set[str] = set()
    for call in (call for node in nodes for call in calls(node)):
        if program.dotted(call.func).endswith("SFTTrainer"):
            values = passed(call, "model")
            trained |= {one.id for one in values if isinstance(one, ast.Name)}
            casts = [one for value in values for one in ast.walk(value) if isinstance(one, ast.Name)]
            trained |= {one.id for one in casts if one.id in draft.models}  # `cast(PreTrainedModel, model)`
            if not values:  # `SFTTrainer(**given)`
                trained |= {one.id for node in nodes for one in _under_model(node)} & draft.models
    given = [one.id for one in ast.walk(nodes[draft.train]) if isinstance(one, ast.Name)]
    trained |= {name for name in given if "model" in name.lower()}  # given to a function or class that trains
    made = [node for outer in nodes for node in ast.walk(outer) if isinstance(node, ast.Assign)]
    while True:  # `model = get_peft_model(base, ...)`: the base too
        sources = {
            one.id
            for node in made
            if isinstance(node.value, ast.Call) and set(target_names(node.targets[0])) & trained
            for call in calls(node.value)
            for one in passed(call, "model")
            if isinstance(one, ast.Name) and one.id in draft.models
        }
        if sources <= trained:
            return trained
        trained |= sources


def _under_model(node: ast.AST) -> Iterator[ast.Name]:
    """Names that a dict has under "model": `{"model": base}`, `given["model"] = base`, `dict(model=base)`."""
    for one in ast.walk(node):
        pairs: list[tuple[object, ast.expr | None]] = []
        if isinstance(one, ast.Dict):
            pairs = [(getattr(key, "value", None), value) for key, value in zip(one.keys, one.values, strict=True)]
        elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Subscript):
            pairs = [(getattr(one.targets[0].slice, "value", None), one.value)]
        elif isinstance(one, ast.keyword):
            pairs = [(one.arg, one.value)]
        yield from (value for key, value in pairs if key == "model" and isinstance(value, ast.Name))


def loaders(draft: Draft) -> set[int]:
    """Statements that load or train the model of the trainer, with the functions that they call."""
    nodes = [statement.node for statement in draft.program.statements]
    found = {n for n, node in enumerate(nodes) if n == draft.train or code.binds(node) & draft.trained}
    dotted = {n: [draft.program.dotted(call.func) for call in calls(node)] for n, node in enumerate(nodes)}
    classes = {n for n, node in enumerate(nodes) if isinstance(node, ast.ClassDef)}
    found |= {n for n in classes if any(name.endswith("SFTTrainer") for name in dotted[n])}
    while True:  # a function that trains may be called by another one
        called = {one.func.id for n in found for one in calls(nodes[n]) if isinstance(one.func, ast.Name)}
        more = {n for n, node in enumerate(nodes) if getattr(node, "name", None) in called} - found
        if not more:
            return found
        found |= more


# --- decisions before training ----------------------------------------------------------------------------------------


def _before(draft: Draft) -> None:
    """Decide on the statements up to the one that trains: what nothing kept needs, and does no more than display or
    the like, is dropped."""
    reasons = leave_out.reasons(draft)
    nodes = [statement.node for statement in draft.program.statements]
    reads = {place: code.reads(nodes[place]) for place in reasons}
    makers: dict[str, set[int]] = {}
    for place, why in reasons.items():
        for name in set() if why is None else leave_out.made(draft, place, why):
            makers.setdefault(name, set()).add(place)
    kept: set[int] = set()
    live: set[str] = set()
    more = {place for place, why in reasons.items() if why is None}
    while more:
        while more:
            kept |= more
            names = {name for place in more for name in reads[place]} - live
            live |= names
            more = {place for name in names for place in makers.get(name, ())} - kept
        mentioned = Mentioned(nodes[place] for place in kept)
        packages = {draft.program.imports[name].split(".")[0] for name in live & draft.program.imports.keys()}
        files = {place for place in reasons.keys() - kept if reasons[place] == leave_out.GENERATED}
        more = {place for place in files if _is_read(draft, place, live, mentioned)}
        more |= {
            place
            for place in reasons.keys() - kept
            if reasons[place] == leave_out.FETCHED
            and leave_out.fetched_package(draft.program, nodes[place]) in packages
        }
    for place, why in reasons.items():
        if place in kept:
            draft.decisions[place] = Decision(outcome="kept", where=MAIN)
        else:
            draft.decisions[place] = Decision(outcome="dropped", reason=str(why))
            noted = ("left to you", "saved before", "account", leave_out.GENERATED)
            if str(why).startswith(noted) and not is_import(nodes[place]):
                draft.note_left_out(place)
    for place in kept:
        if (name := environment_key(nodes[place])) and not code.reads(nodes[place]) - {"os"}:
            draft.decisions[place] = Decision(outcome="kept", where=TOP, reason=name)


def _is_read(draft: Draft, place: int, live: Set[str], mentioned: Mentioned) -> bool:
    """Whether kept statements name the file that a statement writes, or a part of its path. `live`: the names that they
    read, `mentioned`: their literals."""
    node = draft.program.statements[place].node
    paths = [path for call in calls(node) if (path := written_path(call)) is not None]
    names = {path.id for path in paths if isinstance(path, ast.Name)}
    return bool(not paths or names & live or any(is_named(path, draft.program, mentioned) for path in paths))


def _refuse_lost(draft: Draft) -> None:
    """Refuse (R4) a statement that is left out, but also assigns or changes what a kept one needs: text is generated
    and the model is cast in one `with`, or `try` logs in and sets the padding token."""
    needed: set[str] = set()  # by the kept statements below
    for place in sorted(draft.decisions, reverse=True):
        statement, e, decision = draft.program.statements[place], draft.program.effects[place], draft.decisions[place]
        if decision.outcome != "dropped":
            needed = needed - e.binds | e.all_reads | e.changes
        elif not is_import(statement.node) and decision.reason != leave_out.TRACKER:
            models = draft.models | draft.trainers
            lost = changed_in_place(draft.program, statement.node, models, draft.roles)
            placed = leave_out.on_device(decision.reason) and e.all_binds <= e.reads  # `model = model.to("cuda")`
            if place < draft.train and not placed:
                lost |= {name: f"{name} = ..." for name in e.all_binds}
            for name in sorted(lost.keys() & needed - draft.program.imports.keys()):
                raise Refusal(
                    "R4",
                    f"`{statement.head[:60]}` is left out ({decision.reason}), but it also changes {name}, which the"
                    f" script needs; write `{lost[name]}` as a statement of its own, outside of it",
                    statement.cell,
                )


# --- decisions after training -----------------------------------------------------------------------------------------


def _after(draft: Draft, own_modules: Set[str]) -> None:
    """Keep what saves or exports after training, and what that needs, but for what a module of the repository does."""
    program = draft.program
    places = range(draft.train + 1, len(program.statements))
    kept: set[int] = set()
    live: set[str] = set()
    foreign = {place: _reaches(program, program.statements[place].node) & own_modules for place in places}
    for place in reversed(places):
        node, e = program.statements[place].node, program.effects[place]
        made = e.all_binds
        if is_import(node) or foreign[place]:
            continue
        if _is_export(draft, place) or made & live or (e.changes & live and leave_out.reason(draft, place) is None):
            kept.add(place)
            live |= code.reads(node)
    end = min((place for place in kept if _undefined(program, place)), default=len(program.statements))
    if end < len(program.statements):
        cell, names = program.statements[end].cell, ", ".join(sorted(_undefined(program, end)))
        draft.notes.append(
            f"cell {cell} and what follows are left out: no cell defines {names}, so the notebook ends there"
        )
    kept = {place for place in kept if place < end}
    draft.together = _together(program, kept)
    _keep_earlier(draft, live)
    for place in places:
        node = program.statements[place].node
        if is_import(node):
            draft.decisions[place] = Decision(outcome="dropped", reason="unused import")
            continue
        if place in kept:
            draft.decisions[place] = Decision(outcome="kept", where=AFTER)
            continue
        lost = None  # that the user may miss
        if foreign[place]:
            lost = f"it uses {min(foreign[place])}, a module of the repository"
        elif any(code.is_push(program, call) for call in calls(node)):
            lost = code.to_publish(node)
        elif any(method(call) in named("exports") for call in calls(node)):
            lost = "nothing that is saved needs it"
        why = lost or leave_out.reason(draft, place) or "after training"
        draft.decisions[place] = Decision(outcome="dropped", reason=why)
        if lost or code.writes_files(program, node):
            draft.note_left_out(place)


def _together(program: Program, kept: Set[int]) -> set[int]:
    """The kept places after the training that every rank runs: what communicates, itself or in a function of the
    notebook, and what makes the names that it needs."""
    found: set[int] = set()
    needed: set[str] = set()
    for place in sorted(kept, reverse=True):
        node, e = program.statements[place].node, program.effects[place]
        makes = e.all_binds | (e.changes if isinstance(node, ast.Assign | ast.AugAssign) else set())
        if makes & needed or any(map(code.runs_together, [node, *program.called(node)])):
            found.add(place)
            needed |= code.reads(node)
    return found


def _reaches(program: Program, node: ast.AST) -> set[str]:
    """The modules that a statement imports or uses, also in a function of the notebook that it calls."""
    nodes = [inner for one in [node, *program.called(node)] for inner in ast.walk(one)]
    dotted = {program.imports.get(one.id, "") for one in nodes if isinstance(one, ast.Name)}
    return {name for one in nodes for name in imports(one)} | {name.rpartition(".")[0] or name for name in dotted}


def _undefined(program: Program, place: int) -> set[str]:
    """Names that a statement needs and that nothing defines."""
    defined = {name for effect in program.effects for name in effect.all_binds | effect.own}
    return code.reads(program.statements[place].node) - defined - set(program.imports) - _GIVEN


_GIVEN = frozenset(dir(builtins)) | {"display", "get_ipython", "__shell__", "__file__"}  # by Python or the notebook


def _is_export(draft: Draft, place: int) -> bool:
    node = draft.program.statements[place].node
    if isinstance(node, DEFINITIONS):
        return False
    pushes = any(code.is_push(draft.program, call) for call in calls(node))
    saves = code.saves(node) and not code.only_merges(node)
    by_function = any(code.saves(one) and not trains(one) for one in draft.program.called(node))
    return by_function or (saves and not (pushes and isinstance(node, ast.Expr)))


def _keep_earlier(draft: Draft, live: set[str]) -> None:
    """Keep values from before the training that only an export uses."""
    for place in range(draft.train - 1, -1, -1):
        node, one = draft.program.statements[place].node, draft.decisions[place]
        unused = one.outcome == "dropped" and one.reason.startswith("unused") and not is_import(node)
        if unused and code.binds(node) & live:
            draft.decisions[place] = Decision(outcome="kept", where=MAIN)
            live |= code.reads(node)
