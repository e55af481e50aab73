"""Which notebooks are refused before anything is tried: R0 to R3, R5 and R6, from what the code names.

R0 no trainer; R1 a trainer other than SFTTrainer; R2 several trainings; R3 images or sound; R4 steps before the
training that a script cannot take along (found by `plan.py`); R5 code that this Python does not parse; R6 vLLM in the
notebook.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from finetune.convert.names import Program, root
from finetune.convert.read import Notebook, Refusal, is_dead

_PREFERENCE = frozenset(
    f"{name}Trainer"
    for name in "GRPO DPO ORPO KTO PPO PPOv2 CPO RLOO Reward XPO OnlineDPO NashMD GKD BCO AlignProp IterativeSFT"
    " PRM SDFT GOLD".split()
)
_VISION = re.compile(
    r"\b(FastVisionModel|UnslothVisionDataCollator|AutoModelForVision2Seq|AutoModelForImageTextToText|process_vision_info"
    r"|AutoModelForMultimodalLM|\w+VLForConditionalGeneration|LlavaForConditionalGeneration|finetune_vision_layers\s*=\s*True)\b"
)
_SOUND = re.compile(
    r"\b(snac|SNAC|BiCodec\w*|XCodec2?\w*|xcodec2|CsmForConditionalGeneration|Whisper\w+|torchaudio|librosa|AudioSeal"
    r"|sampling_rate|AutoModelForSpeechSeq2Seq|AutoModelForCTC)\b"
)


def live(notebook: Notebook) -> Iterator[tuple[int, ast.AST]]:
    """Every node that can run, with its cell: `if False:` is left out, at any depth."""

    def walk(cell: int, node: ast.AST) -> Iterator[tuple[int, ast.AST]]:
        if isinstance(node, ast.stmt) and is_dead(node):
            return
        yield cell, node
        for inner in ast.iter_child_nodes(node):
            yield from walk(cell, inner)

    for statement in notebook.statements:
        yield from walk(statement.cell, statement.node)


def refuse_by_kind(notebook: Notebook, program: Program) -> None:
    """Raise Refusal where the kind of notebook says that it cannot be converted."""
    nodes = list(live(notebook))
    trainers = _trainers(nodes, program)
    unparsed = "\n".join(text for _, _, text in notebook.unparsed)
    names = {name for name, _ in trainers} | set(re.findall(r"\b(\w+Trainer)\s*\(", unparsed))
    if not names:
        _refuse_unparsed(notebook)
        raise Refusal("R0", "no trainer is called: it trains nothing, or in a loop of its own")
    where = {name: cell for name, cell in reversed(trainers)}
    for name in sorted(names & _PREFERENCE):
        raise Refusal("R1", f"{name} is another method than supervised fine-tuning", where.get(name))
    _refuse_images_and_sound(nodes)
    others = sorted(names - {"SFTTrainer", "UnslothTrainer"})
    if others and "SFTTrainer" not in names:
        raise Refusal("R1", f"{others[0]} is not converted; only trl.SFTTrainer is", where.get(others[0]))
    if others:
        raise Refusal("R1", f"{others[0]} is used beside SFTTrainer", where.get(others[0]))
    trains = _train_calls(nodes)
    if len(trains) > 1:
        raise Refusal(
            "R2",
            f"it trains several times (cells {', '.join(map(str, trains))}); split it into one notebook each",
            trains[-1],
        )
    if "UnslothTrainer" in names:
        raise Refusal(
            "R1",
            "UnslothTrainer gives parts of the model rates of their own; only SFTTrainer is converted",
            where.get("UnslothTrainer"),
        )
    for cell, node in nodes:
        if (
            isinstance(node, ast.keyword)
            and node.arg == "fast_inference"
            and getattr(node.value, "value", None) is True
        ):
            raise Refusal("R6", "fast_inference=True starts vLLM in the training process", cell)
    _refuse_unparsed(notebook)
    if not trains:
        raise Refusal("R0", "a trainer is made, and its train() is never called", trainers[0][1])


def _trainers(nodes: list[tuple[int, ast.AST]], program: Program) -> list[tuple[str, int]]:
    """Trainers that are made: class name and cell. A class of the notebook's own is another trainer."""
    own = {
        node.name
        for _, node in nodes
        if isinstance(node, ast.ClassDef) and any(program.dotted(base).endswith("Trainer") for base in node.bases)
    }
    found = []
    for cell, node in nodes:
        if isinstance(node, ast.Call):
            name = program.dotted(node.func).rsplit(".", 1)[-1]
            if name in own:
                found.append((f"{name} (a class of the notebook)", cell))
            elif name.endswith("Trainer") and name[:1].isupper():
                found.append((name, cell))
    return found


def _train_calls(nodes: list[tuple[int, ast.AST]]) -> list[int]:
    """Cells of live `X.train()` calls on something that is no model."""
    cells = []
    for cell, node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "train":
            of = node.func.value
            last = of.attr if isinstance(of, ast.Attribute) else ""
            if "model" not in f"{root(of)} {last}".lower():
                cells.append(cell)
    return cells


def _refuse_images_and_sound(nodes: list[tuple[int, ast.AST]]) -> None:
    # A class that a branch may choose is not yet what is loaded: `kind = AutoModelForImageTextToText`.
    named = {id(node.value) for _, node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)}
    for cell, node in nodes:
        words = ""
        if isinstance(node, ast.Name | ast.alias | ast.Attribute):
            if id(node) in named or (isinstance(node, ast.alias) and node.name.startswith("AutoModelFor")):
                continue
            words = getattr(node, "id", None) or getattr(node, "name", None) or getattr(node, "attr", "")
        elif isinstance(node, ast.keyword) and node.arg:
            words = f"{node.arg}={ast.unparse(node.value)}"
        if match := _VISION.search(words):
            raise Refusal("R3", f"it trains on images ({match.group(1)}); only text is converted", cell)
        if match := _SOUND.search(words):
            raise Refusal("R3", f"it trains on sound ({match.group(1)}); only text is converted", cell)


def _refuse_unparsed(notebook: Notebook) -> None:
    for cell, error, text in notebook.unparsed:
        version = ".".join(map(str, sys.version_info[:2]))
        newer = ""
        if re.search(r"\bf['\"]", text) and sys.version_info < (3, 12):
            newer = "; quotes inside an f-string of the same kind need Python 3.12"
        raise Refusal("R5", f"Python {version} does not parse it ({error}){newer}", cell)
