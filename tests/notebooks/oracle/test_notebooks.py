"""The oracle over the project's own notebooks. Over all probes: `make oracle`; over a corpus: test_corpus.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.notebooks.oracle import sandbox, warm
from tests.notebooks.oracle.compare import of_conversion
from tests.notebooks.oracle.marks import confined

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
NOTEBOOKS.append(ROOT / "tests" / "cases" / "convert-kaggle-folder" / "kaggle_folder.ipynb")


@confined
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_script_trains_what_the_notebook_trains(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "run_libraries", warm.run_libraries)
    found = of_conversion(path)
    assert (found.status, found.reason) == ("passed", "")
