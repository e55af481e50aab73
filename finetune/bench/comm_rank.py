"""A rank of `finetune bench comm`: times collectives of float32 tensors at each of a list of sizes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from finetune.bench.launch import MARK, REQUEST, RESULT
from finetune.measure.protocol import summarize
from finetune.runtime.clock import Clock
from finetune.runtime.command import DONE, run_guarded
from finetune.runtime.files import write_json
from finetune.runtime.ranks import distributed, process_group
from finetune.runtime.types import JsonObject


def measure(request: JsonObject) -> JsonObject:
    """Seconds of each collective at each size.

    Every run covers all collectives and sizes once, so that drift of the machine widens the confidence interval.
    """
    cases = [(name, size) for name in request["collectives"] for size in request["sizes"]]
    times: dict[tuple[str, int], list[list[float]]] = {case: [] for case in cases}
    for number in range(request["runs"]):
        for place, (name, size) in enumerate(cases):
            step, _ = prepare(name, size)
            seconds = time_steps(step, warm_up=request["warm_up"], steps=request["steps"])
            times[name, size].append(slowest(seconds))
            if request.get("progress", True):  # to the process that started the ranks
                progress(number * len(cases) + place + 1, request["runs"] * len(cases))
    collectives: dict[str, list[JsonObject]] = {name: [] for name in request["collectives"]}
    for (name, size), runs in times.items():
        collectives[name].append({"bytes": prepare(name, size)[1], "seconds": summarize(runs).to_dict()})
    return {
        "backend": dist.get_backend(),
        "collectives": collectives,
    }


def prepare(name: str, size: int) -> tuple[Callable[[], object], int]:
    """A call of the collective, and its bytes as nccl-tests counts them: the output on one rank of all-gather, the
    input of one rank to the others. Rounded up to the same number of elements on every rank.

    The tensors are zero, so that repeated reductions stay finite.
    """
    world = distributed.ranks().world_size
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")
    share = -(-size // (4 * world))
    whole, part = torch.zeros(share * world, device=device), torch.zeros(share, device=device)
    received = torch.empty_like(whole) if name == "all_to_all" else whole
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "all_to_all": lambda: dist.all_to_all_single(received, whole),
    }
    return calls[name], 4 * share * world


def run_rank(measure: Callable[[JsonObject], object]) -> int:
    """The `main` of a rank started by `launch.ranks`: run `measure(request)`; rank 0 writes its result."""
    return run_guarded(lambda: _run_rank(Path(sys.argv[1]), measure))


def _run_rank(folder: Path, measure: Callable[[JsonObject], object]) -> int:
    request = json.loads((folder / REQUEST).read_text())
    choose_device()
    process_group.start(cpu=not on_gpu(), timeout_seconds=request["timeout_seconds"], timeout_setting=None)
    result = measure(request)
    if distributed.ranks().is_main:
        write_json(folder / RESULT, result)
    process_group.finish()
    return DONE


def choose_device() -> torch.device:
    """This rank's device: its own GPU, or the CPU."""
    if not on_gpu():
        torch.set_num_threads(1)  # ranks share the cores
        return torch.device("cpu")
    torch.cuda.set_device(distributed.ranks().local_rank)
    return torch.device("cuda", torch.cuda.current_device())


def on_gpu() -> bool:
    """Whether this benchmark runs on GPUs."""
    return torch.cuda.is_available()


def progress(done: int, total: int) -> None:
    """Report progress to the process that started the ranks."""
    if distributed.ranks().is_main:
        sys.stdout.write(f"{MARK}{done} {total}\n")
        sys.stdout.flush()


def barrier() -> None:
    """Synchronize with this rank's device and with the other ranks, so that all start the next part together."""
    if on_gpu():
        torch.cuda.synchronize()
    distributed.barrier()


def time_steps(step: Callable[[], object], *, warm_up: int, steps: int) -> list[float]:
    """Seconds of each of `steps` calls after `warm_up` calls; all ranks start together."""
    barrier()
    clock = Clock("cuda" if on_gpu() else "cpu")
    for number in range(warm_up + steps):
        if number == warm_up:
            clock.mark()
        step()
        if number >= warm_up:
            clock.mark()
    return clock.seconds()


def slowest(seconds: Sequence[float]) -> list[float]:
    """Each step's time on its slowest rank: a collective is complete when the last rank has its data."""
    return [max(of_ranks) for of_ranks in zip(*distributed.gather_objects(list(seconds)), strict=True)]


if __name__ == "__main__":
    raise SystemExit(run_rank(measure))
