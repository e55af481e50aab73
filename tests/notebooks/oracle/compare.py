"""An independent check of a conversion: both programs run up to training, and train the same rows the same way.

The notebook's own code builds its own trainer with the installed libraries, a tiny model and generated rows; the
converted script prepares the same rows with this package. Token ids, labels and resolved training arguments must be
equal. Both sides run confined (`tests.notebooks.oracle.sandbox`), and neither can import the converter.

The verdict is made here, from what both sides report. A report counts only if it is complete: another shape, a missing
setting or no rows is never "passed". The notebook's code runs in the process that reports, so code that is written to
deceive can forge its report (docs/security.md).
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from finetune.convert.command import convert
from finetune.convert.services import in_working_folder
from finetune.runtime.command import printable
from finetune.runtime.files import read_text
from finetune.runtime.types import JsonObject
from tests.notebooks.oracle import sandbox
from tests.notebooks.oracle.notebook import is_unsloth, read_cells
from tests.notebooks.oracle.stand_ins import ADAPTER, GIVEN, MODEL, SETTINGS

SECONDS = 300  # wall clock of both sides; a busy machine needs several times as long as an idle one
OUTPUT = 8 * 2**20  # bytes of a report, which takes up to 30 times as much memory when it is read
_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Witness:
    """The outcome: `status` is passed, differs, could-not-run or refused, and `reason` explains what is not passed.

    rows:              compared rows
    generated_columns: kinds of the columns that were generated, by name, for each run
    """

    status: str
    reason: str = ""
    seconds: float = 0.0
    rows: int = 0
    generated_columns: tuple[Mapping[str, str], ...] = ()


# The script refuses an evaluation without rows, which TRL accepts and generated rows may become, and late changes.
_REFUSES = re.compile(r"`eval_dataset` is empty|changed after the trainer was created")


def _same_failure(of_notebook: str, of_script: str | None) -> bool:
    """Whether a statement of the notebook failed as the script did. Addresses and folders differ."""
    one, two = (re.sub(r"0x[0-9a-f]+|/[\w./-]+", "", text) for text in (of_notebook, of_script or ""))
    return bool(two) and one.endswith(f": {two}")


class CouldNotRun(Exception):
    pass


def check(notebook: Path, files: Mapping[str, str], *, seconds: float = SECONDS) -> Witness:
    """Compare a notebook with its conversion.

    Args:
        files: the script by its name.
        seconds: limit for both sides together.
    """
    start = time.perf_counter()

    def found(status: str, reason: str = "", rows: int = 0, columns: tuple[dict[str, str], ...] = ()) -> Witness:
        seconds = time.perf_counter() - start
        return Witness(status=status, reason=reason, seconds=seconds, rows=rows, generated_columns=columns)

    name = next(file for file in files if file.endswith(".py")).removesuffix(".py")
    try:
        theirs = run_notebook(notebook, seconds)
        left = seconds - (time.perf_counter() - start)
        status, reason = compare(theirs, run_scripts([name], files, theirs, left)[name])
    except CouldNotRun as error:
        return found("could-not-run", str(error))
    if status == "could-not-run":
        return found(status, reason)
    columns = tuple(run["columns"] for run in theirs["runs"] if not run["empty"])
    return found(status, reason, rows=sum(len(run["rows"]) for run in theirs["runs"]), columns=columns)


def of_conversion(notebook: Path) -> Witness:
    """Convert a notebook and compare the script with it. `refused` if there is no script."""
    outcome = convert(notebook)
    if outcome.conversion is None:
        return Witness(status="refused", reason=f"{outcome.code} {outcome.reason}")
    return check(notebook, {f"{outcome.conversion.name}.py": outcome.conversion.script})


def compare(theirs: JsonObject, ours: list[JsonObject]) -> tuple[str, str]:
    """Status and reason, from what `run_notebook` returns and a script's runs."""
    for one, two in zip(theirs["runs"], ours, strict=True):
        if any(_same_failure(failure, two.get("refused")) for failure in one["failures"]):
            return "could-not-run", f"both the notebook and the script fail: {two['refused']}"
    difference = first_difference(theirs["runs"], ours, unsloth=theirs["unsloth"])
    if _REFUSES.search(difference.partition("the script fails")[2]):
        return "could-not-run", f"the script refuses what the notebook does: {difference}"
    return ("differs" if difference else "passed"), difference


def run_notebook(notebook: Path, seconds: float = SECONDS) -> JsonObject:
    """What the notebook's own trainer would train with: `runs`, one for each set of generated columns."""
    cells = _cells(notebook)
    source = "\n".join(cells)
    # TRL refused to set a chat format where the tokenizer has a template.
    about = {"unsloth": is_unsloth(cells), "template": "setup_chat_format(" not in source}
    return about | {"runs": _runs(_run("notebook.py", about | {"cells": cells}, seconds), "the notebook")}


