"""Whether a machine stayed the same while it was measured: clocks and temperature, and GPUs that are alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from finetune.runtime.hardware import Hardware

# A GPU's clock follows its temperature and power. The study kept its GPUs between 65 and 70 C. Under a steady load a
# clock moves by a step or two of 15 MHz (under 2 % of 1,980 MHz); more is another machine than at the start.
MOST_CLOCK_DRIFT = 0.03
MOST_DEGREES = 10

States = Sequence[dict[str, Any] | None]


def describe(before: States, after: States, machine: Hardware) -> dict[str, Any]:
    """For JSON: the state of each rank's GPU under load at the start and at the end, and what is to be warned of."""
    load = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
    return {
        "before": list(before),
        "after": list(after),
        "load_average": load,
        "warnings": [*drift(before, after), *unlike(machine), *shared(machine), *crowded(machine, load)],
    }


def drift(before: States, after: States) -> list[str]:
    """A sentence for each GPU whose clock or temperature at the end is not what it was at the start."""
    found = []
    for rank, (one, two) in enumerate(zip(before, after, strict=True)):
        if one is None or two is None:
            continue
        was, now = one.get("sm_clock_mhz"), two.get("sm_clock_mhz")
        if was and now and abs(now - was) > MOST_CLOCK_DRIFT * was:
            found.append(f"rank {rank}: the SM clock went from {was} to {now} MHz; the figures mix both")
        was, now = one.get("temperature_c"), two.get("temperature_c")
        if was is not None and now is not None and abs(now - was) > MOST_DEGREES:
            found.append(f"rank {rank}: the temperature went from {was} to {now} C; run longer before you measure")
    return found


def unlike(machine: Hardware) -> list[str]:
    """That the GPUs differ, and in what."""
    if machine.identical is not False:
        return []
    return [f"the GPUs differ, so the slowest sets the pace ({'; '.join(machine.differences)})"]


def crowded(machine: Hardware, load: Sequence[float] | None) -> list[str]:
    """That the cores of a CPU run had more to do than there are cores (`load`: as os.getloadavg has it)."""
    if machine.device != "cpu" or load is None or load[0] <= machine.cpu_cores + 0.5:
        return []
    return [f"more processes wanted a core than the {machine.cpu_cores} there are: waiting is in these figures"]


def shared(machine: Hardware) -> list[str]:
    """A sentence for each GPU that another process uses."""
    return [
        f"GPU {gpu.index} is used by other processes ({', '.join(map(str, gpu.other_processes))}): they take a share"
        for gpu in machine.gpus or ()
        if gpu.other_processes
    ]
