"""`finetune bench comm`: latency and bandwidth of the collectives that training uses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.bench import conditions, launch
from finetune.errors import UserError
from finetune.measure.protocol import MEASURED, RUNS, WARM_UP
from finetune.runtime import nccl
from finetune.runtime.hardware import Hardware, survey

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
MIB = 2**20
SIZES = tuple(4096 * 4**power for power in range(9))  # 4 KiB .. 256 MiB
MOST_ON_CPU = 16 * MIB  # beyond it gloo only takes longer


def measure(
    world_size: int,
    sizes: Sequence[int] | None = None,
    runs: int = RUNS,
    steps: int = MEASURED,
    environment: Mapping[str, str] | None = None,
    *,
    warm_up: int = WARM_UP,
    collectives: Sequence[str] = COLLECTIVES,
    machine: Hardware | None = None,
) -> dict[str, Any]:
    """Launch `world_size` ranks on this machine and time collectives: NCCL on GPUs, gloo on a CPU.

    Args:
        sizes: bytes; 4 KiB .. 256 MiB (on a CPU to 16 MiB) where none are given.
        environment: variables of the ranks, such as {"NCCL_P2P_DISABLE": "1"}.
        machine: what `survey()` found, where the caller has it already.

    Returns:
        One run as `--json` has it: kind, world_size, backend, environment, hardware, conditions, and for each
        collective a list of {bytes, seconds: {mean, median, ci95, runs, n, removed}, algbw_gb_s, busbw_gb_s}.
        Bandwidths are taken from the median.

    Raises:
        UserError: fewer than two ranks, or more than there are GPUs.
        RunError: a rank failed or died.
    """
    machine = machine or survey()
    check_world(world_size, machine, least=2)
    if sizes is None:
        sizes = [size for size in SIZES if machine.device == "cuda" or size <= MOST_ON_CPU]
    request = {"sizes": list(sizes), "runs": runs, "steps": steps, "warm_up": warm_up, "collectives": list(collectives)}
    about = f"collectives on {world_size} ranks" + (f", {show(environment)}" if environment else "")
    found = launch.ranks("finetune.bench.comm_rank", world_size, request, about=about, environment=environment)
    for name, rows in found["collectives"].items():
        for row in rows:
            row |= bandwidths(name, row["bytes"], row["seconds"]["median"], world_size)
    before, after = found["states"]
    return {
        "kind": "comm",
        "world_size": world_size,
        "backend": found["backend"],
        "environment": in_effect(environment),
        "hardware": machine.to_dict(),
        "conditions": conditions.describe(before, after, machine),
        "collectives": found["collectives"],
    }


def bandwidths(collective: str, size: int, seconds: float, world_size: int) -> dict[str, float]:
    """Algorithm and bus bandwidth in GB/s (10^9 bytes), as nccl-tests defines them.

    algbw = bytes / seconds. busbw is what each link carries, whatever the number of ranks n: algbw times 2 (n - 1) / n
    for all-reduce, (n - 1) / n for reduce-scatter and all-gather, 1 for broadcast
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    share = (world_size - 1) / world_size
    factor = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share, "broadcast": 1.0}[collective]
    algorithm = size / seconds / 1e9
    return {"algbw_gb_s": algorithm, "busbw_gb_s": algorithm * factor}


def check_world(world_size: int, machine: Hardware, *, least: int = 1) -> None:
    """Raises UserError where this machine cannot run so many ranks, or they are too few."""
    if world_size < least:
        raise UserError(f"--world-sizes {world_size}: communication needs two ranks or more")
    if machine.device == "cuda" and world_size > machine.count:
        raise UserError(
            f"--world-sizes {world_size}: {machine.count} GPU(s) can be seen here, and a rank needs one of its own. "
            "Give at most that many, or make more visible with CUDA_VISIBLE_DEVICES."
        )


def in_effect(environment: Mapping[str, str] | None) -> dict[str, str]:
    """The variables that the ranks' communication depends on."""
    env = {**launch.ALWAYS, **os.environ, **(environment or {})}
    shown = ("NCCL_", "GLOO_", "TORCH_NCCL_")
    return {name: env[name] for name in sorted(env) if name.startswith(shown) or name == "OMP_NUM_THREADS"}


def show(environment: Mapping[str, str]) -> str:
    """NAME=VALUE of each."""
    return " ".join(f"{name}={value}" for name, value in environment.items())


# --- the settings that matter ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A set of NCCL variables to try, and the collectives that it concerns."""

    name: str
    environment: dict[str, str]
    collectives: tuple[str, ...] = COLLECTIVES


def variants(machine: Hardware) -> tuple[Variant, ...]:
    """What is worth trying on this topology; the first is what `nccl.settings` gives. NVLink's multicast stays off.

    Raises:
        UserError: there is no NCCL here.
    """
    links = machine.links or ()
    if machine.device != "cuda" or not links:
        raise UserError(
            "--settings compares settings of NCCL, which joins GPUs; here is "
            + ("one GPU. " if machine.device == "cuda" else "no GPU. ")
            + "Leave it out to measure what there is."
        )
    base = {one.name: one.value for one in nccl.settings(machine)}
    found = [Variant(name="as advised", environment=base)]
    if any(link.peer_access for link in links):
        found.append(Variant(name="peer access off", environment=base | {"NCCL_P2P_DISABLE": "1"}))
    elif "NCCL_P2P_DISABLE" in base:
        found.append(Variant(name="peer access left to NCCL", environment=base | {"NCCL_P2P_DISABLE": "0"}))
    found.append(Variant(name="Ring", environment=base | {"NCCL_ALGO": "Ring"}))
    # NCCL has Tree for all-reduce alone; the others would find no algorithm.
    found.append(Variant(name="Tree", environment=base | {"NCCL_ALGO": "Tree"}, collectives=("all_reduce",)))
    found.append(Variant(name="Simple", environment=base | {"NCCL_PROTO": "Simple"}))
    found.append(Variant(name="LL", environment=base | {"NCCL_PROTO": "LL"}))
    if all(link.nvlinks for link in links):  # elsewhere LL128 "can lead to data corruption" (NCCL_PROTO in its manual)
        found.append(Variant(name="LL128", environment=base | {"NCCL_PROTO": "LL128"}))
    for size in (MIB, 32 * MIB):  # of 4 MiB, and what the study set
        found.append(Variant(name=f"buffer {size // MIB} MiB", environment=base | {"NCCL_BUFFSIZE": str(size)}))
    return tuple(found)
