"""What this process is doing right now: its optimizer step and phase. Entering a phase costs one assignment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Activity:
    """A phase that has begun."""

    phase: str  # such as "starting", "data", "forward", "backward", "optimizer", "evaluation", "saving"
    step: int  # optimizer steps that are complete; -1 before training
    since: float  # time.monotonic()


_now = Activity("starting", -1, time.monotonic())


def enter(phase: str, step: int | None = None) -> None:
    """A phase begins. `step`: optimizer steps complete by now; unchanged if None."""
    global _now
    _now = Activity(phase, _now.step if step is None else step, time.monotonic())


def current() -> Activity:
    """The phase that this process is in; safe from any thread."""
    return _now


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """Inside, the process is in `phase`; afterwards, in the one before."""
    before = _now.phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)
