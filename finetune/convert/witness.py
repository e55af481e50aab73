"""An independent check of a conversion: both programs run up to training, and train the same rows the same way.

The notebook's own code builds its own trainer with the installed libraries, a tiny model and generated rows; the
converted script prepares the same rows with this package. Token ids, labels and resolved training arguments must be
equal. Both sides run confined (`sandbox.LIBRARIES`), and neither can import the converter.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from finetune.convert import sandbox

SECONDS = 120  # wall clock of both sides; a busy machine needs several times as long as an idle one
OUTPUT = 64 * 2**20
_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Witness:
    """The outcome: `status` is passed, differs or could-not-run, and `reason` explains the last two in a sentence.

    rows:              compared rows
    generated_columns: kinds of the columns that were generated, by name, for each run
    """

    status: str
    reason: str = ""
    seconds: float = 0.0
    rows: int = 0
    generated_columns: tuple[Mapping[str, str], ...] = ()


# The script refuses rows that TRL accepts: empty ones, and an evaluation without rows. Generated rows may become both.
_NOTHING_LEFT = re.compile(r"the script fails.*(`eval_dataset` is empty|Dropped: \d+ x empty )", re.DOTALL)


class _CouldNotRun(Exception):
    pass


def check(notebook: Path, files: Mapping[str, str], form: str = "settings", *, seconds: float = SECONDS) -> Witness:
    """Compare a notebook with its conversion.

    Args:
        files: the script (NAME.py) and, in the form "settings", its NAME.yaml, by name.
        form: "settings" or "drop-in".
        seconds: limit for both sides together.
    """
    start = time.perf_counter()

    def found(status: str, reason: str = "", **more: Any) -> Witness:
        return Witness(status=status, reason=reason, seconds=time.perf_counter() - start, **more)

    name = next(file for file in files if file.endswith(".py")).removesuffix(".py")
    try:
        theirs = run_notebook(notebook, seconds)
        columns = [run["columns"] for run in theirs["runs"]]
        left = seconds - (time.perf_counter() - start)
        ours = run_scripts([name], files, form, theirs, left)[name]
        difference = first_difference(theirs["runs"], ours, unsloth=theirs["unsloth"])
    except _CouldNotRun as error:
        return found("could-not-run", str(error))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:  # an answer of another shape
        return found("could-not-run", f"its answer cannot be read: {type(error).__name__}: {error}")
    if _NOTHING_LEFT.search(difference):
        return found("could-not-run", f"the generated rows leave nothing to train on: {difference}")
    more = {"rows": sum(len(run["rows"]) for run in theirs["runs"]), "generated_columns": tuple(columns)}
    return found("differs", difference, **more) if difference else found("passed", **more)


def run_notebook(notebook: Path, seconds: float = SECONDS) -> dict[str, Any]:
    """What the notebook's own trainer would train with: `runs`, one for each set of generated columns."""
    return _run("witness_notebook.py", {"notebook": _text(notebook), "name": notebook.name}, seconds)


def run_scripts(
    names: Sequence[str], files: Mapping[str, str], form: str, theirs: dict[str, Any], seconds: float = SECONDS
) -> dict[str, list[dict[str, Any]]]:
    """What scripts would train with, on the columns of the notebook's runs, by name."""
    job = {
        "files": dict(files),
        "names": list(names),
        "form": form,
        "unsloth": theirs["unsloth"],
        "template": theirs["template"],
    }
    job |= {"columns": [run["columns"] for run in theirs["runs"]], "packages": str(_HERE.parents[1])}
    return _run("witness_script.py", job, seconds)["runs"]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig")


def _run(program: str, job: dict[str, Any], seconds: float) -> dict[str, Any]:
    side = "the notebook" if program == "witness_notebook.py" else "the script"
    job = job | {"stand_ins": _text(_HERE / "witness_stand_ins.py")}
    done = sandbox.run_libraries(str(_HERE / program), json.dumps(job).encode(), seconds=max(seconds, 1), output=OUTPUT)
    if done.why:
        raise _CouldNotRun(f"{side} exceeds the limit on {done.why}")
    try:
        answer = json.loads(done.output)
    except ValueError:
        lines = done.errors.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise _CouldNotRun(f"{side} ended early: {lines[-1][:300]}") from None
    if "error" in answer:
        raise _CouldNotRun(f"{side}: {str(answer['error'])[:400]}")
    return answer


def first_difference(theirs: list[dict[str, Any]], ours: list[dict[str, Any]], *, unsloth: bool = False) -> str:
    """A sentence that names the first difference and both values, or "".

    `unsloth`: an end token at the end of a row does not count. The package appends one to text, as TRL does; Unsloth
    does not.
    """
    for number, (one, two) in enumerate(zip(theirs, ours, strict=True)):
        about = f" (rows with {', '.join(one['columns'])})" if one["columns"] else ""
        if "refused" in two:
            if number:  # the notebook reads no column, so these were guessed; a refusal trains nothing wrong
                continue
            return f"the notebook trains on these rows, the script fails{about}: {two['refused']}"
        eos = one["eos"] if unsloth else None
        difference = (
            _of_values(one["settings"], two["settings"])
            or _of_adapters(one["lora"], two["lora"])
            or _of_rows(_ended(one["rows"], eos), _ended(two["rows"], eos), about)
        )
        if difference:
            return difference
    return ""


def _of_values(one: dict[str, Any], two: dict[str, Any], what: str = "") -> str:
    for name, value in one.items():
        if not _equal(value, two.get(name)):
            return f"{what}{name}: the notebook trains with {value!r}, the script with {two.get(name)!r}"
    return ""


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=1e-9)
    return one == two or not one and not two  # unset, off or zero


def _of_adapters(one: dict[str, Any] | None, two: dict[str, Any] | None) -> str:
    if one is None or two is None:
        kinds = ["no adapter" if value is None else "an adapter" for value in (one, two)]
        return "" if one is two else f"the notebook trains with {kinds[0]}, the script with {kinds[1]}"
    if one["target_modules"] is None:  # the library's choice for the model, which is another one here
        one = {name: value for name, value in one.items() if name != "target_modules"}
    return _of_values(one, two, "LoRA ")


def _ended(rows: list[Any], eos: int | None) -> list[Any]:
    """The rows without one end token at their end."""
    return [[part[:-1] for part in row] if eos is not None and row[0][-1] == eos else row for row in rows]


def _of_rows(one: list[Any], two: list[Any], about: str) -> str:
    for number, (mine, theirs) in enumerate(zip_longest(one, two)):
        if mine == theirs:
            continue
        if mine is None or theirs is None:
            return f"the notebook trains on {len(one)} rows, the script on {len(two)}{about}"
        which = "token ids" if mine[0] != theirs[0] else "labels"
        first, second = (mine[0], theirs[0]) if which == "token ids" else (mine[1], theirs[1])
        place = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        if place is None:
            place = min(len(first), len(second))
        counts = [sum(label != -100 for label in row[1]) for row in (mine, theirs)]
        return (
            f"row {number}{about}: {which} differ from token {place} on: the notebook has {first[place : place + 8]}"
            f" ({len(first)} tokens, {counts[0]} supervised), the script {second[place : place + 8]} ({len(second)}"
            f" tokens, {counts[1]} supervised)"
        )
    return ""
