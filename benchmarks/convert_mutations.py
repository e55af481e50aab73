"""What the checks of `finetune convert` see: faults planted in drop-in scripts, and each check asked for itself.

    python -m benchmarks.convert_mutations RECORD [--notebooks 80] [--each 12] [--minutes 20]
    python -m benchmarks.convert_mutations RECORD --count

A fault is what a wrong converter would write: a statement left out, an argument dropped, a value changed, a step of the
rows dropped or exchanged with the next, another column. The report says what the script has, so V4, which compares the
two, does not see a fault for that reason alone; and an import that nothing uses any more goes, too. Notebooks: those in
examples/notebooks, and probes in tests/notebooks drawn at random. RECORD has a line per fault, is continued if it
exists, and counts what was read by hand (`read`: fault or equivalent, and why) where no check decides.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.convert.checks import (
    NotVerified,
    has_every_statement,
    has_its_frame,
    names_are_defined,
    parses,
    safe_on_ranks,
)
from finetune.convert.command import steps
from finetune.convert.notebook.read import Refusal
from finetune.convert.script.report import Conversion
from finetune.errors import UserError
from tests.notebooks.oracle import compare as witness
from tests.notebooks.probe import probes, write_notebook

ROOT = Path(__file__).parents[1]
BATCH = 13  # scripts in one process of the witness; fewer if they exceed the limit on its report
CALLS = frozenset(
    "SFTConfig TrainingArguments SFTTrainer from_pretrained get_peft_model LoraConfig BitsAndBytesConfig load_dataset"
    " prepare_model_for_kbit_training train_on_responses_only get_chat_template train".split()
)
STEPS = frozenset("map filter select shuffle sort train_test_split rename_column remove_columns select_columns".split())


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault: its kind, what was changed, and the faulty conversion."""

    kind: str
    what: str
    conversion: Conversion


# --- planting ---------------------------------------------------------------------------------------------------------


def faults(conversion: Conversion, sources: list[str]) -> Iterator[Fault]:
    """Every fault in a conversion. `sources`: the notebook's statements, one for each entry of the report."""
    script = ast.parse(conversion.script)
    statements = [node for node in ast.walk(script) if isinstance(node, ast.stmt)]
    written: set[int] = set()
    for number, entry in enumerate(conversion.report["statements"]):
        text = {"kept": sources[number], "rewritten": entry.get("becomes", "")}.get(entry["outcome"], "")
        nodes = [node for node in ast.parse(text).body if not isinstance(node, ast.Import | ast.ImportFrom)]
        places = [_find(node, statements, written) for node in nodes]
        if not nodes or None in places:
            continue
        for kind, what, changed in _changes(nodes):
            yield Fault(kind=kind, what=what, conversion=_planted(conversion, number, places, changed))
    yield from _without_frame(conversion, written)


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """The text of each statement, docstrings aside, and the script without it."""
    tree: Any = ast.parse(source)
    for path, node in _walk(tree):
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield _head(node), ast.unparse(_changed(tree, path, None)) + "\n"


def _find(node: ast.stmt, statements: list[ast.stmt], written: set[int]) -> int | None:
    """The number of a statement of the script that is this one, and that no earlier one is."""
    text = _text(node)
    for number, one in enumerate(statements):
        if number not in written and _text(one) == text:
            written.add(number)
            return number
    return None


def _text(node: ast.stmt) -> str:
    return ast.unparse(node).replace("nonlocal ", "global ")


def _planted(conversion: Conversion, number: int, places: list[Any], changed: list[list[ast.stmt]]) -> Conversion:
    """The conversion with other statements in these places, which its report says."""
    tree = ast.parse(conversion.script)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    _Replace({id(statements[place]): new for place, new in zip(places, changed, strict=True)}).visit(tree)
    report = copy.deepcopy(conversion.report)
    entry = report["statements"][number]
    entry.pop("becomes", None)
    left = [node for new in changed for node in new]
    entry.setdefault("reason", "planted")
    entry |= {"outcome": "rewritten", "becomes": "\n".join(map(ast.unparse, left))} if left else {"outcome": "dropped"}
    return replace(conversion, script=_finished(tree), report=report)


class _Replace(ast.NodeTransformer):
    def __init__(self, new: dict[int, list[ast.stmt]]) -> None:
        self.new = new

    def generic_visit(self, node: ast.AST) -> Any:
        if id(node) in self.new:
            return copy.deepcopy(self.new[id(node)])
        super().generic_visit(node)
        if isinstance(body := getattr(node, "body", None), list) and not body and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node


