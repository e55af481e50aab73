"""Refuse notebooks by the names their code uses, before anything runs: R0 to R3, R5 and R6.

R0 no trainer; R1 a trainer other than SFTTrainer; R2 several trainings; R3 images or audio; R4 steps before training
that a script cannot reproduce (found by `plan.py`); R5 code that this Python cannot parse; R6 vLLM in the notebook.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from finetune.convert.analysis.names import DEFINITIONS, Program, method, root
from finetune.convert.knowledge import matches, named
from finetune.convert.notebook.read import Notebook, Refusal, Statement, is_dead
from finetune.redact import redact

# Arguments of a processor, and what they hold.
_INPUTS = {"images": "images", "pixel_values": "images", "videos": "video", "audios": "audio", "audio": "audio"}


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _bound(alias: ast.alias) -> str:
    return (alias.asname or alias.name).split(".")[0]


def live(statements: Iterable[Statement]) -> Iterator[tuple[int, ast.AST]]:
    """Every node that can run, with its cell. Skips `if False:` at any depth."""

    def walk(cell: int, node: ast.AST) -> Iterator[tuple[int, ast.AST]]:
        if isinstance(node, ast.stmt) and is_dead(node):
            return
        yield cell, node
        for inner in ast.iter_child_nodes(node):
            yield from walk(cell, inner)

    for statement in statements:
        if not statement.is_dead:
            yield from walk(statement.cell, statement.node)


def refuse_by_kind(notebook: Notebook, program: Program) -> None:
    """Raise Refusal if this kind of notebook cannot be converted."""
    nodes = list(live(notebook.statements))
    trainers = _trainers(nodes, program)
    unparsed = "\n".join(text for _, _, text in notebook.unparsed)
    names = {name for name, _ in trainers} | set(re.findall(r"\b(\w+Trainer)\s*\(", unparsed))
    if not names:
        _refuse_unparsed(notebook)
        written = next((one for one in notebook.shells if one.writes and "Trainer(" in one.text), None)
        if written is not None:
            raise Refusal(
                "R0",
                f"the training is in {written.writes}, which this cell writes; save its text as that file and convert"
                f" it: finetune convert {written.writes}",
                written.cell,
            )
        raise Refusal("R0", "no trainer is called: the notebook trains nothing, or uses a custom training loop")
    cells = {name: cell for name, cell in reversed(trainers)}
    for name in sorted(names & named("another trainer")):
        rest = (
            "; keep the cells up to the SFTTrainer's train() in a notebook of their own"
            if "SFTTrainer" in names
            else ""
        )
        raise Refusal("R1", f"{name} is not supervised fine-tuning{rest}", cells.get(name))
    _refuse_other_hardware_and_models(nodes)
    _refuse_images_and_audio(nodes, _deciding(program))
    if others := sorted(names - {"SFTTrainer", "UnslothTrainer"}):
        beside = "is used in addition to SFTTrainer; keep the cells of the one that trains"
        alone = "is not supported; only trl.SFTTrainer is, so train with SFTTrainer"
        raise Refusal("R1", f"{others[0]} {beside if 'SFTTrainer' in names else alone}", cells.get(others[0]))
    no_trainers = not_trainers(nodes)
    trains = _train_calls(nodes, no_trainers)
    if sum(trainings(statement.node, no_trainers) for statement in notebook.statements if not statement.is_dead) > 1:
        listed = "; ".join(f"cell {cell}: `{ast.unparse(call)[:60]}`" for cell, call in trains[:6])
        more = f"; and {len(trains) - 6} more" if len(trains) > 6 else ""
        reason = f"the notebook trains several times ({listed}{more}); {_how_to_split(nodes)}"
        raise Refusal("R2", reason, trains[-1][0])
    if "UnslothTrainer" in names:
        reason = "UnslothTrainer uses separate learning rates for parts of the model; only SFTTrainer is supported"
        raise Refusal("R1", reason, cells.get("UnslothTrainer"))
    for cell, node in nodes:
        if (
            isinstance(node, ast.keyword)
            and node.arg == "fast_inference"
            and getattr(node.value, "value", None) is True
        ):
            reason = "fast_inference=True starts vLLM in the training process; set fast_inference=False"
            raise Refusal("R6", reason, cell)
        if method(node) == "add_adapter" and trains and cell <= trains[-1][0]:
            raise Refusal(
                "R4",
                f"`{ast.unparse(node)[:60]}` attaches an adapter that the conversion cannot see;"
                " write `model = get_peft_model(model, lora_config)` (from peft) instead; an older adapter of the model"
                " must be merged before: `model = PeftModel.from_pretrained(model, older).merge_and_unload()`",
                cell,
            )
    _refuse_unparsed(notebook)
    if not trains:
        raise Refusal("R0", "a trainer is created, but its train() is never called", trainers[0][1])


def _refuse_other_hardware_and_models(nodes: list[tuple[int, ast.AST]]) -> None:
    """Refuse TPUs, and models that are not causal language models."""
    used = {node.id for _, node in nodes if isinstance(node, ast.Name)}
    for cell, node in nodes:
        imported = [one for one in getattr(node, "names", []) if isinstance(one, ast.alias) and _bound(one) in used]
        names = [one.name for one in imported] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if imported and isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] == "torch_xla" for name in names):
            raise Refusal("R4", "the notebook trains on a TPU (torch_xla); remove that code to train on GPUs", cell)
        if isinstance(node, ast.Name) and matches("encoder-decoder", node.id):
            raise Refusal("R1", f"{node.id} is an encoder-decoder model; only causal models are supported", cell)
    loaders = {node.id: cell for cell, node in nodes if isinstance(node, ast.Name) and _LOADS.fullmatch(node.id)}
    heads = [name for name in loaders if matches("another head", name)]
    if heads and len(heads) == len(loaders):
        reason = f"{heads[0]} has no head for text; train AutoModelForCausalLM, or use transformers.Trainer"
        raise Refusal("R1", reason, loaders[heads[0]])


_LOADS = re.compile(r"(?>\w+?For[A-Z])\w+|Fast\w*Model")


def _trainers(nodes: list[tuple[int, ast.AST]], program: Program) -> list[tuple[str, int]]:
    """The trainers created: class name and cell. A subclass that the notebook defines counts as a different trainer."""
    subclasses = {
        node.name
        for _, node in nodes
        if isinstance(node, ast.ClassDef) and any(program.dotted(base).endswith("Trainer") for base in node.bases)
    }
    plain = plain_classes(node for _, node in nodes)
    found = []
    for cell, node in nodes:
        if isinstance(node, ast.Call):
            name = program.dotted(node.func).rsplit(".", 1)[-1]
            if name in plain:
                continue
            if name in subclasses:
                found.append((f"{name} (defined in the notebook)", cell))
            elif name.endswith("Trainer") and name[:1].isupper():
                found.append((name, cell))
    return found


def _how_to_split(nodes: list[tuple[int, ast.AST]]) -> str:
    """What to do with several trainings, of one trainer or of several."""
    once = "from the trained weights, keep one call, with more num_train_epochs"
    split = "split it into one notebook each, with the cells that each one needs"
    functions = [node for _, node in nodes if isinstance(node, ast.FunctionDef)]
    made = [node for _, node in nodes if isinstance(node, ast.Call) and _name(node.func).endswith("Trainer")]
    if len(made) == 1 and not any(one is made[0] for function in functions for one in ast.walk(function)):
        return f"the same trainer trains again, {once.replace(', keep', ': keep')}"
    if len(made) == 1:
        return f"{split}; if one trainer trains again, {once}"
    return (
        f"{split}; if one starts from the model that another has trained, save it merged there (with Unsloth"
        ' `save_pretrained_merged("first", tokenizer)`, else `model.merge_and_unload().save_pretrained("first")`), and'
        ' load "first" in the other notebook\'s from_pretrained'
    )


def trainings(node: ast.AST, others: Others = frozenset()) -> int:
    """How many `X.train()` calls of a statement can run. `others`: what is not a trainer, from `not_trainers`."""
    return most(node, lambda one: bool(_train_calls([(0, one)], others)))


def most(node: ast.AST, counts: Callable[[ast.AST], bool]) -> int:
    """How many of these nodes of a statement can run: of the branches of an `if`, and of a `try` and its handlers,
    those with the most."""

    def every(*nodes: ast.AST) -> int:
        return sum(most(one, counts) for one in nodes)

    if isinstance(node, ast.stmt) and is_dead(node):
        return 0
    if isinstance(node, ast.If):
        return every(node.test) + max(every(*node.body), every(*node.orelse))
    if isinstance(node, ast.Try):
        branches = [every(*node.body, *node.orelse), *(every(*handler.body) for handler in node.handlers)]
        return max(branches) + every(*node.finalbody)
    return (1 if counts(node) else 0) + every(*ast.iter_child_nodes(node))


def _train_calls(nodes: list[tuple[int, ast.AST]], others: Others) -> list[tuple[int, ast.Call]]:
    """Live `X.train()` calls with their cells, except on a model and on `others`."""
    found = []
    for cell, node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "train":
            receiver = node.func.value
            if not is_model_name(receiver) and root(receiver) not in others and node not in others:
                found.append((cell, node))
    return found


def trains(node: ast.AST, others: Others = frozenset()) -> bool:
    """Whether a node has an `X.train()` call of a trainer inside. `others`: what is not a trainer."""
    return bool(_train_calls([(0, one) for one in ast.walk(node)], others))


def is_model_name(receiver: ast.expr) -> bool:
    """`model` or `trainer.model`, which also have a method train(); not `model_trainer` or `model_fine_tuner`."""
    last = receiver.attr if isinstance(receiver, ast.Attribute) else ""
    names = [str(name).lower() for name in (root(receiver), last)]
    return any("model" in name and not name.endswith(("trainer", "tuner")) for name in names)


_LIBRARIES_THAT_TRAIN = frozenset({"trl", "unsloth", "transformers", "finetune"})


Others = Set[str | ast.AST]


def not_trainers(nodes: Iterable[tuple[int, ast.AST]]) -> set[str | ast.AST]:
    """Names whose `train()` is no training of ours: modules and classes of other packages, and names that are only
    assigned objects of such classes: `own = ByteLevelBPETokenizer()`. Also calls of a method `train()` of the
    notebook's own. `nodes`: a node before those inside it."""
    nodes = list(nodes)
    imported: set[str] = set()
    assigned: dict[str, list[ast.expr | None]] = {}
    stores: dict[str, int] = {}
    for _, node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = alias.name if isinstance(node, ast.Import) else node.module or ""
                if module.split(".")[0] not in _LIBRARIES_THAT_TRAIN and not getattr(node, "level", 0):
                    imported.add((alias.asname or alias.name).split(".")[0])
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stores[node.id] = stores.get(node.id, 0) + 1
        elif isinstance(node, ast.arg):
            stores[node.arg] = stores.get(node.arg, 0) + 1
    made = {
        name
        for name, values in assigned.items()
        if len(values) == stores.get(name) and all(_makes_other(value, imported) for value in values)
    }
    return {*(imported - stores.keys()), *made, *own_train_calls([node for _, node in nodes])}


