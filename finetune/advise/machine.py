"""The machine that is advised on: how many of its devices a run can be spread over, and what to be warned of."""

from __future__ import annotations

from finetune.runtime.hardware import Hardware


def devices_here(machine: Hardware) -> int:
    """Devices that a run can be spread over: like GPUs; on a CPU one rank for each core."""
    if machine.device == "cpu":
        return max(min(machine.cpu_cores, 2), 1)
    return 1 if unlike(machine) else machine.count


def unlike(machine: Hardware) -> str | None:
    """What GPUs differ in that decides their speed; None where they are alike."""
    gpus = machine.gpus or ()
    kinds = {(gpu.name, gpu.multiprocessors, round(gpu.memory_gib)) for gpu in gpus}
    return "; ".join(machine.differences) if len(kinds) > 1 else None


def warnings(machine: Hardware) -> list[str]:
    """What is to be known about this machine before its figures are believed."""
    found = []
    if machine.device == "cpu":
        found.append(
            "there is no GPU: this measures the CPU, whose ranks share its memory bandwidth and caches, which no "
            "prediction here knows of"
        )
    if (differ := unlike(machine)) is not None:
        found.append(
            f"the GPUs differ ({differ}): the slowest would set the pace, so this advises on one. Make like ones "
            "visible with CUDA_VISIBLE_DEVICES to spread over those"
        )
    elif machine.differences:
        found.append(f"the GPUs differ in {'; '.join(machine.differences)}: ranks may wait for the slower one")
    for gpu in machine.gpus or ():
        if gpu.other_processes:
            numbers = ", ".join(map(str, gpu.other_processes))
            found.append(f"GPU {gpu.index} is in use by another process ({numbers}): its figures are not its own")
    if machine.device == "cuda" and "NVML" in machine.unknown:
        found.append(f"NVML cannot be asked ({machine.unknown['NVML']}): links and other processes are not known")
    return found
