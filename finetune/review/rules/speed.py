"""What slows a step down on any number of ranks: rows, padding, the host, small batches, evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from finetune.review.events import finite_median
from finetune.review.finding import Finding, confidence, micro_batch, number, percent
from finetune.review.rules import memory, ranks, straggler, timing
from finetune.review.run import Run
from finetune.review.values import count, mapping, sequence
from finetune.review.values import number as value_of
from finetune.runtime.types import JsonObject
from finetune.text import counted, duration

DATA_WAIT = 0.10  # of the step; calibrated
PADDING = 0.20  # of the positions
HOST_LEAD = 0.05  # of a step; calibrated on an H200
UTILIZATION = 0.80
ROOM = 0.50  # of the fullest GPU's memory
BEST = 0.70  # of the throughput of the best micro-batch
SAFE_MEMORY = 0.80  # share of the memory that a larger micro-batch may fill: margin of the dual-GPU study
EVALUATION = 0.20  # of the wall time; calibrated
RARER = 4  # times, but once in the run at least: what is advised
LEAST_SECONDS = 10.0  # of evaluation and saving in all: less is not worth a change. House rule
REPEATED = 2  # evaluations or checkpoints while it trains; a single one cannot be made rarer


def data_wait(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """Most ranks wait for rows for at least 10 % of the step. Calibrated against healthy runs."""
    share, step = timing.data_wait(run), run.step_seconds
    if share is None or not step or share < timing.limit(run, DATA_WAIT):
        return None
    workers = count(run.at("config.training.extra.dataloader_num_workers")) or 0
    return Finding(
        rule="data-wait",
        headline="The loader limits the run: GPUs wait for rows" if run.on_gpus else "The loader limits the run",
        figures=(f"data wait {duration(share * step)} per step", f"{percent(share)} of the step"),
        evidence=f"A step of {duration(step)} waits {duration(share * step)} for its rows: {percent(share)} "
        f"(threshold {percent(DATA_WAIT)}), with {workers} loader processes.",
        advice=f"training.dataloader_num_workers: {max(2 * workers, 4)}; `finetune prepare` tokenizes beforehand",
        gain=f"step {duration(step)} -> {duration(step * (1 - share))} ({percent(-share)})",
        lost=share,
        confidence=confidence(share, DATA_WAIT, timing.records_of(run)),
        charts=("data_wait", "step_seconds"),
    )


def padding(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """At least 20 % of the computed positions are padding. Source: own record, 88,900 tokens/s packed against 49,300
    padded."""
    share = run.typical("padding")
    if share is None or not PADDING <= share < 1:
        return None
    advice = "data.packing: true"
    if run.at("config.data.packing") is True:
        longer = 2 * (run.number("config.data.pack_length") or run.number("config.data.max_length") or 1024)
        advice = f"data.pack_length: {longer:.0f}, as documents fit longer packs better"
    return Finding(
        rule="padding",
        headline="Padding takes a large part of the computation",
        figures=(f"padding {percent(share)} of the positions", f"threshold {percent(PADDING)}"),
        evidence=f"{percent(share)} of the positions that were computed hold no token (threshold {percent(PADDING)}).",
        advice=advice,
        gain=f"up to {1 / (1 - share):.2f} times the tokens/s",
        lost=share,
        confidence=confidence(share, PADDING, 10),
        charts=("padding", "tokens_per_gpu"),
    )


def host_lead(run: Run) -> float | None:
    """How far the host is ahead of the GPU at a record, by the step: median over records and ranks."""
    if run.ranks is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return finite_median(run.ranks.column("wait") / run.ranks.column("step"))


def utilization(run: Run) -> float | None:
    """Median share of the time in which a kernel ran, over records and GPUs."""
    return finite_median(run.ranks.column("gpu_utilization")) if run.ranks is not None else None


def without_graphs(run: Run) -> str | None:
    """Why a run did not replay its passes as CUDA graphs; None if it did, or this is not recorded."""
    return run.text("cuda_graphs.reason") if run.at("cuda_graphs.used") is False else None


def host_bound(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """On a GPU the host is less than 5 % of a step ahead and the GPU is busy less than 80 % of the time; neither data
    nor communication explains it. Calibrated on an H200. Exposed communication is taken off both: a
    kernel that waits for another rank has no work."""
    exposed, step = timing.exposed_communication(run) or 0.0, run.step_seconds
    lead, busy = (None if one is None else max(one - exposed, 0.0) for one in (host_lead(run), utilization(run)))
    if not run.on_gpus or lead is None or busy is None or not step or lead >= HOST_LEAD or busy >= UTILIZATION:
        return None
    if timing.records_of(run) < timing.FEW:
        return None
    if any(rule(run) is not None for rule in (data_wait, ranks.communication, straggler.check)):
        return None
    batch = run.number("batch.per_device")
    larger = micro_batch(2 * batch, batch) if batch else "a larger micro-batch"
    graphs = f"CUDA graphs were not used ({without}); " if (without := without_graphs(run)) else ""
    return Finding(
        rule="host-bound",
        headline="The host limits the run: it launches kernels no faster than the GPU runs them",
        figures=(f"host lead {percent(lead)} of a step", f"GPU utilization {percent(busy)}"),
        evidence=f"At log steps the host waits {percent(lead)} of a step of {duration(step)} for the GPU (threshold "
        f"{percent(HOST_LEAD)}), and a kernel runs {percent(busy)} of the time (threshold {percent(UTILIZATION)}).",
        advice=f"{graphs}{larger}; training.torch_compile: true launches fewer kernels; `logging.profile_steps: 3` "
        "shows them",
        gain=f"up to {1 / max(busy, 0.01):.1f} times the speed, bounded by the GPU time of a profile",
        lost=1 - busy,
        confidence=confidence(HOST_LEAD / max(lead, 1e-6), 1.0, timing.records_of(run)),
        charts=("gpu_utilization", "step_seconds", "forward", "backward"),
    )


def best_micro_batch(run: Run) -> tuple[int, float] | None:
    """Size and tokens/s of the fastest micro-batch that a search measured, if run.json has one."""
    tried = [mapping(one) for one in sequence(run.at("micro_batch_search.attempts"))[:100]]
    speeds = [(value_of(one.get("tokens_per_second")), count(one.get("per_device"))) for one in tried]
    known = [(speed, size) for speed, size in speeds if speed and size]
    return (max(known)[1], max(known)[0]) if known else None


def small_batch(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """Half of the fullest GPU's memory is free, and MFU is below 70 % of that of the best micro-batch of a dry run,
    where one was measured: of the same model, the ratio of MFU is that of tokens/s. The advice fills 80 % of the
    memory, the margin of the dual-GPU study."""
    best, full, speed = best_micro_batch(run), memory.fullest(run), run.typical("tokens_per_gpu")
    if best is None or full is None or not speed or full > ROOM or speed >= BEST * best[1]:
        return None
    size = count(run.at("batch.per_device"))
    if size is None or best[0] <= size:
        return None
    fits = max(int(size * SAFE_MEMORY / max(full, 0.01)), size + 1)
    return Finding(
        rule="small-batch",
        level="note",
        headline="The micro-batch is too small for this GPU",
        figures=(
            f"{percent(full)} of the memory in use",
            f"{percent(speed / best[1])} of the best micro-batch's speed",
        ),
        evidence=f"With {counted(size, 'row')} per forward pass the fullest GPU uses {percent(full)} of its memory "
        f"(threshold {percent(ROOM)}) at {number(speed)} tokens/s per GPU; the search measured {number(best[1])} with "
        f"{counted(best[0], 'row')}.",
        advice=f"{micro_batch(min(best[0], fits), size)}, with the same global batch and result",
        gain=f"up to {best[1] / speed:.2f} times the tokens/s",
        lost=1 - speed / best[1],
        confidence="medium",
        charts=("fullest", "mfu"),
    )


def evaluation_share(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """Repeated evaluation and saving take at least 20 % of the wall time of training, and 10 s. Calibrated."""
    share, (spent, whole) = timing.evaluation_share(run), timing.evaluation_seconds(run)
    if share is None or spent is None or share < EVALUATION or spent < LEAST_SECONDS or timing.pauses(run) < REPEATED:
        return None
    start = timing.session_start(run)
    session = f" Counted since step {start}, where the run was resumed." if start else ""
    if (rarer := _rarer(run, share, whole)) is None:
        return None
    advice, gain = rarer
    return Finding(
        rule="evaluation-share",
        headline="Evaluation and saving take a large part of the time",
        figures=(f"{duration(spent)} of {duration(whole)}", f"{percent(share)} of the time"),
        evidence=f"Evaluation and saving take {duration(spent)} of {duration(whole)}: {percent(share)} "
        f"(threshold {percent(EVALUATION)}), in {timing.pauses(run)} pauses.{session}",
        advice=advice,
        gain=gain,
        lost=share,
        confidence=confidence(share, EVALUATION, 5),
        charts=("evaluation_and_saving",),
    )


def _rarer(run: Run, share: float, whole: float) -> tuple[str, str] | None:
    """The setting that makes the longer of evaluation and saving rarer, and what that saves of the wall time; None if
    it happens once.

    Args:
        share: of the wall time that both take.
        whole: wall time in seconds.
    """
    parts: JsonObject = {name: run.number(f"{name}_seconds") for name in ("evaluation", "saving")}
    if run.ranks is not None and None in parts.values():
        parts = {"evaluation": float(run.ranks.evaluation.sum()), "saving": float(run.ranks.saving.sum())}
    name = "saving" if (parts["saving"] or 0) > (parts["evaluation"] or 0) else "evaluation"
    key = {"saving": "save_steps", "evaluation": "eval_steps"}[name]
    fewer_rows = "" if name == "saving" else ", or fewer rows in data.eval_file"
    part = share if parts[name] is None or not whole else parts[name] / whole
    every = count(run.at(f"config.training.{key}"))
    if not every:
        return f"a larger training.{key}{fewer_rows}", f"half as often: {percent(-part / 2)} wall time"
    rarer = min(RARER * every, run.steps or RARER * every)
    if rarer <= every:
        return None
    gain = f"every {rarer} steps instead of every {every}: {percent(-part * (1 - every / rarer))} wall time"
    return f"training.{key}: {rarer}{fewer_rows}", gain