def _finished(tree: ast.Module) -> str:
    """The script without imports that nothing uses, as the converter leaves them out."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}

    class Prune(ast.NodeTransformer):
        def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:  # noqa: N802
            return self._prune(node)

        def visit_Import(self, node: ast.Import) -> Any:  # noqa: N802
            return self._prune(node)

        def _prune(self, node: Any) -> Any:
            if ast.unparse(node).startswith(("import unsloth", "from unsloth")):
                return node
            node.names = [one for one in node.names if (one.asname or one.name).split(".")[0] in used | {"*"}]
            return node if node.names else None

    return ast.unparse(ast.fix_missing_locations(Prune().visit(tree))) + "\n"


def _changes(nodes: list[ast.stmt]) -> Iterator[tuple[str, str, list[list[ast.stmt]]]]:
    """Kind, what, and the statements instead of each of these."""
    for number, node in enumerate(nodes):

        def instead(*new: ast.stmt, at: int = number) -> list[list[ast.stmt]]:
            return [list(new) if i == at else [one] for i, one in enumerate(nodes)]

        yield "statement", _head(node), instead()
        for path, inner in _walk(node):
            if isinstance(inner, ast.stmt) and inner is not node and not _is_text(inner):
                yield "statement", _head(inner), instead(_changed(node, path, None))
            for kind, what, new in _of_expression(inner):
                yield kind, what, instead(_changed(node, path, new))
    for one, two in zip(nodes, nodes[1:], strict=False):
        if _is_step(one) and _is_step(two):
            at = nodes.index(one)
            order = [*nodes[:at], two, one, *nodes[at + 2 :]]
            yield "order of statements", _head(one), [[node] for node in order]


def _head(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:80]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_step(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(_method(one) in STEPS for one in ast.walk(node))


def _method(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


_Way = tuple[tuple[str, int | None], ...]


def _walk(node: ast.AST, path: _Way = ()) -> Iterator[tuple[_Way, ast.AST]]:
    yield path, node
    for field, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            yield from _walk(value, (*path, (field, None)))
        for index, item in enumerate(value if isinstance(value, list) else []):
            if isinstance(item, ast.AST):
                yield from _walk(item, (*path, (field, index)))


def _changed(node: ast.stmt, path: _Way, new: ast.AST | None) -> ast.stmt:
    """The statement with another node at this place; None: without it."""
    if not path:
        assert isinstance(new, ast.stmt)
        return new
    node = copy.deepcopy(node)
    parent: Any = node
    for field, index in path[:-1]:
        parent = getattr(parent, field) if index is None else getattr(parent, field)[index]
    field, index = path[-1]
    if index is None:
        setattr(parent, field, new)
    elif new is None:
        getattr(parent, field).pop(index)
        if field == "body" and not parent.body:
            parent.body = [ast.Pass()]
    else:
        getattr(parent, field)[index] = new
    return node


def _of_expression(node: ast.AST) -> Iterator[tuple[str, str, ast.AST]]:
    """Kind, what, and another expression for this one."""
    if isinstance(node, ast.Dict):  # the keys of a row, or of its messages
        for i, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
            if isinstance(key, ast.Constant) and (other := _other(value)) is not None:
                new = copy.deepcopy(node)
                new.values[i] = other
                yield "value", f"{_head(key)}: {_head(value)} -> {_head(other)}", new
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        new = copy.deepcopy(node)
        new.slice = ast.Constant(COLUMNS.get(node.slice.value, "text"))
        if new.slice.value != node.slice.value:
            yield "column", f"{_head(node)} -> {_head(new.slice)}", new
    if not isinstance(node, ast.Call):
        return
    name = _method(node)
    if name in STEPS and isinstance(node.func, ast.Attribute):
        yield "row step", f".{name}(...)", node.func.value
        under = node.func.value
        if _method(under) in STEPS and isinstance(under, ast.Call) and isinstance(under.func, ast.Attribute):
            lower = ast.Call(ast.Attribute(under.func.value, name, ast.Load()), node.args, node.keywords)
            upper = ast.Call(ast.Attribute(lower, under.func.attr, ast.Load()), under.args, under.keywords)
            yield "order of steps", f".{under.func.attr}(...).{name}(...)", upper
    if name not in CALLS | STEPS:
        return
    for i, item in enumerate(node.keywords):
        new = copy.deepcopy(node)
        new.keywords.pop(i)
        yield "argument", f"{name}({_head(item)})", new
        if (other := _other(item.value)) is not None:
            new = copy.deepcopy(node)
            new.keywords[i].value = other
            yield "value", f"{name}({_head(item)}) -> {_head(other)}", new
    for i, item in enumerate(node.args):
        if (other := _other(item)) is not None:
            new = copy.deepcopy(node)
            new.args[i] = other
            yield "value", f"{name}({_head(item)}) -> {_head(other)}", new


COLUMNS = {"instruction": "output", "output": "instruction", "question": "answer", "answer": "question",
           "prompt": "completion", "completion": "prompt", "input": "output", "text": "other", "messages": "other",
           "train": "test", "test": "train"}  # fmt: skip
_WORDS = {"user": "assistant", "assistant": "user", "train": "test", "cosine": "linear", "linear": "cosine",
          "adamw_8bit": "adamw_torch", "adamw_torch": "sgd", "no": "steps", "steps": "epoch", "epoch": "steps",
          "none": "tensorboard"}  # fmt: skip


def _other(value: ast.expr) -> ast.expr | None:
    """Another value of the same type."""
    if isinstance(value, ast.Constant):
        old = value.value
        if isinstance(old, bool):
            return ast.Constant(not old)
        if isinstance(old, int | float):
            return ast.Constant(old * 2 + (1 if isinstance(old, int) else 0.001))
        if isinstance(old, str):
            return ast.Constant(_WORDS.get(old, old + "x"))
    if isinstance(value, ast.List) and len(value.elts) > 1:
        return ast.List(value.elts[1:], ast.Load())
    if isinstance(value, ast.JoinedStr):
        return ast.JoinedStr([ast.Constant("x"), *value.values])
    return None


def _without_frame(conversion: Conversion, written: set[int]) -> Iterator[Fault]:
    """The script without each statement that the converter adds: a block on one rank becomes its statements."""
    count = len([node for node in ast.walk(ast.parse(conversion.script)) if isinstance(node, ast.stmt)])
    for number in range(count):
        tree = ast.parse(conversion.script)
        node = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)][number]
        inside = {inner for one in written for inner in ast.walk(_nth(tree, one)) if isinstance(inner, ast.stmt)}
        if node in inside or _is_text(node) or isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
            continue
        new = node.body if isinstance(node, ast.If | ast.With) else []
        _Replace({id(node): new}).visit(tree)
        yield Fault(kind="frame", what=_head(node), conversion=replace(conversion, script=_finished(tree)))


def _nth(tree: ast.Module, number: int) -> ast.stmt:
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)][number]


# --- asking -----------------------------------------------------------------------------------------------------------


def drawn(found: list[Fault], count: int, draw: random.Random) -> list[Fault]:
    """So many faults, of each kind in turn; equal scripts count once."""
    found = list({fault.conversion.script: fault for fault in found}.values())
    draw.shuffle(found)
    kinds = list(dict.fromkeys(fault.kind for fault in found))
    queues = [[fault for fault in found if fault.kind == kind] for kind in kinds]
    in_turn = [queue[i] for i in range(len(found)) for queue in queues if i < len(queue)]
    return in_turn[:count]


def asked(checks: dict[str, Callable[[Conversion], Any]], fault: Fault) -> dict[str, str]:
    """The checks that see a fault, and what they say."""
    seen = {}
    for name, check in checks.items():
        try:
            check(fault.conversion)
        except (NotVerified, Refusal) as error:
            seen[name] = str(getattr(error, "reason", error))[:160]
    return seen


def outcomes(path: Path, name: str, count: int, draw: random.Random) -> Iterator[dict[str, Any]]:
    """A line of the record for each fault in a notebook's conversion."""
    notebook, conversion = steps(path)
    checks: dict[str, Callable[[Conversion], Any]] = {
        "V1": lambda one: parses(one.script),
        "V2": lambda one: names_are_defined(notebook, one.script),
        "V3": lambda one: (safe_on_ranks(one.script), has_its_frame(one)),
        "V4": lambda one: has_every_statement(notebook, one),
    }
    right = Fault(kind="", what="", conversion=conversion)
    if seen := asked(checks, right):
        raise UserError(f"{name} is not converted: {seen}")
    chosen = drawn(list(faults(conversion, [one.source for one in notebook.statements])), count, draw)
    of_code = [asked(checks, fault) for fault in chosen]
    start = time.perf_counter()
    judged = by_witness(path, [*chosen, right])
    seconds = (time.perf_counter() - start) / len(judged)
    if judged[-1][0] == "differs":
        raise UserError(f"{name}: the witness does not pass the correct script: {judged[-1][1]}")
    for fault, seen, (status, reason) in zip(chosen, of_code, judged, strict=False):
        if status == "differs":
            seen["witness"] = reason[:160]
        yield {
            "notebook": name,
            "kind": fault.kind,
            "what": fault.what,
            "seen": seen,
            "witness": judged[-1][0] if judged[-1][0] != "passed" else status,
            "seconds": round(seconds, 1),
        }


