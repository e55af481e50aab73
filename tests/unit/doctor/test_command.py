"""Tests of finetune/doctor/command.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import patches
from tests.helpers import ROOT
from tests.helpers.doctor import config_file, examine


@pytest.mark.process
def test_bad_input_is_2_and_help_is_0(tmp_path: Path) -> None:
    file = config_file(tmp_path / "home", learing_rate=1)
    done = examine(tmp_path / "home", "--config", str(file))
    assert done.returncode == 2 and "learning_rate" in done.stderr and done.stdout == ""
    assert examine(tmp_path / "home", "--config", "nowhere.yaml").returncode == 2
    done = examine(tmp_path / "home", "--help")
    assert done.returncode == 0 and "usage: finetune doctor" in done.stdout


@pytest.mark.process
def test_one_process_of_a_launch_speaks(tmp_path: Path) -> None:
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = examine(tmp_path / "home", **ranks)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_page_of_defects_names_what_exists() -> None:
    """Every test, patch and anchor that docs/defects.md names is there, and every patch is on the page."""
    page = (ROOT / "docs" / "defects.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|patches|finetune|benchmarks)/[^`]*)`", page))
    assert len(named) > 40
    for name in named:
        path, _, function = name.partition("::")
        assert (ROOT / path).exists(), name
        if function:
            assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE), name
    assert {f"patches/{patch.__name__.rpartition('.')[2]}.py" for patch in patches.ALL} <= named
    anchors = re.findall(r'<a id="([a-z0-9]+)">', page)
    assert len(anchors) == len(set(anchors)) and set(re.findall(r"\(#([a-z0-9]+)\)", page)) <= set(anchors)
