"""Modules beside a notebook: which files of the user may become part of the script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.convert.notebook.read import Notebook, read
from finetune.convert.prepare.modules import MissingModule, inline_modules

MODULE = "PREFIX = 'p'\ndef render(row):\n    return PREFIX + row['text']\n"
USES = "from helpers import render\nrows = [render(row) for row in rows]"
MOVES = "import sys\nsys.path.append('..')\n"


def notebook(folder: Path, source: str = USES) -> Notebook:
    folder.mkdir(parents=True, exist_ok=True)
    cell = {"cell_type": "code", "source": source}
    (folder / "mine.ipynb").write_text(json.dumps({"cells": [cell]}))
    return read(folder / "mine.ipynb")


def sources(found: Notebook) -> str:
    return "\n".join(one.source for one in found.statements)


def test_a_module_in_the_repository_becomes_part_of_the_script(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "helpers.py").write_text(MODULE)
    for folder, source in ((tmp_path, USES), (tmp_path / "notebooks", MOVES + USES)):
        found = notebook(folder, source)
        assert inline_modules(found, folder)
        assert "PREFIX = 'p'" in sources(found) and "import render" not in sources(found)


def test_a_link_within_the_repository_is_followed(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "shared.py").write_text(MODULE)
    found = notebook(tmp_path / "a")
    (tmp_path / "a" / "helpers.py").symlink_to("../shared.py")
    assert inline_modules(found, tmp_path / "a")


@pytest.mark.parametrize("repository", [True, False], ids=["repository", "folder"])
@pytest.mark.parametrize("kind", ["file", "folder", "package", "imported by another"])
def test_a_link_out_of_the_repository_is_refused(kind: str, repository: bool, tmp_path: Path) -> None:
    private, folder = tmp_path / "private", tmp_path / "repository"
    private.mkdir()
    (private / "settings.py").write_text(MODULE)
    (private / "helpers.py").write_text(MODULE)
    found = notebook(folder, "import os\nos.chdir('src')\n" + USES)
    if repository:
        (folder / ".git").mkdir()
    if kind == "file":
        (folder / "helpers.py").symlink_to("../private/settings.py")
    elif kind == "folder":
        (folder / "src").symlink_to("../private")
    elif kind == "package":
        (folder / "helpers").mkdir()
        (folder / "helpers" / "__init__.py").symlink_to("../../private/settings.py")
    else:
        (folder / "helpers.py").write_text("from inner import render\n")
        (folder / "inner.py").symlink_to("../private/settings.py")
    with pytest.raises(MissingModule) as error:
        inline_modules(found, folder)
    reason = str(error.value)
    assert reason.startswith("R4: cell 0: it imports helpers, a link that leads out of the notebook's repository")
    assert reason.endswith("paste its code into a cell")


def test_a_file_above_a_notebook_without_repository_is_refused(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text(MODULE)
    found = notebook(tmp_path / "downloaded", MOVES + USES)
    with pytest.raises(MissingModule, match="helpers, a module out of the notebook's repository or folder"):
        inline_modules(found, tmp_path / "downloaded")
