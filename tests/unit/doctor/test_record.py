"""Tests of finetune/doctor/record.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from finetune.doctor import record, tested_sets
from finetune.errors import UserError
from finetune.runtime import bootstrap
from tests.helpers import ROOT


def test_a_lane_that_passed_is_recorded_with_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make test-newest` does at its end, on a copy of the checkout's files."""
    for file in (*ROOT.glob("constraints*.txt"), ROOT / "README.md"):
        (tmp_path / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "FILE", tmp_path / "sets.json")
    installed = {name: "9.9.9+cpu" for name in bootstrap.LIBRARIES} | {"unsloth": None}
    monkeypatch.setattr(bootstrap, "versions", lambda: installed)
    assert record.main(["make test-newest"]) == 0
    written = json.loads((tmp_path / "sets.json").read_text())
    newest = written["make test-newest"]
    assert newest["versions"] == {name: "9.9.9" for name in bootstrap.LIBRARIES if name != "unsloth"}
    assert newest["date"] >= "2026-11-25" and f"| make test-newest | {newest['date']} | 9.9.9 |" in (
        (tmp_path / "README.md").read_text(encoding="utf-8")
    )
    assert written["make test"] == tested_sets.read()["make test"]
    with pytest.raises(UserError, match="unknown set of versions: `make tea`. Give one of `make test-newest`"):
        record.main(["make tea"])


def test_a_lane_records_a_set_that_has_a_date() -> None:
    """Otherwise its last command fails, after all tests passed."""
    recorded = re.findall(r'finetune\.doctor\.record "(.+)"', (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert recorded and all("date" in tested_sets.read().get(name, {}) for name in recorded)
