"""One rank of `benchmarks.dashboard_gpu`: a training run with something planted in it or measured about it.

    python -m torch.distributed.run --nproc_per_node 2 -m benchmarks.dashboard_rank KIND RESULT.json ARGUMENTS...

KIND: cost (everything that the dashboard measures on and off, in alternating windows of one run), trace (phases and
communication against torch's profiler), slow (rank 1 computes more), ballast (memory filled almost to the end), plain.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

WINDOW, WINDOWS = 40, 16  # steps of a window; windows, half of them with everything on
TRACED = 8


def main() -> int:
    """Train with the arguments of `finetune.train`. Returns its exit code."""
    from finetune import train
    from finetune.config import load
    from finetune.runtime.hooks import Hooks

    kind, result, *arguments = sys.argv[1:]
    config = load(arguments, command="train")
    plant = {"cost": Cost, "trace": Trace, "slow": slow, "ballast": ballast, "plain": lambda *a: None}[kind]
    return train.run(config, hooks=Hooks(trainer=lambda trainer: plant(trainer, Path(result)) and None))


def Cost(trainer: Any, result: Path) -> None:  # noqa: N802 - a factory
    """Alternate windows with and without timers, records, DDP's measurements and GPU samples, in one run."""
    import torch
    from transformers import TrainerCallback

    from finetune.runtime import distributed, gpu_sampler

    logger = next(one for one in trainer.callback_handler.callbacks if type(one).__name__ == "RunLogger")
    every = trainer.args.logging_steps

    class Alternate(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: dict[bool, list[float]] = {True: [], False: []}
            self.began = 0.0
            self.on = True
            self.records: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % WINDOW == 4:  # a window's first steps are not measured
                torch.cuda.synchronize()
                self.began = time.perf_counter()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step and state.global_step % WINDOW == 0:
                self.switch(state)

        def switch(self, state: Any) -> None:
            torch.cuda.synchronize()
            self.seconds[self.on].append((time.perf_counter() - self.began) / (WINDOW - 4))
            self.on = not self.on
            state.logging_steps = every if self.on else 10**9
            timer = logger.monitor._timer
            timer.on = self.on
            if hasattr(trainer.model_wrapped, "_set_ddp_runtime_logging_sample_rate"):
                trainer.model_wrapped._set_ddp_runtime_logging_sample_rate(every if self.on else 10**9)
            if logger.monitor._sampler is not None:
                logger.monitor._sampler.close()
                logger.monitor._sampler = gpu_sampler.start(distributed.ranks().local_world_size) if self.on else None
            if self.on:
                timer.start()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pairs = list(zip(self.seconds[True][1:], self.seconds[False][1:], strict=False))
            ratios = [on / off for on, off in pairs]
            content = {
                "on_seconds": self.seconds[True], "off_seconds": self.seconds[False], "ratio_median": median(ratios),
                "ratios": ratios, "records_ms": [1e3 * one for one in RECORDS],
            }  # fmt: skip
            if distributed.ranks().is_main:
                result.write_text(json.dumps(content, indent=1))

    written = type(logger).on_log

    def timed_on_log(self: Any, *arguments: Any, **keywords: Any) -> Any:
        torch.cuda.synchronize()
        began = time.perf_counter()
        written(self, *arguments, **keywords)
        RECORDS.append(time.perf_counter() - began)

    type(logger).on_log = timed_on_log
    trainer.add_callback(Alternate())


RECORDS: list[float] = []  # seconds that a record took the host after the device had finished


def Trace(trainer: Any, result: Path) -> None:  # noqa: N802 - a factory
    """Trace a few steps, and compare phases by CUDA events with kernels by CUPTI, as host ranges launched them."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function
    from transformers import TrainerCallback

    from finetune.engine.phases import split
    from finetune.runtime import communication, distributed

    logger = next(one for one in trainer.callback_handler.callbacks if type(one).__name__ == "RunLogger")
    first = 30

    def ranged(name: str, function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with record_function(f"phase:{name}"):
                return function(*arguments, **keywords)

        return call

    # Inside the timer's own wrappers, so that an event follows each range.
    trainer.training_step = ranged("step", trainer.training_step)
    trainer.compute_loss = ranged("forward", trainer.compute_loss)
    trainer.accelerator.backward = ranged("backward", trainer.accelerator.backward)
    clip = trainer.accelerator.clip_grad_norm_
    trainer.accelerator.clip_grad_norm_ = ranged("clip", clip)

    class Traced(TrainerCallback):
        profiler: Any = None
        exposed: list[float] = []  # noqa: RUF012

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == first:
                if distributed.ranks().world_size > 1:
                    trainer.model_wrapped._set_ddp_runtime_logging_sample_rate(1)
                torch.cuda.synchronize()
                logger.monitor._timer.start()
                self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
                self.profiler.start()
            elif first < state.global_step <= first + TRACED:
                found = communication.exposed_and_hidden(trainer.model_wrapped)
                self.exposed += [found[0]] if found and state.global_step > first + 1 else []
                if state.global_step == first + TRACED:
                    torch.cuda.synchronize()
                    self.profiler.stop()
                    intervals = split(logger.monitor._timer._clock.drain())
                    self.write(intervals)

        def write(self, steps: list[dict[str, list[float]]]) -> None:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "trace.json")
                self.profiler.export_chrome_trace(str(file))
                events = json.loads(file.read_text())["traceEvents"]
            from_trace = phases_of_trace(events)
            ours = {name: fmean(sum(step[name]) for step in steps) for name in ("forward", "backward", "optimizer")}
            split_found = communication.split_of_kernels(self.profiler.events(), TRACED)
            content = {"phases": ours, "phases_of_trace": from_trace, "kernels": split_found, "steps": len(steps)}
            content["exposed_by_ddp"] = fmean(self.exposed) if self.exposed else None
            everyone = distributed.gather_objects(content)
            if distributed.ranks().is_main:
                result.write_text(json.dumps(everyone, indent=1))

    trainer.add_callback(Traced())


def phases_of_trace(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds per step from the end of the kernels launched in one host range to the end of those in the next.

    A kernel belongs to the range in which the host launched it, on any thread (backward has threads of its own).
    """
    launches = {e["args"]["correlation"]: e["ts"] for e in events
                if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})}  # fmt: skip
    kernels = [(launches[e["args"]["correlation"]], e["ts"], e["ts"] + e["dur"]) for e in events
               if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
               and e["args"].get("correlation") in launches]  # fmt: skip
    marked = [e for e in events if e.get("cat") == "user_annotation"]
    marked = [e for e in marked if e["name"] in ("phase:forward", "phase:backward")]
    ranges = sorted((e["ts"], e["ts"] + e["dur"], e["name"].removeprefix("phase:")) for e in marked)
    sums: dict[str, float] = {"forward": 0.0, "backward": 0.0}
    boundary = None
    for index, (begin, end, name) in enumerate(ranges):
        own = [stop for launch, _, stop in kernels if begin <= launch <= end]
        if not own:
            continue
        if boundary is None or (name == "forward" and (index == 0 or ranges[index - 1][2] == "backward")):
            # A step's first forward begins with its first kernel, not at the end of the step before.
            boundary = min(start for launch, start, _ in kernels if begin <= launch <= end)
        sums[name] += max(own) - boundary
        boundary = max(own)
    return {name: value / TRACED / 1e6 for name, value in sums.items()}


def slow(trainer: Any, result: Path) -> None:
    """Rank 1 computes a fifth more in each forward pass."""
    import torch

    from finetune.runtime import distributed

    if distributed.ranks().rank != 1:
        return
    healthy = trainer.compute_loss
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def compute_loss(*arguments: Any, **keywords: Any) -> Any:
        for _ in range(300):
            torch.mm(left, left)
        return healthy(*arguments, **keywords)

    trainer.compute_loss = compute_loss


def ballast(trainer: Any, result: Path) -> None:
    """Fill the GPU to 94 % before training begins."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    trainer.ballast = torch.empty(
        int(0.94 * total) - torch.cuda.memory_reserved() - 3 * 2**30, dtype=torch.uint8, device="cuda"
    )


if __name__ == "__main__":
    sys.exit(main())
