"""Times work on a device without a host-device sync: labeled marks, and the seconds between them."""

from __future__ import annotations

import time
from typing import Any


class Clock:
    """Seconds between labeled marks.

    On a GPU a mark is a CUDA event in the current stream: recording is non-blocking, reading synchronizes. On a CPU it
    is a `perf_counter` value.
    """

    def __init__(self, device: str) -> None:  # "cuda" or "cpu"
        self._cuda = device == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._free: list[Any] = []  # CUDA events that have been read, to record again

    def mark(self, label: str = "") -> None:
        """End the interval since the last mark; `label` names that interval, not the next one."""
        if not self._cuda:
            self._marks.append((label, time.perf_counter()))
            return
        import torch

        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((label, event))

    def wait(self) -> float:
        """Synchronize with the last mark. Returns the seconds that took: how far the host was ahead; 0.0 on a CPU."""
        if not self._cuda or not self._marks:
            return 0.0
        began = time.perf_counter()
        self._marks[-1][1].synchronize()
        return time.perf_counter() - began

    def drain(self) -> list[tuple[str, float]]:
        """Read the intervals since the last call; synchronizes with the device.

        Returns:
            (label, seconds) of each interval. The last mark becomes the start of the next interval.
        """
        marks, self._marks = self._marks, self._marks[-1:]
        if self._cuda and marks:
            marks[-1][1].synchronize()
        intervals = [
            (label, before.elapsed_time(after) / 1e3 if self._cuda else after - before)
            for (_, before), (label, after) in zip(marks, marks[1:], strict=False)
        ]
        if self._cuda:
            self._free += [event for _, event in marks[:-1]]
        return intervals

    def seconds(self) -> list[float]:
        """Like `drain`, without the labels."""
        return [seconds for _, seconds in self.drain()]

    def reset(self) -> None:
        """Forget all marks."""
        self._marks = []
