"""Peak memory of this process: in all, and since the last record. The one reader of torch's peak counters in a run."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Window:
    """Memory since the last window was taken."""

    peak_gib: float  # most that tensors held; on a CPU, most resident memory since the start of the process
    reserved_gib: float | None  # most that torch's allocator held; None on a CPU
    allocator_retries: int  # times that the allocator freed its cache to satisfy a request


_highest_gib = 0.0  # of the windows that have been taken
_retries = 0


def take_window() -> Window:
    """Read the peaks since the last call and begin a new window. Reads counters: no synchronization."""
    global _highest_gib, _retries
    if not torch.cuda.is_available():
        return Window(peak_gib(), None, 0)
    peak = torch.cuda.max_memory_allocated() / 2**30
    reserved = torch.cuda.max_memory_reserved() / 2**30
    retries = int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
    window = Window(peak, reserved, retries - _retries)
    _highest_gib, _retries = max(_highest_gib, peak), retries
    torch.cuda.reset_peak_memory_stats()
    return window


def peak_gib() -> float:
    """Most memory that this process has held, its subprocesses not counted: on its GPU since `reset`, or of the host
    for a CPU run."""
    if torch.cuda.is_available():
        return max(_highest_gib, torch.cuda.max_memory_allocated() / 2**30)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def reset() -> None:
    """Forget the peak of a GPU; that of a host cannot be reset."""
    global _highest_gib
    _highest_gib = 0.0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
