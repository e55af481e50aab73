"""Seconds of a start, by phase."""

from __future__ import annotations

import os
import time

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
    assert sum(seconds.values()) == pytest.approx(time.time() - launched, abs=1.0)
    assert seconds["launcher"] == pytest.approx(psutil.Process().create_time() - launched)


def test_a_process_starts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find", lambda: None)
    start = startup.StartUp()
    first = start.complete()
    assert first is not None and list(first) == ["first step"]
    start.ended("data")
    assert start.complete() is None and list(first) == ["first step"]
