"""A rank of a benchmark: set up the device, time steps, and write the result on rank 0."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from finetune.bench.launch import MARK, REQUEST, RESULT
from finetune.measure.protocol import Summary, summarize
from finetune.runtime.clock import Clock
from finetune.runtime.command import DONE, run_guarded
from finetune.runtime.files import write_json
from finetune.runtime.machine import hardware
from finetune.runtime.ranks import distributed, process_group
from finetune.runtime.types import JsonObject

Request = JsonObject


def run_rank(measure: Callable[[Request], object]) -> int:
    """The `main` of a rank started by `launch.ranks`: run `measure(request)`; rank 0 writes its result."""
    return run_guarded(lambda: _run_rank(Path(sys.argv[1]), measure))


def _run_rank(folder: Path, measure: Callable[[Request], object]) -> int:
    request = json.loads((folder / REQUEST).read_text())
    choose_device()
    process_group.start(cpu=not on_gpu(), timeout_seconds=request["timeout_seconds"], timeout_setting=None)
    result = measure(request)
    if distributed.ranks().is_main:
        write_json(folder / RESULT, result)
    process_group.finish()
    return DONE


def choose_device() -> Any:
    """This rank's device: its own GPU, or the CPU."""
    import torch

    if not on_gpu():
        torch.set_num_threads(1)  # ranks share the cores
        return torch.device("cpu")
    torch.cuda.set_device(distributed.ranks().local_rank)
    return torch.device("cuda", torch.cuda.current_device())


def on_gpu() -> bool:
    """Whether this benchmark runs on GPUs."""
    import torch

    return torch.cuda.is_available()


def progress(done: int, total: int) -> None:
    """Report progress to the process that started the ranks."""
    if distributed.ranks().is_main:
        sys.stdout.write(f"{MARK}{done} {total}\n")
        sys.stdout.flush()


def barrier() -> None:
    """Synchronize with this rank's device and with the other ranks, so that all start the next part together."""
    if on_gpu():
        import torch

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


def figure(runs: Sequence[Sequence[float]]) -> JsonObject:
    """`protocol.summarize` for JSON."""
    found: Summary = summarize(runs)
    return found.to_dict()


def states() -> list[JsonObject | None]:
    """Current clocks, temperature and power of every rank's GPU, in rank order; None for ranks on a CPU."""
    return distributed.gather_objects(hardware.gpu_state())
