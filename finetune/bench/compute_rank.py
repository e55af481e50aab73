"""A rank of `finetune bench compute`: matrix products and copies on this rank's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from finetune.bench import rank
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject

GIB = 2**30


class Case(NamedTuple):
    """One thing to time: a call of `step` does `amount`, in `unit` times seconds."""

    name: str
    step: Callable[[], object]
    amount: float
    unit: str


def measure(request: rank.Request) -> JsonObject:
    """Rate of each case on every rank, all ranks at the same time."""
    cases, before = [], None
    builders = list(gpu_cases() if rank.on_gpu() else cpu_cases())
    for place, build in enumerate(builders):
        case = build()
        runs = []
        for _ in range(request["runs"]):
            runs.append(rank.time_steps(case.step, warm_up=request["warm_up"], steps=request["steps"]))
            before = before or rank.states()
        figures = distributed.gather_objects(rank.figure(runs))
        rates = [case.amount / figure["median"] for figure in figures]
        cases.append({"name": case.name, "unit": case.unit, "seconds": figures, "rates": rates})
        rank.progress(place + 1, len(builders))
    return {"cases": cases, "states": [before, rank.states()]}


def gpu_cases() -> list[Callable[[], Case]]:
    """Large enough for kernel launches not to matter; training computes in bf16."""
    cuda = torch.device("cuda", torch.cuda.current_device())
    return [
        lambda: product(8192, torch.bfloat16, cuda),
        lambda: product(4096, torch.float32, cuda),
        lambda: copy("copy on the device, bytes read and written", GIB, cuda, cuda),
        lambda: copy("copy from pinned host memory", GIB // 4, torch.device("cpu"), cuda),
        lambda: copy("copy to pinned host memory", GIB // 4, cuda, torch.device("cpu")),
    ]


def cpu_cases() -> list[Callable[[], Case]]:
    """One thread per rank, as in training with several ranks."""
    cpu = torch.device("cpu")
    return [
        lambda: product(512, torch.float32, cpu),
        lambda: product(512, torch.bfloat16, cpu),
        lambda: copy("copy in memory, bytes read and written", GIB // 16, cpu, cpu),
    ]


def product(size: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Multiply two random size x size matrices: 2 size^3 operations. (Zeros would draw less power.)"""
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty_like(one)
    name = f"matrix product {size}^3, {str(dtype).removeprefix('torch.')}"
    return Case(name, lambda: torch.mm(one, other, out=result), 2 * size**3 / 1e12, "TFLOP/s")


def copy(name: str, size: int, source: torch.device, target: torch.device) -> Case:
    """Copy `size` bytes. On one device each byte counts twice, read and written; between two devices, once."""
    crosses = source != target
    one = torch.zeros(size, dtype=torch.uint8, device=source, pin_memory=crosses and source.type == "cpu")
    other = torch.zeros(size, dtype=torch.uint8, device=target, pin_memory=crosses and target.type == "cpu")
    amount = size * (1 if crosses else 2) / 1e9
    return Case(name, lambda: other.copy_(one, non_blocking=True), amount, "GB/s")


if __name__ == "__main__":
    raise SystemExit(rank.run_rank(measure))
