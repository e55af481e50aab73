"""A dry run whose device is too slow for a single step."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from finetune import dryrun
from finetune.config import Config


def test_a_dry_run_that_cannot_measure_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    codes: list[int] = []
    monkeypatch.setattr(dryrun.os, "_exit", lambda code: (codes.append(code), ended.set()))
    (folder := tmp_path / ".dry-run-x").mkdir()
    with dryrun.ended_after(0.01, Config(json=tmp_path / "dry.json"), folder):
        assert ended.wait(30)
    assert codes == [1] and not folder.exists()
    verdict = json.loads((tmp_path / "dry.json").read_text())
    assert verdict["go"] is False and "too slow for these rows" in verdict["reason"]
    assert "NO-GO: nothing could be measured within" in capsys.readouterr().out
    with dryrun.ended_after(60, Config(), folder):
        pass
    assert codes == [1]
