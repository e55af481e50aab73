"""Tests of finetune/bench/timeline.py."""

from __future__ import annotations

from importlib import util as importlib_util
from pathlib import Path

import pytest

from finetune.bench import timeline
from tests.helpers.bench import figure


def test_a_bar_is_as_long_as_the_step() -> None:
    seconds = {"data": figure(0.001), "forward": figure(0.010), "backward": figure(0.020), "optimizer": figure(0.002)}
    one = timeline.bar("rank 0", seconds | {"other": figure(0.0005), "exposed": figure(0.004), "hidden": figure(0.006)})
    assert sum(one.parts.values()) == pytest.approx(33.5)
    assert one.parts["backward"] == pytest.approx(16.0) and one.parts["exposed communication"] == pytest.approx(4.0)
    assert one.hidden == pytest.approx(6.0)
    drawn = timeline.pieces(one, 33.5)
    assert sum(length for _, length in drawn) == timeline.WIDTH and all(length >= 0 for _, length in drawn)
    alone = timeline.bar("rank 0", seconds | {"exposed": None, "hidden": None})
    assert alone.parts["exposed communication"] == alone.hidden == 0 and alone.parts["backward"] == pytest.approx(20.0)


def test_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib_util, "find_spec", lambda name: None)
    assert timeline.write(tmp_path / "x.png", "title", []) is False
    assert "pip install '.[plots]'" in capsys.readouterr().out and not list(tmp_path.iterdir())
