"""`finetune convert` on a folder of notebooks, such as github.com/unslothai/notebooks.

    FINETUNE_NOTEBOOKS=DIR pytest -m corpus tests/notebooks

FINETUNE_NOTEBOOKS_EXPECTED may name a table (tab-separated, with the columns path, expected and reason) of what should
become of each: `convert`, or `refuse` with a reason that begins with the code. The oracle runs each notebook, confined,
which takes about 10 s.
"""

from __future__ import annotations

import csv
import os
from functools import cache
from pathlib import Path

import pytest

from finetune.convert.command import Outcome, convert
from tests.notebooks.oracle.compare import check

pytestmark = [pytest.mark.corpus, pytest.mark.timeout(36_000)]


@cache
def outcomes() -> dict[str, Outcome]:
    folder = os.environ.get("FINETUNE_NOTEBOOKS")
    assert folder, "set FINETUNE_NOTEBOOKS to a folder of notebooks"
    paths = sorted(Path(folder).rglob("*.ipynb"))
    assert paths, f"{folder} holds no notebooks"
    return {str(path.relative_to(folder)): convert(path) for path in paths}


def test_every_notebook_is_converted_or_refused_with_a_reason() -> None:
    wrong = [
        f"{name}: {outcome.result} {outcome.code} {outcome.reason}"
        for name, outcome in outcomes().items()
        if outcome.result not in ("converted", "refused") or (outcome.result == "refused" and not outcome.reason)
    ]
    assert not wrong, "\n".join(wrong)


def test_outcomes_are_the_expected_ones() -> None:
    table = os.environ.get("FINETUNE_NOTEBOOKS_EXPECTED")
    expected = list(csv.DictReader(Path(table).open(encoding="utf-8"), delimiter="\t")) if table else []
    wrong = []
    for row in expected:
        found = outcomes().get(row["path"])
        wanted = "converted" if row["expected"] == "convert" else f"refused {row['reason'][:2]}"
        if found is not None and f"{found.result} {found.code}".strip() != wanted:
            wrong.append(f"{row['path']}: {wanted} expected; {found.result} {found.code} {found.reason}")
    assert not wrong, "\n".join(wrong)


def test_no_script_trains_what_its_notebook_does_not() -> None:
    folder = Path(os.environ["FINETUNE_NOTEBOOKS"])
    wrong = []
    for name, outcome in outcomes().items():
        if outcome.conversion is not None:
            found = check(folder / name, {f"{outcome.conversion.name}.py": outcome.conversion.script})
            wrong += [f"{name}: {found.reason}"] if found.status == "differs" else []
    assert not wrong, "\n".join(wrong)
