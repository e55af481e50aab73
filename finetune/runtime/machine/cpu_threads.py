"""How many threads a CPU run computes with: one rule for every launcher, so that a dry run measures what a run does.

The rule: the cores that the process may use, divided by the ranks on this machine; waiting threads sleep. A number that
the user has set (OMP_NUM_THREADS, or accelerate's --num_cpu_threads_per_process) is kept. Launchers set a number of
their own without looking at the machine, mostly 1 per rank.

Measured (benchmarks/results/2026-11-23-cpu-threads.jsonl): on two cores, two sleeping threads are mostly faster than
one, also next to busy processes; two spinning threads, OpenMP's default, are mostly slower, there many times.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from finetune.runtime.ranks import distributed, launcher

VARIABLE = "OMP_NUM_THREADS"
PER_PROCESS = "num_cpu_threads_per_process"  # accelerate's option, and its key in a profile
QUOTAS = (  # of a container, in CPUs: files with quota and period in microseconds
    (Path("/sys/fs/cgroup/cpu.max"),),
    (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
)


spinning = False  # whether torch was imported before the policy was set


def sleep_while_waiting() -> None:
    """Have OpenMP's waiting threads sleep instead of spinning, unless the user has set it. OpenMP reads the setting
    when torch is imported, so every command calls this first."""
    global spinning
    if not Path("/dev/nvidiactl").exists() and "OMP_WAIT_POLICY" not in os.environ:
        spinning = "torch" in sys.modules
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def set_threads(device: str) -> None:
    """Set the number of threads that this process computes with, by the rule. A script that imported torch first, and
    thereby has spinning threads, keeps its number. On a GPU the number does not matter."""
    if device == "cpu" and not spinning:
        import torch

        torch.set_num_threads(user_threads() or default_threads(cores(), distributed.ranks().local_world_size))


def default_threads(cores: int, ranks: int) -> int:
    """Threads of each of `ranks` ranks that share `cores` cores: at least 1."""
    return max(cores // ranks, 1)


def user_threads() -> int | None:
    """The number that the user has set; None if there is none, or only one that the launcher has set."""
    asked = distributed.launcher_profile().get(PER_PROCESS)
    environment = launcher.environment() if launcher.is_library() else os.environ
    return _number(asked) or _number(environment.get(VARIABLE))


def cores() -> int:
    """Physical cores that this process may use: of the machine, of its affinity mask, of its container's quota."""
    import psutil

    found = [psutil.cpu_count(logical=False) or os.cpu_count() or 1, _quota()]
    if hasattr(os, "sched_getaffinity"):
        found.append(len(os.sched_getaffinity(0)))
    return max(int(min(found)), 1)


def _quota() -> float:
    """CPUs that the container may use; infinity without a limit."""
    for files in QUOTAS:
        try:
            quota, period = " ".join(file.read_text() for file in files).split()
            if int(period) > 0 and quota.isdecimal():
                return int(quota) / int(period)
        except (OSError, ValueError):
            continue
    return float("inf")


def _number(text: object) -> int | None:
    """A number of threads; None for anything that OpenMP would not take as one."""
    first = str(text).split(",")[0].strip()  # OpenMP allows one number per level of nesting
    return int(first) if first.isdecimal() and int(first) > 0 else None
