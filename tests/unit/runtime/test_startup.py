"""Seconds of a start, by phase."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from finetune.runtime import startup
from finetune.runtime.ranks import launcher


def test_phases_add_up_to_the_time_since_the_launcher_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find", os.getppid)
    start = startup.StartUp()
    start.ended("libraries")
    start.ended("data")
    start.ended("libraries")
    seconds = start.complete()
    assert seconds is not None and list(seconds) == ["launcher", "libraries", "data", "first step"]
    launched = psutil.Process(os.getppid()).create_time()
    assert seconds["launcher"] == pytest.approx(psutil.Process().create_time() - launched)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    assert sum(seconds.values()) - seconds["launcher"] == pytest.approx(age, abs=0.3)  # psutil's is 0 to 1 s more


def test_a_process_starts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find", lambda: None)
    start = startup.StartUp()
    first = start.complete()
    assert first is not None and list(first) == ["first step"]
    start.ended("data")
    assert start.complete() is None and list(first) == ["first step"]
