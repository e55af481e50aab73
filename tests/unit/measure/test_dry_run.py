"""A dry run whose device is too slow for a single step."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from finetune.config import Config
from finetune.measure import dry_run, dry_run_report


def test_a_dry_run_that_cannot_measure_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    codes: list[int] = []
    monkeypatch.setattr(dry_run.os, "_exit", lambda code: (codes.append(code), ended.set()))
    (folder := tmp_path / ".dry-run-x").mkdir()
    with dry_run.time_limit(0.01, Config(json=tmp_path / "dry.json"), folder):
        assert ended.wait(30)
    assert codes == [1] and not folder.exists()
    verdict = json.loads((tmp_path / "dry.json").read_text())
    assert verdict["go"] is False and "too slow for these rows" in verdict["reason"]
    assert "NO-GO: nothing could be measured within" in capsys.readouterr().out
    with dry_run.time_limit(60, Config(), folder):
        pass
    assert codes == [1]


def test_the_real_run_gets_no_option_of_the_dry_run() -> None:
    words = ["--dry-run", "--devices", "2", "--json", "x", "--training.max_steps", "3"]
    assert dry_run_report.training_arguments(words) == ["--training.max_steps", "3"]
    assert dry_run_report.training_arguments(["--devices=2", *words[-2:]]) == words[-2:]
