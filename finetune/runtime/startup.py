"""Seconds from the shell's return key to the first optimizer step, by phase, for run.json."""

from __future__ import annotations

import functools
import time

from finetune.runtime.ranks import launcher


class StartUp:
    """Seconds by phase. Each phase is named when it ends; further times of the same name add up."""

    def __init__(self) -> None:
        launched, began = _process_times()
        self._seconds: dict[str, float] = {} if launched is None else {"launcher": began - launched}
        self._last = began
        self._over = False

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


def _process_times() -> tuple[float | None, float]:
    """When this process's launcher started (None without one) and when this process did, in seconds since the Unix
    epoch."""
    import psutil

    began = psutil.Process().create_time()
    try:
        parent = launcher.find()
        return psutil.Process(parent).create_time() if parent is not None else None, began
    except psutil.Error:  # the launcher has just ended
        return None, began