def by_witness(path: Path, chosen: list[Fault]) -> list[tuple[str, str]]:
    """Status and reason for each. The notebook runs once."""
    try:
        theirs = witness.run_notebook(path)
    except witness.CouldNotRun as error:
        return [("could-not-run", str(error))] * len(chosen)
    found = []
    for start in range(0, len(chosen), BATCH):
        found += _batch(chosen[start : start + BATCH], theirs)
    return found


def _batch(some: list[Fault], theirs: dict[str, Any]) -> list[tuple[str, str]]:
    files = {f"s{number}.py": fault.conversion.script for number, fault in enumerate(some)}
    names = [name.removesuffix(".py") for name in files]
    try:
        ours = witness.run_scripts(names, files, theirs, 60 + 60 * len(some))
    except witness.CouldNotRun as error:
        if len(some) == 1:
            return [("could-not-run", str(error))]
        half = len(some) // 2
        return _batch(some[:half], theirs) + _batch(some[half:], theirs)
    return [witness.compare(theirs, ours[name]) for name in names]


# --- the record -------------------------------------------------------------------------------------------------------


def notebooks(count: int, draw: random.Random, folder: Path) -> Iterator[tuple[str, Path]]:
    """The examples, and so many probes, written into the folder."""
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        yield path.stem, path
    found = [probe for probe in probes() if probe.expect.startswith("converted")]
    for probe in draw.sample(found, min(count, len(found))):
        place = folder / probe.name
        place.mkdir(parents=True)
        yield probe.name, write_notebook(probe, place)


