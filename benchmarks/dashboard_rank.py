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
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.peers.rank import give_trainer_to

WINDOW, SKIPPED = 30, 10  # steps of a window, and how many of them, its first, are not measured
FIRST, TRACED = 32, 8  # the traced steps follow step FIRST, and are those of one record


def main() -> int:
    """Train with the arguments of `finetune.train`. Returns its exit code."""
    from finetune import train
    from finetune.config import load

    kind, result, *arguments = sys.argv[1:]
    config = load(arguments, command="train")
    plant = {"cost": Cost, "trace": Trace, "slow": slow, "ballast": ballast, "plain": lambda *a: None}[kind]
    give_trainer_to(lambda trainer: plant(trainer, Path(result)))
    return train.run(config)


def Cost(trainer: Any, result: Path) -> None:  # noqa: N802 - a factory
    """Windows with and without timers, records, DDP's measurements, GPU samples and the watch, in one run.

    In the order on, off, off, on, so that a drift of the machine falls on both. A measured window ends with a record,
    and has as many records as its share of all steps.
    """
    import torch
    from transformers import TrainerCallback

    from finetune.runtime.machine import gpu_sampler
    from finetune.runtime.ranks import activity, distributed, hang

    logger = next(one for one in trainer.callback_handler.callbacks if type(one).__name__ == "RunLogger")
    every = trainer.args.logging_steps
    enter, watch_round = activity.enter, hang.Watch.poll

    class Alternate(TrainerCallback):
        def __init__(self) -> None:
            self.windows: list[tuple[bool, float]] = []  # everything on?, seconds per step
            self.began = 0.0
            self.on = True

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step
            if step % WINDOW == SKIPPED:
                torch.cuda.synchronize()
                self.began = time.perf_counter()
            elif step and step % WINDOW == 0:
                torch.cuda.synchronize()
                self.windows.append((self.on, (time.perf_counter() - self.began) / (WINDOW - SKIPPED)))
                self.switch(state, on=len(self.windows) % 4 in (0, 3))

        def switch(self, state: Any, *, on: bool) -> None:
            if on == self.on:
                return
            self.on = on
            state.logging_steps = every if on else 10**9
            activity.enter = enter if on else lambda *arguments: None
            hang.Watch.poll = watch_round if on else lambda self: None
            if hasattr(trainer.model_wrapped, "_set_ddp_runtime_logging_sample_rate"):
                trainer.model_wrapped._set_ddp_runtime_logging_sample_rate(every if on else 10**9)
            if logger.monitor._sampler is not None:
                logger.monitor._sampler.close()
                logger.monitor._sampler = gpu_sampler.start(distributed.ranks().local_world_size) if on else None
            logger.monitor._timer.on = on
            if on:
                logger.monitor._timer.start()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            activity.enter, hang.Watch.poll = enter, watch_round
            # Fours of on, off, off, on; the first, which compiles and warms up, is left out.
            fours = [self.windows[at : at + 4] for at in range(4, len(self.windows) - 3, 4)]
            ratios = [(a + d) / (b + c) for (_, a), (_, b), (_, c), (_, d) in fours]
            spread = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
            content = {
                "windows": self.windows, "ratios": ratios, "ratio_mean": fmean(ratios), "ratio_median": median(ratios),
                "standard_error": spread, "records_ms": [1e3 * one for one in RECORDS],
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
    """Trace the steps of one record, and count its tokens and operations by hand.

    Compared: phases by CUDA events with kernels by CUPTI, as host ranges launched them; communication by DDP with
    NCCL's kernels; tokens/s and MFU of the record with the tokens that the model was given, the operations that PyTorch
    counts (attention by the lengths of the documents, as its counter does not read packed rows) and the time from the
    first kernel to the last.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import TrainerCallback

    from finetune.engine.monitoring.phases import split_steps
    from finetune.runtime import communication
    from finetune.runtime.ranks import distributed

    logger = next(one for one in trainer.callback_handler.callbacks if type(one).__name__ == "RunLogger")
    tokens: list[int] = []  # of each micro-batch
    squares: list[Any] = []  # sum over its documents of length squared

    def ranged(name: str, function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if name == "forward":
                inputs = arguments[1]
                mask = inputs.get("attention_mask")
                tokens.append(inputs["input_ids"].numel() if mask is None else mask)
                squares.append(inputs.get("position_ids"))
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
        content: dict[str, Any] = {}  # noqa: RUF012
        counter: Any = None
        timed: list[dict[str, list[float]]] = []  # noqa: RUF012
        counted: int = 0  # tokens of the traced steps

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == FIRST:
                if distributed.ranks().world_size > 1:
                    trainer.model_wrapped._set_ddp_runtime_logging_sample_rate(1)
                torch.cuda.synchronize()
                logger.monitor._timer.start()
                tokens.clear()
                self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
                self.profiler.start()
            elif state.global_step == FIRST + TRACED:
                tokens.clear()
                squares.clear()
                attention = [torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward]
                unread = {one: lambda *a, out_shape=None, **k: 0 for one in attention}
                self.counter = FlopCounterMode(display=False, custom_mapping=unread)
                self.counter.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if FIRST < state.global_step <= FIRST + TRACED:
                found = communication.exposed_and_hidden(trainer.model_wrapped)
                self.exposed += [found[0]] if found and state.global_step > FIRST + 1 else []
            if state.global_step == FIRST + TRACED:
                torch.cuda.synchronize()
                self.profiler.stop()
                # Left for the record, which drains the same clock right after this.
                clock = logger.monitor._timer._clock
                marks, free = list(clock._marks), list(clock._free)
                self.timed = split_steps(clock.drain())
                clock._marks, clock._free = marks, free
                self.counted = sum(int(one) if isinstance(one, int) else int(one.sum()) for one in tokens)
            elif state.global_step == FIRST + TRACED + 1:
                self.counter.__exit__(None, None, None)
                self.note(self.timed)
                self.write()

        def note(self, steps: list[dict[str, list[float]]]) -> None:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "trace.json")
                self.profiler.export_chrome_trace(str(file))
                events = json.loads(file.read_text())["traceEvents"]
            kernels = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
            span = (max(one["ts"] + one["dur"] for one in kernels) - min(one["ts"] for one in kernels)) / 1e6
            self.content = {
                "phases": {
                    name: fmean(sum(step[name]) for step in steps) for name in ("forward", "backward", "optimizer")
                },
                "phases_of_trace": phases_of_trace(events),
                "kernels": communication.kernel_communication(self.profiler.events(), TRACED),
                "exposed_by_trace": exposed_of_trace(events)[: TRACED - 1],
                "exposed_by_ddp": self.exposed,
                "tokens_by_hand": self.counted,
                "seconds_of_trace": span,
                "steps": len(steps),
            }

        def write(self) -> None:
            by_operator = self.counter.get_flop_counts().get("Global", {})
            in_step = sum(int(one) if isinstance(one, int) else int(one.sum()) for one in tokens)
            self.content["flops_per_token"] = {str(name): count / in_step for name, count in by_operator.items()}
            self.content["squared_lengths_per_token"] = sum(map(squared_lengths, squares)) / in_step
            self.content["peak_tflops"] = logger.hardware.peak_bf16_tflops
            everyone = distributed.gather_objects(self.content)
            if distributed.ranks().is_main:
                result.write_text(json.dumps(everyone, indent=1))

    trainer.add_callback(Traced())


def squared_lengths(position_ids: Any) -> int:
    """Sum over the documents of a pack of length squared; a document begins where the positions begin again at 0."""
    starts = (position_ids.flatten() == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], position_ids.numel()]
    return sum((end - start) ** 2 for start, end in zip(starts, ends, strict=True))


def launch_times(events: list[dict[str, Any]]) -> dict[int, float]:
    """When the host launched each kernel, in the trace's microseconds, by the kernel's correlation number."""
    calls = [one for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver")]
    return {one["args"]["correlation"]: one["ts"] for one in calls if "correlation" in one.get("args", {})}


def exposed_of_trace(events: list[dict[str, Any]]) -> list[float]:
    """Seconds of each step in which NCCL's kernels ran after the backward pass had computed its last gradient.

    As DDP defines it: what stands still in the middle of a backward pass is not counted.
    """
    launches = launch_times(events)
    kernels = [(launches.get(one["args"]["correlation"], -1), one["ts"], one["ts"] + one["dur"], one["name"])
               for one in events if one.get("cat") == "kernel"]  # fmt: skip
    ranges = [(one["ts"], one["ts"] + one["dur"]) for one in events
              if one.get("cat") == "user_annotation" and one["name"] == "phase:backward"]  # fmt: skip
    found = []
    for begin, end in sorted(ranges):
        inside = [one[1:] for one in kernels if begin <= one[0] <= end]
        reduced = [stop for _, stop, name in inside if name.startswith("nccl")]
        if reduced:
            # What starts after the reduction copies its result.
            computed = [stop for start, stop, name in inside if not name.startswith("nccl") and start < max(reduced)]
            found.append(max(0.0, max(reduced) - max(computed)) / 1e6)
    return found


def phases_of_trace(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds per step from the end of the kernels launched in one host range to the end of those in the next.

    A kernel belongs to the range in which the host launched it, on any thread (backward has threads of its own).
    """
    launches = launch_times(events)
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

    from finetune.runtime.ranks import distributed

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