def run_scripts(
    names: Sequence[str], files: Mapping[str, str], theirs: JsonObject, seconds: float = SECONDS
) -> dict[str, list[JsonObject]]:
    """What scripts would train with, on the columns of the notebook's runs, by name."""
    job = {
        # Neither side may write outside of its own folder.
        "files": {name: in_working_folder(text) for name, text in files.items()},
        "names": list(names),
        "unsloth": theirs["unsloth"],
        "template": theirs["template"],
    }
    job |= {key: [run[key] for run in theirs["runs"]] for key in ("columns", "empty")}
    job["packages"] = str(_HERE.parents[2])
    found = _run("script.py", job, seconds)
    if not isinstance(found, dict) or set(found) != set(names):
        raise _unreadable("the script", "other scripts")
    return {name: _runs(found[name], "the script", len(theirs["runs"])) for name in names}


def _cells(notebook: Path) -> list[str]:
    try:
        cells = read_cells(read_text(notebook, "utf-8-sig"), notebook.name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CouldNotRun(f"the notebook cannot be read: {type(error).__name__}: {error}") from None
    return [in_working_folder(cell) for cell in cells]


def _run(program: str, job: JsonObject, seconds: float) -> object:
    """What a side reports. Its report has to repeat a number that only this call knows: what else is printed to the
    same pipe is not taken for one."""
    side = "the notebook" if program == "notebook.py" else "the script"
    modules = {"side": program, "stand_ins": "stand_ins.py"}
    sources = {name: (_HERE / file).read_text(encoding="utf-8") for name, file in modules.items()}
    key = os.urandom(16).hex()
    given = json.dumps(job | sources | {"key": key}).encode()
    done = sandbox.run_libraries(str(_HERE / "side.py"), given, seconds=max(seconds, 1), output=OUTPUT)
    if done.why:
        raise CouldNotRun(f"{side} exceeds the limit on {done.why}")
    try:
        report = json.loads(done.output)
    except (ValueError, RecursionError):
        lines = done.errors.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise CouldNotRun(f"{side} ended early: {_shown(lines[-1])}") from None
    if not isinstance(report, dict) or report.get("key") != key:
        raise _unreadable(side, "it was not written by the witness")
    if "error" in report:
        raise CouldNotRun(f"{side}: {_shown(report['error'])}")
    return report.get("found")


def _shown(text: object, limit: int = 400) -> str:
    """What a confined process reports, on one line, safe for a terminal and for a file in UTF-8."""
    return printable(" ".join(str(text)[:limit].split()))[:limit]


def _unreadable(side: str, why: str) -> CouldNotRun:
    return CouldNotRun(f"{side}: its report cannot be used: {why}")


# --- what a report must have ------------------------------------------------------------------------------------------

_KINDS = {"text", "number", "messages", "sharegpt", "json", "choice", "object"}
_NAMES = {*SETTINGS, "global batch", "max_length", "packing"}


def _runs(found: object, side: str, count: int | None = None) -> list[JsonObject]:
    """The runs of a report, each complete. Raises CouldNotRun otherwise."""
    if not isinstance(found, list) or not found or count not in (None, len(found)):
        raise _unreadable(side, "runs are missing")
    for run in found:
        if (why := _incomplete(run, refusable=count is not None)) is not None:
            raise _unreadable(side, why)
        if "refused" in run:
            run["refused"] = _shown(run["refused"])
    return found


def _incomplete(run: object, *, refusable: bool) -> str | None:
    """What is wrong with a run; None if nothing is. Only a script can refuse its rows."""
    if not isinstance(run, dict):
        return "a run is not an object"
    if refusable and isinstance(run.get("refused"), str):
        return None
    if not refusable and not (isinstance(failures := run.get("failures"), list) and all(map(_is_text, failures))):
        return "the failures are missing"
    if not refusable and not isinstance(run.get("empty"), bool):
        return "it does not say whether values are empty"
    columns, settings, lora, model = (run.get(name) for name in ("columns", "settings", "lora", "model"))
    if not isinstance(columns, dict) or not all(isinstance(kind, str) for kind in columns.values()):
        return "the columns are missing"
    if not {kind.partition(":")[0] for kind in columns.values()} <= _KINDS:
        return "a column has an unknown kind"
    if not isinstance(settings, dict) or set(settings) != _NAMES:
        return "the settings are incomplete"
    if not isinstance(model, dict) or set(model) != set(MODEL):
        return "the model's settings are incomplete"
    if lora is not None and (not isinstance(lora, dict) or set(lora) != set(ADAPTER)):
        return "the adapter's settings are incomplete"
    if not isinstance(given := run.get("given"), dict) or set(given) != set(GIVEN):
        return "what is given to the trainer is incomplete"
    if not isinstance(run.get("rows"), list) or not run["rows"]:
        return "it has no rows"
    if not all(map(_is_row, run["rows"])):
        return "a row is not token ids and labels"
    return None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_row(row: object) -> bool:
    if not isinstance(row, list) or len(row) != 2 or not all(isinstance(part, list) for part in row):
        return False
    ids, labels = row
    if len(ids) != len(labels) or not all(type(item) is int for part in row for item in part):
        return False
    return any(label != -100 for label in labels)


# --- the comparison ---------------------------------------------------------------------------------------------------


def first_difference(theirs: list[JsonObject], ours: list[JsonObject], *, unsloth: bool = False) -> str:
    """A sentence that names the first difference and both values, or "".

    `unsloth`, or rows with a completion: an end token that the script has at the end of a row, and the notebook has
    not, does not count. The package appends one to text, as TRL does; Unsloth does not. And it appends one to a
    completion beside a text field, where TRL appends it to the text, which it does not read (docs/data.md).
    """
    refused: list[dict[str, str]] = []
    for number, (one, two) in enumerate(zip(theirs, ours, strict=True)):
        about = f" (rows with {', '.join(one['columns'])})" if one["columns"] else ""
        about = " (rows of which some values are empty)" if one.get("empty") else about
        if "refused" in two:
            # The notebook reads no column, so these were guessed; a refusal trains nothing wrong.
            if number and (not one.get("empty") or one["columns"] in refused):
                refused.append(one["columns"])
                continue
            return f"the notebook trains on these rows, the script fails{about}: {two['refused']}"
        extra = unsloth or "completion" in one["columns"]
        added = two.get("eos") if extra and one.get("eos") == two.get("eos") else None
        difference = (
            _of_values(one["settings"], two["settings"])
            or _of_values(one["model"], two["model"])
            or _of_adapters(one["lora"], two["lora"])
            or _of_rows(_cut(one, unsloth), two["rows"], about, added, one.get("eos"))
            or _of_given(one["given"], two["given"])
        )
        if difference:
            return _shown(difference, 2000)
    return ""


def _of_values(one: JsonObject, two: JsonObject, what: str = "") -> str:
    for name, value in one.items():
        if not _equal(value, two.get(name)):
            return f"{what}{name}: the notebook trains with {value!r}, the script with {two.get(name)!r}"
    return ""


def _of_given(one: JsonObject, two: JsonObject) -> str:
    if one["output_dir"] is None:  # the library's choice
        one = {name: value for name, value in one.items() if name != "output_dir"}
    return _of_values(one, two)


def _equal(one: object, two: object) -> bool:
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=1e-9)
    return one == two or not one and not two  # unset, off or zero


