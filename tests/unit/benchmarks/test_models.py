"""Tests of benchmarks/models.py."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_a_benchmarks_model_is_built_by_another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In this one it would stay on the GPU whose memory is measured."""
    from benchmarks import models

    started: list[list[str]] = []
    monkeypatch.setattr(models.subprocess, "run", lambda command, **kw: started.append([str(one) for one in command]))
    assert models.build(tmp_path / "m", "llama-1m", tmp_path / "rows.jsonl") == tmp_path / "m"
    expected = ["-m", "benchmarks.models", str(tmp_path / "m"), "llama-1m", str(tmp_path / "rows.jsonl")]
    assert [command[1:] for command in started] == [expected]
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").touch()
    models.build(tmp_path / "m", "llama-1m", tmp_path / "rows.jsonl")  # it is there
    assert len(started) == 1