def _makes_other(value: ast.expr | None, imported: set[str]) -> bool:
    """Whether it creates an object of a class of another package; a function may return what it is given."""
    if not isinstance(value, ast.Call) or root(value.func) not in imported:
        return False
    name = ast.unparse(value.func)
    return any(part[:1].isupper() for part in name.split(".")) and "Trainer" not in name


_PLAIN_BASES = frozenset({"object", "ABC", "abc.ABC", "Protocol", "typing.Protocol"})


def plain_classes(nodes: Iterable[ast.AST]) -> dict[str, ast.ClassDef]:
    """Classes of the notebook that derive from no class of a library."""
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    found: dict[str, ast.ClassDef] = {}
    while more := {
        name: node
        for name, node in classes.items()
        if name not in found and all((base := ast.unparse(one)) in _PLAIN_BASES or base in found for one in node.bases)
    }:
        found |= more
    return found


def own_train_calls(nodes: Sequence[ast.AST]) -> set[ast.AST]:
    """The calls `x.train(...)` in which x is an object of a plain class of the notebook, which is no trainer: `self` in
    such a class, a call of the class, or a name that is assigned nothing else. A parameter is one by its annotation."""
    classes = plain_classes(nodes)
    trains = [node for node in nodes if getattr(getattr(node, "func", None), "attr", "") == "train"]
    if not trains or not classes:
        return set()
    inside = {inner for one in classes.values() for inner in ast.walk(one)}
    values: dict[str, list[ast.expr | None]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                values.setdefault(ast.unparse(target), []).append(node.value)
        elif isinstance(node, ast.arg):
            made = ast.Call(func=node.annotation, args=[], keywords=[]) if node.annotation else None
            values.setdefault(node.arg, []).append(made)

    def is_plain(value: ast.expr | None, seen: frozenset[str] = frozenset()) -> bool:
        if isinstance(value, ast.Call):
            return isinstance(value.func, ast.Name) and value.func.id in {"super", *classes}
        name = "" if value is None else ast.unparse(value)
        known = [] if name in seen else values.get(name, [])
        return bool(known) and all(is_plain(one, seen | {name}) for one in known)

    found: set[ast.AST] = set()
    for call in trains:
        receiver = call.func.value  # type: ignore[attr-defined]
        is_self = ast.unparse(receiver) == "self" and call in inside
        found |= {call} if is_self or is_plain(receiver) else set()
    return found


# Classes of models that read images as well, which train on text with a tokenizer in place of a processor.
_ALSO_TEXT = re.compile(r"AutoModelForImageTextToText|AutoModelForMultimodalLM|\w+ForConditionalGeneration")
_IMAGES = re.compile(r"images?|pixel_values|videos?|PIL|process_vision_info|(?>\w*?(?:Image|Vision)Processor)\w*")
_TEXT_ONLY = (
    "load the model with Unsloth's FastModel or AutoModelForCausalLM and a tokenizer, and give the trainer no"
    " data_collator for images, no skip_prepare_dataset, and Dataset.from_list(rows) for a list of rows"
)


def _words(node: ast.AST) -> list[str]:
    """Names and short texts of a node."""
    value = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    named = [getattr(node, key, None) for key in ("id", "attr", "arg", "name")]
    module = (getattr(node, "module", None) or "").split(".")
    return [word for word in [value, *named, *module] if isinstance(word, str) and word]


def _deciding(program: Program) -> list[tuple[int, ast.AST]]:
    """The live nodes that the training depends on: a display, or an import that nothing of them uses, is none."""
    places: set[int] = set()
    for place, statement in enumerate(program.statements):
        called = [node.func for _, node in live([statement]) if isinstance(node, ast.Call)]
        if not any(_name(func).endswith("Trainer") or _name(func) == "train" for func in called):
            continue
        e = program.effects[place]
        defines = isinstance(statement.node, DEFINITIONS)
        places |= {place} | program.slice(e.reads | e.changes, place)
        places |= program.slice(e.late, len(program.statements) if defines else place)
    nodes = list(live(program.statements[place] for place in sorted(places)))
    used = {node.id for _, node in nodes if isinstance(node, ast.Name)} | {"*"}

    def unused(node: ast.AST) -> bool:
        names = [node] if isinstance(node, ast.alias) else node.names if isinstance(node, ast.ImportFrom) else []
        return bool(names) and not any(_bound(one) in used for one in names)

    return [(cell, node) for cell, node in nodes if not unused(node)]


def _refuse_images_and_audio(nodes: list[tuple[int, ast.AST]], deciding: list[tuple[int, ast.AST]]) -> None:
    # Naming a class is not loading it, because a branch may choose another: `kind = AutoModelForImageTextToText`.
    named = {id(node.value) for _, node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)}
    processor = any(_name(node) == "AutoProcessor" for _, node in deciding if isinstance(node, ast.expr))
    tokenizer = any("Tokenizer" in word for _, node in nodes for word in _words(node))
    images = any(_IMAGES.fullmatch(word) for _, node in deciding for word in _words(node))
    text_only = tokenizer and not processor and not images
    for cell, node in deciding:
        text = ""
        if processor and isinstance(node, ast.keyword) and node.arg in _INPUTS:
            raise Refusal(
                "R3", f"the notebook trains on {_INPUTS[node.arg]} ({node.arg}=); only text is supported", cell
            )
        if isinstance(node, ast.Call) and _name(node.func) == "getattr":  # getattr(transformers, "SomeClass")
            text = " ".join(str(item.value) for item in node.args if isinstance(item, ast.Constant))
        elif isinstance(node, ast.Name | ast.alias | ast.Attribute):
            if id(node) in named or (isinstance(node, ast.alias) and node.name.startswith("AutoModelFor")):
                continue
            text = getattr(node, "id", None) or getattr(node, "name", None) or getattr(node, "attr", "")
        elif isinstance(node, ast.keyword) and node.arg:
            text = f"{node.arg}={ast.unparse(node.value)}"
        if re.search(r"\bfinetune_vision_layers\s*=\s*True\b", text):
            raise Refusal("R3", "the notebook trains on images (finetune_vision_layers); only text is supported", cell)
        for word in re.findall(r"\w+", text):
            if text_only and _ALSO_TEXT.fullmatch(word) and not matches("audio", word):
                continue
            for kind in ("audio", "images"):
                if matches(kind, word):
                    reason = f"the notebook trains on {kind} ({word}); only text is supported"
                    if kind == "images" and not images:
                        reason = f"{word} is for images, of which the rows have none; {_TEXT_ONLY}"
                    raise Refusal("R3", reason, cell)


