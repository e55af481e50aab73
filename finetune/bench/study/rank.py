"""A rank of `finetune bench study`: trains a dense model on random samples with plain PyTorch, with DDP on several."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from finetune.bench import rank
from finetune.runtime import communication, distributed, hardware


class Parts(NamedTuple):
    """One training step in its parts, and what it trains."""

    forward: Callable[[], torch.Tensor]
    backward: Callable[[torch.Tensor], Any]
    update: Callable[[], Any]
    clear: Callable[[], Any]
    model: nn.Module


def measure(request: rank.Request) -> list[dict[str, Any]]:
    """Each case (widths of a model, its dropout, a global batch) over `runs` fresh models, and once more in parts."""
    alone_in_ddp = request["ddp"] and distributed.ranks().world_size == 1
    if alone_in_ddp:
        backend = "nccl" if rank.on_gpu() else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    found = []
    each = request["runs"] + 1
    for number, case in enumerate(request["cases"]):
        times, busy, states = [], [], []
        if rank.on_gpu():
            torch.cuda.reset_peak_memory_stats()
        for run in range(request["runs"]):
            seconds, share, state = train(build(case, seed=run), request)
            times.append(rank.slowest(seconds))
            busy.append(share)
            states.append(state)
            rank.progress(number * each + run + 1, len(request["cases"]) * each)
        own = {
            "seconds": in_parts(build(case, seed=0), request),
            "memory_gib": memory_gib(),
            "utilisation": sum(busy) / len(busy) if None not in busy else None,
            "states": [states[0], states[-1]],
        }
        found.append({"step_seconds": rank.figure(times), "ranks": distributed.gather_objects(own)})
        rank.progress((number + 1) * each, len(request["cases"]) * each)
    if alone_in_ddp:
        torch.distributed.destroy_process_group()
    return found


def train(parts: Parts, request: rank.Request) -> tuple[list[float], float | None, dict[str, Any] | None]:
    """Seconds of the steps of one run, this rank's utilisation in it, and the state of its GPU at the end."""
    begun, used = time.perf_counter(), time.process_time()
    seconds = rank.time_steps(lambda: whole(parts), warm_up=request["warm_up"], steps=request["steps"])
    state = hardware.gpu_state()
    share = utilisation(state, time.process_time() - used, time.perf_counter() - begun)
    return seconds, share, state


def build(case: dict[str, Any], *, seed: int) -> Parts:
    """A fresh model and optimizer (Adam), and this rank's share of a global batch of random samples, on its device."""
    me = distributed.ranks()
    device = torch.device("cuda", torch.cuda.current_device()) if rank.on_gpu() else torch.device("cpu")
    torch.manual_seed(seed)
    with device:  # a CPU draws the weights of the larger model for longer than a GPU takes for a run's steps
        model: nn.Module = dense(case["widths"], case["dropout"])
    if torch.distributed.is_initialized():
        model = DistributedDataParallel(model, device_ids=[device.index] if rank.on_gpu() else None)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(case["batch"] // me.world_size, case["widths"][0], device=device)
    labels = torch.randint(case["widths"][-1], (len(inputs),), device=device)
    loss = nn.CrossEntropyLoss()
    return Parts(
        lambda: loss(model(inputs), labels), lambda value: value.backward(), optimizer.step, optimizer.zero_grad, model
    )


def dense(widths: list[int], dropout: float) -> nn.Sequential:
    """Linear layers from width to width, with ReLU and dropout after each but the last."""
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])


def whole(parts: Parts) -> None:
    """One training step."""
    parts.backward(parts.forward())
    parts.update()
    parts.clear()


def in_parts(parts: Parts, request: rank.Request) -> dict[str, Any]:
    """Seconds of each part of a step on this rank, and its communication by DDP's own account.

    In a run of its own: with several ranks DDP accounts for every step, for which the host waits once a step.
    """
    if isinstance(parts.model, DistributedDataParallel):
        parts.model._set_ddp_runtime_logging_sample_rate(1)
    rank.barrier()
    clock, account = rank.Clock(), []
    for number in range(request["warm_up"] + request["steps"]):
        if number == request["warm_up"]:
            clock.mark()
        counted = number >= request["warm_up"]
        value = parts.forward()
        account += [communication.exposed_and_hidden(parts.model)] if counted else []  # of the step before
        for call in (lambda: None, lambda value=value: parts.backward(value), parts.update, parts.clear):
            call()
            if counted:
                clock.mark()
    seconds = clock.seconds()
    names = ("forward", "backward", "optimizer", "other")
    found: dict[str, Any] = {name: rank.figure([seconds[place::4]]) for place, name in enumerate(names)}
    found["step"] = rank.figure([[sum(seconds[start : start + 4]) for start in range(0, len(seconds), 4)]])
    for place, name in enumerate(("exposed", "hidden")):
        known = [one[place] for one in account if one is not None]
        found[name] = rank.figure([known]) if known else None
    return found


def utilisation(state: dict[str, Any] | None, busy: float, seconds: float) -> float | None:
    """0 to 1: of the GPU, as the driver sampled it at the end of a run; of one core, for a rank on a CPU."""
    return state["utilisation"] if state is not None else busy / seconds


def memory_gib() -> float:
    """The most that this rank held so far: of its GPU, in this case; of the host, since it began, for a CPU."""
    if rank.on_gpu():
        return torch.cuda.max_memory_allocated() / 2**30
    import psutil

    return psutil.Process().memory_info().rss / 2**30


if __name__ == "__main__":
    raise SystemExit(rank.run_rank(measure))
