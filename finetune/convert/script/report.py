"""What a conversion reports: what was left out, what was changed, and what to look at."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from finetune import __version__
from finetune.convert.knowledge import named
from finetune.convert.notebook.read import Notebook
from finetune.convert.notebook.secrets import scrub
from finetune.convert.source import one_line
from finetune.runtime.types import JsonObject

LINES = 10  # of the summary
# Nobody misses these.
_UNUSED = ("unused import", "unused definition", "the script imports it from finetune")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The files of a converted notebook. `name` is their stem."""

    name: str
    script: str
    report: JsonObject


def slug(name: str, imported: Collection[str] = ()) -> str:
    """`Llama3.2_(1B)-Alpaca.ipynb` -> `llama3_2_1b_alpaca`.

    Python searches the script's folder first: a script named like an imported library (`imported`: those of the
    notebook) would shadow it everywhere, for example `import pandas` inside another library.
    """
    stem = re.sub(r"\.(ipynb|py)$", "", name)
    found = re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_") or "notebook"
    if found in sys.stdlib_module_names or found in named("installed") or found in imported:
        found = f"{found}_sft"
    return f"nb_{found}" if found[0].isdigit() else found


def how_to_run(script: str) -> list[tuple[str, str]]:
    """The commands for a script, each with what it does."""
    return [
        (f"python -m finetune.dryrun {script}", "next: everything once, on one device"),
        (f"python -m finetune.advise {script}", "how many GPUs are worth it"),
        (f"accelerate launch {script}", "trains; --finetune training.learning_rate=1e-4 changes a value"),
    ]


def title(notebook: Notebook, name: str, statements: Sequence[JsonObject], *, keeps_batch: bool) -> str:
    """The docstring of the script: how to run it, what was left out, and what it is made from."""
    commands = how_to_run(f"{name}.py")
    width = max(len(command) for command, _ in commands)
    batch = "`global_batch_size` is the notebook's batch: a step has as many rows on any number of GPUs."
    made = (
        f"Generated from {one_line(notebook.name)} (sha256 {notebook.sha256[:16]}) by finetune convert {__version__}."
        " This is a derived work, so the notebook's license applies."
    )
    dropped = _dropped(statements)
    removed = f"Left out (details in {name}.report.json): {'; '.join(dropped)}." if dropped else ""
    lines = ["Supervised fine-tuning, converted from a notebook: its own code, on any number of GPUs.", ""]
    lines += [f"    {command.ljust(width)}  # {what}" for command, what in commands]
    lines += ["", *([batch] if keeps_batch else [])]
    for text in (removed, made):
        lines += textwrap.wrap(text, 110, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, ""])


def summary(statements: Sequence[JsonObject], notes: Sequence[str]) -> list[str]:
    """The lines that matter: how much was kept, what was left out and changed, then the notes as far as they fit."""
    counts = {kind: sum(one["outcome"] == kind for one in statements) for kind in ("kept", "rewritten", "dropped")}
    found = [f"{counts['kept']} of {len(statements)} statements are kept, {counts['rewritten']} are rewritten"]
    found += [f"left out: {text}" for text in _dropped(statements)]
    changed = [one for one in statements if one["outcome"] == "rewritten"]
    pairs = ((reason, one["cell"]) for one in changed for reason in one["reason"].split("; "))
    found += [f"changed: {text}" for text in _by_reason(pairs)]
    rest = [*found, *notes]
    if len(rest) <= LINES:
        return rest
    return [*rest[: LINES - 1], f"and {len(rest) - LINES + 1} more: see notes and statements"]


def _dropped(statements: Sequence[JsonObject]) -> list[str]:
    """`display or check (cells 3, 5)`: the statements that were left out, by reason."""
    dropped = [one for one in statements if one["outcome"] == "dropped" and not one["reason"].startswith(_UNUSED)]
    return _by_reason((one["reason"], one["cell"]) for one in dropped)


def _folded(notes: Sequence[str]) -> list[str]:
    """The notes, those that differ in the cell alone as one: `cells 3, 5: ...`."""
    cells: dict[str, list[str]] = {}
    for note in notes:
        cell = re.match(r"cell (\d+): ", note)
        cells.setdefault(note[cell.end() :] if cell else note, []).extend([cell[1]] if cell else [])
    return [
        f"cell{'s' * (len(found) > 1)} {', '.join(found)}: {note}" if found else note for note, found in cells.items()
    ]


def _by_reason(pairs: Iterable[tuple[str, int]]) -> list[str]:
    cells: dict[str, list[str]] = {}
    for reason, cell in pairs:
        listed = cells.setdefault(reason, [])
        listed += [] if str(cell) in listed else [str(cell)]
    return [f"{reason} (cell{'s' * (len(found) > 1)} {', '.join(found)})" for reason, found in cells.items()]


def report(notebook: Notebook, name: str, statements: Sequence[JsonObject], notes: Sequence[str]) -> JsonObject:
    """The report, with the lines that matter first. `name`: the script's, without its suffix."""
    notes = _folded([scrub(note) for note in dict.fromkeys(notes)])
    shells = []
    for one in notebook.shells:
        text = scrub(one.text.partition("\n")[0][:200])
        shells.append({"cell": one.cell, "line": one.line, "text": text, "outcome": "dropped"})
    return {
        "summary": summary(statements, notes),
        "notebook": notebook.name,
        "sha256": notebook.sha256,
        "converter": __version__,
        "outcome": "converted",
        "next": f"finetune dryrun {name}.py",
        "notes": notes,
        "statements": list(statements),
        "not_python": shells,
    }
