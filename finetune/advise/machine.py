"""The machine: how many of its devices a run can use, warnings about it, and how to start a run on it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from finetune.redact import redact_arguments
from finetune.runtime import launch_lines
from finetune.runtime.machine import nccl
from finetune.runtime.machine.hardware import Hardware


def devices_here(machine: Hardware) -> int:
    """Number of devices that a run can use: all GPUs if they are alike; on a CPU one rank per core, at most two."""
    if machine.device == "cpu":
        return max(min(machine.cpu_cores, 2), 1)
    return 1 if hardware_mismatch(machine) else machine.count


def hardware_mismatch(machine: Hardware) -> str | None:
    """Differences between the GPUs that affect speed; None if they are alike."""
    gpus = machine.gpus or ()
    kinds = {(gpu.name, gpu.multiprocessors, round(gpu.memory_gib)) for gpu in gpus}
    return "; ".join(machine.differences) if len(kinds) > 1 else None


def warnings(machine: Hardware) -> list[str]:
    """Warnings that limit how far measurements on this machine can be trusted."""
    found = []
    if machine.device == "cpu":
        found.append(
            "there is no GPU: this measures the CPU. Its ranks share memory bandwidth and caches, which the prediction "
            "does not model"
        )
    if (differ := hardware_mismatch(machine)) is not None:
        found.append(
            f"the GPUs differ ({differ}): the slowest would set the pace, so only one is considered. Select "
            "identical GPUs with CUDA_VISIBLE_DEVICES to use several"
        )
    elif machine.differences:
        found.append(f"the GPUs differ in {'; '.join(machine.differences)}: ranks may wait for the slower one")
    for gpu in machine.gpus or ():
        if gpu.other_processes:
            numbers = ", ".join(map(str, gpu.other_processes))
            found.append(f"GPU {gpu.index} is in use by another process ({numbers}): its figures are unreliable")
    if machine.device == "cuda" and "NVML" in machine.unknown:
        found.append(f"NVML is unavailable ({machine.unknown['NVML']}): links and other processes are unknown")
    return found


def launch(
    world: int, machine: Hardware, arguments: Sequence[str], target: Sequence[str] = ("-m", "finetune.train")
) -> tuple[dict[str, str], str]:
    """The environment and the launch line of `world` ranks on this machine.

    Secrets among the arguments are masked, because the line is printed and written to files.
    """
    chosen = nccl.recommend_settings(machine) if world > 1 else ()
    environment = {one.name: one.value for one in chosen}
    words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    how = launch_lines.user_command(world, on_cpu=machine.device == "cpu")
    command = shlex.join([*how, *target, *redact_arguments(arguments)])
    return environment, " ".join([*words, command])