def unparsed_after_training(notebook: Notebook) -> list[int]:
    """Cells that this Python cannot parse, after the last training: nothing in them trains."""
    nodes = list(live(notebook.statements))
    last = max((cell for cell, _ in _train_calls(nodes, not_trainers(nodes))), default=None)
    return [
        cell
        for cell, _, text in notebook.unparsed
        if last is not None and cell > last and not re.search(r"\.train\s*\(|Trainer\b", text)
    ]


_CODE = re.compile(
    r"^[^\S\n]*(?:print|exec|del|return|import|from|for|if|while|with|def|class|else|elif|try|except|finally|raise|pass|global"
    r"|nonlocal|assert|yield|lambda|async|await|break|continue)\b|[=@{}\[\]\\]|\w\(|\b[^\WA-Za-z_]*+[A-Za-z_]\w*+\.[A-Za-z_]",
    re.MULTILINE,
)


def text_cells(notebook: Notebook) -> list[int]:
    """Cells of sentences or addresses, which Jupyter cannot run: they hold nothing that could be code."""
    return [cell for cell, _, text in notebook.unparsed if not _CODE.search(re.sub(r"https?://\S+", "", text))]


def _refuse_unparsed(notebook: Notebook) -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    left_out = {*unparsed_after_training(notebook), *text_cells(notebook)}
    for cell, error, text in notebook.unparsed:
        if cell in left_out:
            continue
        newer = ""
        if re.search(r"\bf['\"]", text) and sys.version_info < (3, 12):
            newer = "; reusing the same quotes inside an f-string needs Python 3.12"
        message, number = re.sub(r" \(<unknown>, line \d+\)$", "", error), re.search(r"line (\d+)\)$", error)
        line = _shown(text, int(number[1])) if number else ""
        where = f" in `{line}`" if line else ""
        raise Refusal(
            "R5", f"Python {version} cannot parse the cell: {message}{where}; correct or delete it{newer}", cell
        )


def _shown(text: str, number: int) -> str:
    """A line of a text that is not Python, without what may be a secret: texts, and long words with digits."""
    lines = text.split("\n")
    line = redact(lines[number - 1].strip() if number <= len(lines) else "", "...")
    line = re.sub(r"(['\"]).*?(\1|$)", r"\1...\1", line)
    return re.sub(r"\b(?=\w*\d)[\w-]{12,}", "...", line)[:80]
