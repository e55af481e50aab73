"""Probe notebooks in strangers' styles, with the outcome that each must have.

A probe is `probes/CAUSE/NAME.py`: comment lines with facts, then cells as in jupytext's percent format. A cell
`# %% [file] NAME` is a file beside the notebook. Facts:

    # expect: converted            or `refused R4`, `refused R0|R1`
    # cause: why this probe exists
    # fast                         part of the default suite
    # has: text                    in the script
    # hasnot: text                 not in the script
    # says: text                   in the reason or in a note
    # kept or named: text          in the script or in a note

`@HF@`, `@WANDB@`, `@OPENAI@`, `@PASSWORD@` and `@AWS@` become made-up secrets: no file and no reason may hold them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "probes"
SECRETS = {
    "@HF@": "hf_" + "qT7wLz" * 6,
    "@WANDB@": "9f3c" * 10,
    "@OPENAI@": "sk-proj-" + "k4Vb" * 10,
    "@PASSWORD@": "tulip-Gr4nite-91-otter",
    "@AWS@": "AKIA" + "Z7Q4" * 4,
}
KINDS = ("has", "hasnot", "says", "kept or named")


@dataclass(kw_only=True)
class Probe:
    """A notebook with its expected outcome. `name` is the path below `probes`, without the suffix."""

    name: str
    expect: str
    why: str = ""
    fast: bool = False
    facts: list[tuple[str, str]] = field(default_factory=list)
    cells: list[tuple[str, str]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def cause(self) -> str:
        return self.name.split("/", 1)[0]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`kind` is right, wrong, refused as expected, refused wrongly or failed; `details` says what differs."""

    kind: str
    details: str = ""

    @property
    def good(self) -> bool:
        return self.kind in ("right", "refused as expected")


def probes() -> list[Probe]:
    """All probes, sorted by name. Raises ValueError for an unknown fact."""
    return [read_probe(path) for path in sorted(FOLDER.glob("*/*.py"))]


def todo() -> dict[str, str]:
    """Probes that fail today -> reason, from probes/TODO.txt."""
    lines = (FOLDER / "TODO.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(": ", 1) for line in lines if line.strip() and not line.startswith("#")]
    return {name.strip(): reason.strip() for name, reason in pairs}


def read_probe(path: Path) -> Probe:
    """Read one probe. Raises ValueError for an unknown fact."""
    text = path.read_text(encoding="utf-8")
    for mark, secret in SECRETS.items():
        text = text.replace(mark, secret)
    head, _, body = text.partition("# %%")
    probe = Probe(name=f"{path.parent.name}/{path.stem}", expect="", cells=_cells("# %%" + body))
    probe.files = {kind[7:]: text + "\n" for kind, text in probe.cells if kind.startswith("[file]")}
    probe.cells = [cell for cell in probe.cells if not cell[0].startswith("[file]")]
    for line in head.splitlines():
        key, _, value = (part.strip() for part in line.removeprefix("#").partition(":"))
        if key == "expect":
            probe.expect = value
        elif key == "cause":
            probe.why = value
        elif key == "fast":
            probe.fast = True
        elif key in KINDS:
            probe.facts.append((key, value))
        elif line.strip():
            raise ValueError(f"{path}: unknown fact: {line}")
    if probe.expect.split()[:1] not in (["converted"], ["refused"]):
        raise ValueError(f"{path}: unknown outcome: {probe.expect}")
    return probe


def _cells(text: str) -> list[tuple[str, str]]:
    cells: list[tuple[str, list[str]]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("# %%"):
            kind = line[4:].strip()
            cells.append((kind if kind.startswith("[file]") else "markdown" if "[markdown]" in kind else "code", []))
        else:
            cells[-1][1].append(line)
    texts = [(kind, "".join(lines).strip("\n")) for kind, lines in cells]
    return [(kind, text.replace("# ", "", 1) if kind == "markdown" else text) for kind, text in texts]


def write_notebook(probe: Probe, folder: Path) -> Path:
    """Write the probe as a Jupyter notebook with the files beside it, and return its path."""
    for name, text in probe.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    cells = [
        {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
        | ({"outputs": [], "execution_count": None} if kind == "code" else {})
        for kind, text in probe.cells
    ]
    path = folder / "stranger.ipynb"  # a name that no fact mentions
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}), encoding="utf-8")
    return path


def judge(probe: Probe, folder: Path) -> Verdict:
    """Convert the probe in `folder` and compare the outcome with what it must be."""
    from finetune.convert.command import convert

    try:
        outcome = convert(write_notebook(probe, folder))
    except Exception as error:
        return Verdict(kind="failed", details=f"convert raised {type(error).__name__}: {error}")
    leaked = [mark for mark, secret in SECRETS.items() if secret in outcome.reason + _all_texts(outcome.conversion)]
    if leaked:
        return Verdict(kind="wrong", details=f"secrets are copied: {', '.join(leaked)}")
    if outcome.result in ("failed", "bad input"):
        return Verdict(kind="failed", details=f"{outcome.code} {outcome.reason}")
    wanted, _, codes = probe.expect.partition(" ")
    if outcome.result == "refused":
        expected = wanted == "refused" and (not codes or outcome.code in codes.split("|"))
        missing = [text for kind, text in probe.facts if kind == "says" and text.lower() not in outcome.reason.lower()]
        if expected and not missing:
            return Verdict(kind="refused as expected")
        said = f"; the reason does not say {missing}" if expected else ""
        return Verdict(kind="refused wrongly", details=f"{outcome.code} cell {outcome.cell}: {outcome.reason}{said}")
    if wanted == "refused":
        return Verdict(kind="wrong", details=f"converted; {probe.expect} expected")
    wrong = _differences(probe, outcome.conversion)
    return Verdict(kind="wrong", details="; ".join(wrong)) if wrong else Verdict(kind="right")


def _all_texts(conversion: Any) -> str:
    return "" if conversion is None else "\n".join((conversion.script, json.dumps(conversion.report)))


def _differences(probe: Probe, conversion: Any) -> list[str]:
    code = conversion.script.split('"""', 2)[2]
    notes = "\n".join(conversion.report["notes"]).lower()
    found = []
    for kind, text in probe.facts:
        if kind == "has" and text not in code:
            found.append(f"not in the script: {text}")
        elif kind == "hasnot" and text in code:
            found.append(f"in the script: {text}")
        elif kind == "kept or named" and text.lower() not in notes + code.lower():
            found.append(f"neither in the script nor in the notes: {text}")
        elif kind == "says" and text.lower() not in notes:
            found.append(f"not in the notes: {text}")
    if "from finetune import" not in code or "!pip" in code:
        found.append("the script does not import finetune's SFTTrainer")
    return found
