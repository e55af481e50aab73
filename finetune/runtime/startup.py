"""Seconds from the shell's return key to the first optimizer step, by phase, for run.json."""

from __future__ import annotations

import contextlib
import functools
import time

import psutil

from finetune.runtime.ranks import launcher


def process_began() -> float:
    """When this process began, in seconds since the Unix epoch."""
    exact = hasattr(time, "CLOCK_BOOTTIME")  # on Linux, where psutil counts from the second of the machine's boot
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) if exact else psutil.boot_time()
    return psutil.Process().create_time() - psutil.boot_time() + boot


class StartUp:
    """Seconds by phase. Each phase is named when it ends; further times of the same name add up."""

    def __init__(self) -> None:
        self._last, self._over = process_began(), False
        self._seconds: dict[str, float] = {}
        if (parent := launcher.find()) is not None:
            with contextlib.suppress(psutil.Error):  # the launcher has just ended
                self._seconds["launcher"] = psutil.Process().create_time() - psutil.Process(parent).create_time()

    def ended(self, phase: str) -> None:
        """`phase` took the time since the last call."""
        if not self._over:
            now = time.time()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
            self._last = now

    def complete(self) -> dict[str, float] | None:
        """The first optimizer step is done. Returns the seconds by phase, whose sum is the whole start-up; None for
        later runs of the same process, which did not start with it."""
        if self._over:
            return None
        self.ended("first step")
        self._over = True
        return self._seconds


@functools.cache
def current() -> StartUp:
    """The start-up of this process."""
    return StartUp()
