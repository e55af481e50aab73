"""What this process is doing right now: its optimizer step and phase. Entering a phase costs one assignment."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
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
    if _shared is not None:
        _LAYOUT.pack_into(_shared, 0, _now.step, _now.since, phase.encode())


def current() -> Activity:
    """The phase that this process is in; safe from any thread."""
    return _now


_LAYOUT = struct.Struct("<qd64s")  # step, since, phase
_shared: mmap.mmap | None = None


def share() -> int | None:
    """Keep a copy for `read_from_process`, which needs no help of this process: it may have been stopped.

    Returns:
        The file descriptor of the copy, or None on systems without such memory (Linux has it).
    """
    global _shared
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("finetune-activity")
    os.ftruncate(descriptor, _LAYOUT.size)
    _shared = mmap.mmap(descriptor, _LAYOUT.size)
    enter(_now.phase)
    return descriptor


def read_from_process(pid: int, descriptor: int | None) -> Activity | None:
    """What another process of this machine is doing, by what its `share` returned; None if that cannot be read."""
    with contextlib.suppress(OSError, struct.error):
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
            step, since, phase = _LAYOUT.unpack(file.read(_LAYOUT.size))
        return Activity(phase.rstrip(b"\0").decode(errors="replace"), step, since)
    return None


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """Inside, the process is in `phase`; afterwards, in the one before."""
    before = _now.phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)
