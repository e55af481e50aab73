"""`finetune bench comm`: latency and bandwidth of the collectives that training uses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from finetune.bench import launch
from finetune.errors import UserError
from finetune.measure.protocol import MEASURED, RUNS, WARM_UP
from finetune.runtime.machine.hardware import Hardware, survey
from finetune.runtime.ranks import distributed, multinode, process_group
from finetune.runtime.types import JsonObject

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
SIZES = tuple(4096 * 4**power for power in range(9))  # 4 KiB .. 256 MiB
MOST_ON_CPU = 16 * 2**20  # larger sizes on gloo take long and show nothing new


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
) -> JsonObject:
    """Start `world_size` ranks on this machine and time collectives: NCCL on GPUs, gloo on a CPU.

    Args:
        sizes: bytes; by default 4 KiB to 256 MiB, or to 16 MiB on a CPU.
        environment: environment variables of the ranks, such as {"NCCL_P2P_DISABLE": "1"}.
        machine: result of `survey()`, if the caller has it already.

    Returns:
        One run, as in `--json`: kind, world_size, backend, environment, hardware, and for each
        collective a list of {bytes, seconds: {mean, median, ci95, runs, n, removed}, algbw_gb_s, busbw_gb_s}.
        Bandwidths are computed from the median.

    Raises:
        UserError: fewer than two ranks, or more ranks than GPUs.
        RunError: a rank failed or died.
    """
    machine = machine or survey()
    check_world(world_size, machine)
    request = _request(sizes, machine, runs, steps, warm_up) | {"collectives": list(collectives)}
    title = f"collectives on {world_size} ranks"
    if environment:
        title += f", {' '.join(f'{name}={value}' for name, value in environment.items())}"
    found = launch.ranks("finetune.bench.comm_rank", world_size, request, title=title, environment=environment)
    return _complete(found, world_size, machine, environment)


def measure_here(sizes: Sequence[int] | None, runs: int, steps: int) -> JsonObject:
    """`measure`, by the ranks that a launcher has started on several machines; every rank calls it and gets the result,
    which has `hosts` and `machines` as well."""
    from finetune.bench import comm_rank

    comm_rank.choose_device()
    process_group.start(cpu=not comm_rank.on_gpu(), timeout_seconds=launch.TIMEOUT_SECONDS, timeout_setting=None)
    world_size, machine = distributed.ranks().world_size, survey()
    request = _request(sizes, machine, runs, steps, WARM_UP)
    found = comm_rank.measure(request | {"progress": False})
    hosts = multinode.hosts()
    process_group.finish()
    return _complete(found, world_size, machine) | {"hosts": hosts, "machines": process_group.machine_count()}


def _request(sizes: Sequence[int] | None, machine: Hardware, runs: int, steps: int, warm_up: int) -> JsonObject:
    """The input of `comm_rank.measure`."""
    measured = {"runs": runs, "steps": steps, "warm_up": warm_up, "collectives": list(COLLECTIVES)}
    usual = [size for size in SIZES if machine.device == "cuda" or size <= MOST_ON_CPU]
    return measured | {"sizes": list(sizes or usual)}


def _complete(
    found: JsonObject, world_size: int, machine: Hardware, environment: Mapping[str, str] | None = None
) -> JsonObject:
    """A result of `comm_rank.measure` with bandwidths."""
    for name, rows in found["collectives"].items():
        for row in rows:
            row |= bandwidths(name, row["bytes"], row["seconds"]["median"], world_size)
    return {
        "kind": "comm",
        "world_size": world_size,
        "backend": found["backend"],
        "environment": communication_environment(environment),
        "hardware": machine.to_dict(),
        "collectives": found["collectives"],
    }


def bandwidths(collective: str, size: int, seconds: float, world_size: int) -> dict[str, float]:
    """Algorithm and bus bandwidth in GB/s (10^9 bytes), as nccl-tests defines them.

    algbw = bytes / seconds. busbw is the traffic per link, comparable across world sizes n: algbw times 2 (n - 1) / n
    for all-reduce, (n - 1) / n for reduce-scatter, all-gather and all-to-all, 1 for broadcast
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    share = (world_size - 1) / world_size
    factor = {"all_reduce": 2 * share, "broadcast": 1.0}.get(collective, share)
    algorithm = size / seconds / 1e9
    return {"algbw_gb_s": algorithm, "busbw_gb_s": algorithm * factor}


def check_world(world_size: int, machine: Hardware) -> None:
    """Raises UserError if this machine has too few GPUs for the world size, or if it is below 2."""
    if world_size < 2:
        raise UserError(f"too few ranks to communicate: --world-sizes {world_size}. Give two ranks or more.")
    if machine.device == "cuda" and world_size > machine.count:
        raise UserError(
            f"too many ranks: --world-sizes {world_size}, but the number of visible GPUs is {machine.count}, and each "
            "rank needs one. Use a smaller world size, or make more GPUs visible with CUDA_VISIBLE_DEVICES."
        )


def communication_environment(environment: Mapping[str, str] | None) -> dict[str, str]:
    """Environment variables of the ranks that affect communication."""
    env = {**launch.DEFAULT_ENVIRONMENT, **os.environ, **(environment or {})}
    shown = ("NCCL_", "GLOO_", "TORCH_NCCL_")
    return {name: env[name] for name in sorted(env) if name.startswith(shown) or name == "OMP_NUM_THREADS"}
