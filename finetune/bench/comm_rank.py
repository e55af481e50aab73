"""A rank of `finetune bench comm`: times collectives of float32 tensors at each of a list of sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from finetune.bench import rank
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject


def measure(request: rank.Request) -> JsonObject:
    """Seconds of each collective at each size, and the state of the GPUs at the start and at the end.

    Every run covers all collectives and sizes once, so that drift of the machine widens the confidence interval.
    """
    cases = [(name, size) for name in request["collectives"] for size in request["sizes"]]
    times: dict[tuple[str, int], list[list[float]]] = {case: [] for case in cases}
    before = None
    for number in range(request["runs"]):
        for place, (name, size) in enumerate(cases):
            step, _ = prepare(name, size)
            seconds = rank.time_steps(step, warm_up=request["warm_up"], steps=request["steps"])
            before = before or rank.states()
            times[name, size].append(rank.slowest(seconds))
            if request.get("progress", True):  # to the process that started the ranks
                rank.progress(number * len(cases) + place + 1, request["runs"] * len(cases))
    collectives: dict[str, list[JsonObject]] = {name: [] for name in request["collectives"]}
    for (name, size), runs in times.items():
        collectives[name].append({"bytes": prepare(name, size)[1], "seconds": rank.figure(runs)})
    return {
        "backend": dist.get_backend(),
        "collectives": collectives,
        "states": [before, rank.states()],
    }


def prepare(name: str, size: int) -> tuple[Callable[[], object], int]:
    """A call of the collective, and its bytes as nccl-tests counts them: the output on one rank of all-gather, the
    input of one rank to the others. Rounded up to the same number of elements on every rank.

    The tensors are zero, so that repeated reductions stay finite.
    """
    world = distributed.ranks().world_size
    device = torch.device("cuda", torch.cuda.current_device()) if rank.on_gpu() else torch.device("cpu")
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


if __name__ == "__main__":
    raise SystemExit(rank.run_rank(measure))
