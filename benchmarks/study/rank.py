"""A rank of `benchmarks.study`: trains a dense model on random samples in plain PyTorch, with DDP if ranks > 1."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from finetune.bench import rank
from finetune.runtime import communication
from finetune.runtime.clock import Clock
from finetune.runtime.machine import hardware
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject

PHASES = ("forward", "backward", "optimizer", "other")  # there is no data to wait for


class Step(NamedTuple):
    """The phases of one training step, and the model it trains."""

    forward: Callable[[], torch.Tensor]
    backward: Callable[[torch.Tensor], Any]
    update: Callable[[], Any]
    clear: Callable[[], Any]
    model: nn.Module


def measure(request: rank.Request) -> list[JsonObject]:
    """Time each case (layer widths, dropout, global batch size) over `runs` fresh models, and once more by phase."""
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
            "seconds": time_phases(build(case, seed=0), request),
            "memory_gib": memory_gib(),
            "utilization": sum(busy) / len(busy) if None not in busy else None,
            "states": [states[0], states[-1]],
        }
        found.append({"step_seconds": rank.figure(times), "ranks": distributed.gather_objects(own)})
        rank.progress((number + 1) * each, len(request["cases"]) * each)
    if alone_in_ddp:
        torch.distributed.destroy_process_group()
    return found


def train(step: Step, request: rank.Request) -> tuple[list[float], float | None, JsonObject | None]:
    """Seconds of each step of one run, this rank's utilization (0 to 1) during it, and its GPU's state at the end."""
    started, used = time.perf_counter(), time.process_time()
    seconds = rank.time_steps(lambda: train_step(step), warm_up=request["warm_up"], steps=request["steps"])
    state = hardware.gpu_state()
    share = utilization(state, time.process_time() - used, time.perf_counter() - started)
    return seconds, share, state


def build(case: JsonObject, *, seed: int) -> Step:
    """A new model with Adam, and this rank's share of a global batch of random samples, on this rank's device."""
    me = distributed.ranks()
    device = torch.device("cuda", torch.cuda.current_device()) if rank.on_gpu() else torch.device("cpu")
    torch.manual_seed(seed)
    with device:  # initializing the larger model on a CPU takes longer than all steps of a run on a GPU
        model: nn.Module = dense(case["widths"], case["dropout"])
    if torch.distributed.is_initialized():
        model = DistributedDataParallel(model, device_ids=[device.index] if rank.on_gpu() else None)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(case["batch"] // me.world_size, case["widths"][0], device=device)
    labels = torch.randint(case["widths"][-1], (len(inputs),), device=device)
    loss = nn.CrossEntropyLoss()
    return Step(
        lambda: loss(model(inputs), labels), lambda value: value.backward(), optimizer.step, optimizer.zero_grad, model
    )


def dense(widths: list[int], dropout: float) -> nn.Sequential:
    """Linear layers of these widths, with ReLU and dropout after each except the last."""
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])


def train_step(step: Step) -> None:
    """One training step."""
    step.backward(step.forward())
    step.update()
    step.clear()


def time_phases(step: Step, request: rank.Request) -> JsonObject:
    """Seconds of each phase of a step on this rank, and its communication as DDP reports it.

    This is a separate run, because DDP's report costs a host-device sync per step.
    """
    if isinstance(step.model, DistributedDataParallel):
        step.model._set_ddp_runtime_logging_sample_rate(1)
    rank.barrier()
    for _ in range(request["warm_up"]):
        train_step(step)
    clock, reports = Clock(rank.device_type()), []
    clock.mark()
    for _ in range(request["steps"]):
        loss = step.forward()
        reports.append(communication.exposed_and_hidden(step.model))  # of the previous step
        clock.mark("forward")
        step.backward(loss)
        clock.mark("backward")
        step.update()
        clock.mark("optimizer")
        step.clear()
        clock.mark("other")
    intervals = clock.drain()
    seconds = {name: [passed for label, passed in intervals if label == name] for name in PHASES}
    found: JsonObject = {name: rank.figure([passed]) for name, passed in seconds.items()}
    found["step"] = rank.figure([[sum(phases) for phases in zip(*seconds.values(), strict=True)]])
    for place, name in enumerate(("exposed", "hidden")):
        known = [one[place] for one in reports if one is not None]
        found[name] = rank.figure([known]) if known else None
    return found


def utilization(state: JsonObject | None, busy: float, seconds: float) -> float | None:
    """0 to 1: of the GPU, as the driver samples it at the end of a run, or of one core for a rank on a CPU."""
    return state["utilization"] if state is not None else busy / seconds


def memory_gib() -> float:
    """Peak GPU memory of this rank in this case, or the resident memory of its process for a CPU."""
    if rank.on_gpu():
        return torch.cuda.max_memory_allocated() / 2**30
    import psutil

    return psutil.Process().memory_info().rss / 2**30


if __name__ == "__main__":
    raise SystemExit(rank.run_rank(measure))
