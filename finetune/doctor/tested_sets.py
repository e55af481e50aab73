"""The sets of versions that were tested: tested_sets.json, which `make docs` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.runtime import bootstrap

FILE = Path(__file__).with_suffix(".json")

Sets = dict[str, dict[str, Any]]  # name: device ("cpu" or "cuda"), versions, `from` or `date`, perhaps a `note`


def read() -> Sets:
    """The table."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def differences(versions: dict[str, str], installed: dict[str, str | None]) -> list[str]:
    """Where the installed versions differ from a set: `trl 1.16.0 (tested: 1.15.0)`. A library of the set that is not
    installed is no difference; one that is installed and that the set was tested without is."""
    found = {name: (installed.get(name) or "").partition("+")[0] for name in bootstrap.LIBRARIES}  # torch: +cu130
    return [
        f"{name} {found[name]} (tested: {versions.get(name, 'without it')})"
        for name in found
        if found[name] not in ("", versions.get(name))
    ]


def about(one: dict[str, Any]) -> str:
    """Where a set comes from: a file or a date, and the note."""
    return ", ".join(str(one[key]) for key in ("from", "date", "note") if key in one)
