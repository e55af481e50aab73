"""Conditions that limit how far a measurement can be trusted: drift, different GPUs, and other load on the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.types import JsonObject

# A GPU's clock follows its temperature and power. Under a steady load a clock moves by one or
# two steps of 15 MHz (less than 2 % of 1,980 MHz); larger changes make the figures incomparable.
MOST_CLOCK_DRIFT = 0.03
MOST_DEGREES = 10

States = Sequence[JsonObject | None]


def describe(before: States, after: States, machine: Hardware) -> JsonObject:
    """For JSON: the state of each rank's GPU under load at the start and at the end, load average and warnings."""
    load = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
    return {
        "before": list(before),
        "after": list(after),
        "load_average": load,
        "warnings": [
            *drift(before, after),
            *hardware_mismatch(machine),
            *shared(machine),
            *cpu_contention(machine, load),
        ],
    }


def drift(before: States, after: States) -> list[str]:
    """A warning for each GPU whose clock or temperature changed between start and end."""
    found = []
    for rank, (one, two) in enumerate(zip(before, after, strict=True)):
        if one is None or two is None:
            continue
        was, now = one.get("sm_clock_mhz"), two.get("sm_clock_mhz")
        if was and now and abs(now - was) > MOST_CLOCK_DRIFT * was:
            found.append(f"rank {rank}: the SM clock went from {was} to {now} MHz; the figures mix both")
        was, now = one.get("temperature_c"), two.get("temperature_c")
        if was is not None and now is not None and abs(now - was) > MOST_DEGREES:
            found.append(f"rank {rank}: the temperature went from {was} to {now} C; warm the GPU up before measuring")
    return found


def hardware_mismatch(machine: Hardware) -> list[str]:
    """A warning if the GPUs differ, with the differences."""
    if machine.identical is not False:
        return []
    return [f"the GPUs differ, so the slowest sets the pace ({'; '.join(machine.differences)})"]


def cpu_contention(machine: Hardware, load: Sequence[float] | None) -> list[str]:
    """A warning if a CPU run had more runnable processes than cores (`load` as from os.getloadavg)."""
    if machine.device != "cpu" or load is None or load[0] <= machine.cpu_cores + 0.5:
        return []
    return [f"more runnable processes than the {machine.cpu_cores} CPU cores: the figures include waiting for a core"]


def shared(machine: Hardware) -> list[str]:
    """A warning for each GPU that another process uses."""
    return [
        f"GPU {gpu.index} is shared with other processes: {', '.join(map(str, gpu.other_processes))}"
        for gpu in machine.gpus or ()
        if gpu.other_processes
    ]
