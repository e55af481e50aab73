"""Writes the table of tested sets, and its copy in the README.

    python -m finetune.doctor.record [NAME]

takes the sets that are a file of constraints from that file (`make docs`). With a name, as at the end of
`make test-newest`, that set becomes what is installed here, with today's date.
"""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path

from finetune.doctor.tested_sets import FILE, Sets, about, read
from finetune.errors import UserError
from finetune.runtime import bootstrap
from finetune.runtime.command import run_guarded
from finetune.runtime.files import write_json, write_text

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- tested sets: begin; written by `make docs` -->", "<!-- tested sets: end -->"
SHOWN = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "unsloth")  # columns of the README


def markdown(sets: Sets) -> str:
    """The table of the README, between its marks."""
    rows = [["set", "of", *SHOWN], ["---"] * (2 + len(SHOWN))]
    rows += [[name, about(one), *(one["versions"].get(each, "-") for each in SHOWN)] for name, one in sets.items()]
    return "\n".join([BEGIN, "", *(f"| {' | '.join(row)} |" for row in rows), "", END])


def updated(readme: str, sets: Sets) -> str:
    """The README with the table of today."""
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: markdown(sets), readme, flags=re.DOTALL)


def pins(file: Path) -> dict[str, str]:
    """The versions that a file of constraints gives to the libraries that decide what a run computes."""
    pinned = dict(line.split("==") for line in file.read_text(encoding="utf-8").split() if "==" in line)
    return {name: pinned[name] for name in bootstrap.LIBRARIES if name in pinned}


def main(names: list[str]) -> int:
    """Write the table and the README of this checkout."""
    sets = read()
    for one in sets.values():
        if "from" in one:
            one["versions"] = pins(ROOT / one["from"])
    for name in names:
        if "date" not in sets.get(name, {}):
            dated = ", ".join(f"`{known}`" for known, one in sets.items() if "date" in one)
            raise UserError(f"unknown set of versions: `{name}`. Give one of {dated}.")
        here = {library: bootstrap.versions()[library] for library in bootstrap.LIBRARIES}
        versions = {library: text.partition("+")[0] for library, text in here.items() if text is not None}
        sets[name] |= {"date": datetime.now(UTC).date().isoformat(), "versions": versions}
    write_json(FILE, sets)
    readme = ROOT / "README.md"
    write_text(readme, updated(readme.read_text(encoding="utf-8"), sets))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_guarded(lambda: main(sys.argv[1:])))