def counted(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Faults that each check sees. Without a hand's word, what any check sees is a fault, and what none sees is not.
    V5, in records of 2026-11-26 and before, was a tracer that has been removed."""
    real = [line for line in lines if line.get("read", "fault" if line["seen"] else "").startswith("fault")]
    without = [line for line in real if line["seen"].keys() - {"V5"}]
    only = [line for line in real if line["seen"].keys() == {"V5"}]
    seen = [line for line in real if line["seen"]]
    return {
        "notebooks": len({line["notebook"] for line in lines}),
        "planted": len(lines),
        "equivalent": len(lines) - len(real),
        "faults": len(real),
        "seen by any check": len(seen),
        "seen without V5": len(without),
        "share": round(len(without) / max(1, len(seen)), 4),
        "seen by V1 to V4": sum(bool({"V1", "V2", "V3", "V4"} & line["seen"].keys()) for line in real),
        "seen by V2, V3 and the witness": sum(bool({"V2", "V3", "witness"} & line["seen"].keys()) for line in real),
        "witness could not run": len({line["notebook"] for line in lines if line["witness"] == "could-not-run"}),
        "seen by none": [f"{line['notebook']}: {line['kind']}: {line['what']}" for line in real if not line["seen"]],
        "seen by V5 alone": [f"{line['notebook']}: {line['kind']}: {line['what']}" for line in only],
        "each": dict(sorted(Counter(name for line in real for name in line["seen"]).items())),
        "seen without V5, by kind": {
            kind: f"{sum(line['kind'] == kind for line in without)} of {sum(line['kind'] == kind for line in seen)}"
            for kind in dict.fromkeys(line["kind"] for line in real)
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--notebooks", type=int, default=80, help="so many probes beside the examples")
    parser.add_argument("--each", type=int, default=12, help="so many faults in each")
    parser.add_argument("--minutes", type=float, default=20, help="start no notebook after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", action="store_true", help="only count what the record has")
    options = parser.parse_args()
    lines = []
    if options.record.exists():
        lines = [json.loads(line) for line in options.record.read_text(encoding="utf-8").splitlines()]
    done, end = {line["notebook"] for line in lines}, time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (
            [] if options.count else notebooks(options.notebooks, random.Random(options.seed), Path(folder))
        ):
            if name in done or time.monotonic() > end:
                continue
            try:
                new = list(outcomes(path, name, options.each, random.Random(f"{options.seed} {name}")))
            except (Refusal, UserError, NotVerified) as error:
                sys.stderr.write(f"{name}: left out: {error}\n")
                continue
            lines += new
            with options.record.open("a", encoding="utf-8") as stream:
                stream.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in new)
    sys.stdout.write(json.dumps(counted(lines), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