def _of_adapters(one: JsonObject | None, two: JsonObject | None) -> str:
    if one is None or two is None:
        kinds = ["no adapter" if value is None else "an adapter" for value in (one, two)]
        return "" if one is two else f"the notebook trains with {kinds[0]}, the script with {kinds[1]}"
    if one["target_modules"] is None:  # the library's choice for the model, which is another one here
        one = {name: value for name, value in one.items() if name != "target_modules"}
    return _of_values(one, two, "LoRA ")


def _same_row(one: list[list[int]] | None, two: list[list[int]] | None, added: int | None, eos: int | None) -> bool:
    """Whether two rows are equal; `added`: the token that the second may have at its end in addition. The first may
    end with two end tokens, by a text that ends with one and a tokenizer that adds one: the package has one."""
    if one and two and eos is not None and one[0][-2:] == [eos, eos] and two[0][-1] == eos:
        one = [part[:-1] for part in one] if len(one[0]) == len(two[0]) + 1 else one
    if one and two and eos is not None and one[0][-1] == eos and one[1][-1] == -100:  # an end that no loss depends on
        if one != two and [part[:-1] for part in one] == two:
            return True
    if one == two or added is None or one is None or two is None or two[0][-1] != added:
        return one == two
    return one == [two[0][:-1], two[1][:-1]]


def _cut(run: JsonObject, unsloth: bool) -> list[Any]:
    """The rows of a notebook. Rows of token ids are cut by Unsloth's model, and by the package before."""
    limit = run["settings"]["max_length"] if unsloth else None
    cut = [[part[: int(limit)] for part in row] if limit else row for row in run["rows"]]
    return [row for row in cut if any(label != -100 for label in row[1])]


def _without_added(one: list[Any], two: list[Any], added: int, eos: int | None) -> list[Any]:
    """The script's rows without those that train only the end token that it adds, which the notebook leaves out."""
    kept: list[Any] = []
    for row in two:
        only_end = row[0][-1] == added == row[1][-1] and all(label == -100 for label in row[1][:-1])
        mine = one[len(kept)] if len(kept) < len(one) else None
        if not only_end or _same_row(mine, row, added, eos):
            kept.append(row)
    return kept


def _of_rows(one: list[Any], two: list[Any], about: str, added: int | None, eos: int | None) -> str:
    two = two if added is None else _without_added(one, two, added, eos)
    for number, (mine, theirs) in enumerate(zip_longest(one, two)):
        if _same_row(mine, theirs, added, eos):
            continue
        if mine is None or theirs is None:
            return f"the notebook trains on {len(one)} rows, the script on {len(two)}{about}"
        if added is not None and mine[0] == theirs[0][:-1]:
            theirs = [part[:-1] for part in theirs]
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
