"""What several ranks lose to each other: communication, efficiency, throttled GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from finetune.review.events import finite_median
from finetune.review.finding import Finding, confidence, micro_batch, number, percent
from finetune.review.rules import straggler, timing
from finetune.review.run import Run
from finetune.text import duration

COMMUNICATION = 0.10  # of the step, exposed
ALONE = 0.05  # of the step, on the rank that waits for no other; calibrated
CHEAPER = 0.30  # above it a second GPU costs more than it brings
EFFICIENCY = 0.70  # of N times one GPU
THROTTLED = 0.10  # of samples
CLOCK = 0.85  # of the others' median clock


def communication(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """Exposed communication is at least 10 % of the step without a straggler. From 30 % on one GPU is likely cheaper:
    the published dual-GPU study asks for an efficiency of 70 % to justify a second GPU. Ranks that are late by turns,
    as on a busy machine, wait for each other as well: at least 5 % (calibrated) must remain on the last one."""
    share, least, step = timing.exposed_communication(run), timing.least_communication(run), run.step_seconds
    limit = timing.limit(run, COMMUNICATION, "communication")
    if share is None or not step or share < limit or straggler.slowest(run) is not None:
        return None
    if least is not None and least < ALONE:
        return None
    records = timing.records_of(run, "communication")
    one = " One GPU is likely cheaper." if share >= CHEAPER else ""
    alone = "" if least is None else f" {percent(least)} remain on the rank that waits for no other."
    batch, shared = run.number("batch.per_device"), run.context_parallel
    larger = micro_batch(2 * batch, batch) if batch else "a larger micro-batch"
    advice = f"{larger}, or a larger training.global_batch_size; `finetune advise` measures what is worth it"
    what, gain = (
        "Gradients travel",
        f"a step at most {percent(share)} shorter; half of that with twice the work per step",
    )
    if shared > 1:  # exchanges grow with the work
        what = "Shared rows and gradients travel"
        advice = (
            f"a smaller training.context_parallel than {shared}, if the longest row fits: `finetune dryrun --longest`"
        )
        gain = f"a step at most {percent(share)} shorter; with whole rows on each GPU, only gradients travel"
    return Finding(
        rule="communication",
        headline="Communication between the ranks limits the run",
        figures=(f"exposed communication {duration(share * step)} per step", f"{percent(share)} of the step"),
        evidence=f"{what} while nothing is computed for {percent(share)} of the step of {duration(step)} on "
        f"{run.world_size} ranks (threshold {percent(COMMUNICATION)}); no rank is behind.{one}{alone}",
        advice=f"{advice}, `finetune doctor` shows the links and NCCL settings",
        gain=gain + (", or the same run on one GPU at a lower cost" if one else ""),
        lost=share,
        confidence=confidence(share, COMMUNICATION, records),
        charts=("communication", "step_seconds"),
    )


def efficiency(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """Against a one-GPU run of the same model on the same hardware, each GPU brings less than 70 % of it: the
    published dual-GPU study's limit for a second GPU."""
    found = scaling(run, others)
    if found is None or found[1] >= EFFICIENCY:
        return None
    one, share, speed_up = found
    world = run.world_size or 1
    rates = [one.typical("tokens_per_gpu"), run.typical("tokens_per_gpu")]
    costs = [1e6 / rate / 3600 if rate and rate > 0 else None for rate in rates]
    cost = ""
    if costs[0] and costs[1]:
        cost = f" A million tokens cost {number(costs[0])} GPU hours on one GPU, {number(costs[1])} on {world}."
    return Finding(
        rule="efficiency",
        headline=f"{world} GPUs are little faster than one",
        figures=(f"{speed_up:.2f} times the throughput of `{one.name}`", f"efficiency {percent(share)}"),
        evidence=f"{world} ranks process {speed_up:.2f} times the rows of the one-GPU run `{one.name}`: "
        f"{percent(share)} of {world} times (threshold {percent(EFFICIENCY)}).{cost}",
        advice="set training.strategy: auto, which takes as many GPUs as are worth it"
        if run.context_parallel == 1
        else "set training.context_parallel: 1, as whole rows fit one GPU",
        gain=f"one GPU: {percent(1 - share)} lower cost at {percent(1 - 1 / speed_up)} lower throughput"
        if speed_up > 1
        else f"one GPU: {percent(1 - share)} lower cost, and faster",
        lost=1 - share,
        confidence="high",
        charts=("rows_per_second", "tokens_total"),
    )


_OF_THE_JOB = ("config.model", "config.lora", "config.data.max_length", "config.data.packing", "data_fingerprint")


def scaling(run: Run, others: Sequence[Run]) -> tuple[Run, float, float] | None:
    """The one-GPU run to compare with, efficiency and speed-up; None if there is none."""
    world = run.world_size
    if world is None or world < 2:
        return None
    for one in others:
        if one.world_size != 1 or one.hardware != run.hardware or one.foreign:
            continue
        if any(one.at(key) != run.at(key) for key in _OF_THE_JOB):
            continue
        for name in ("rows_per_second", "tokens_total", "tokens_per_gpu"):
            mine, single = run.typical(name), one.typical(name)
            if mine and single and single > 0:
                speed_up = mine / single * (world if name == "tokens_per_gpu" else 1)
                return one, speed_up / world, speed_up
    return None


def throttling(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """NVML names a reason that lowers the clock in at least 10 % of the samples of a GPU (its reasons: power, heat,
    board), or its SM clock is below 85 % of the others'."""
    if run.ranks is None:
        return None
    throttled = _per_rank(run.ranks.column("gpu_throttled"))
    clocks = _per_rank(run.ranks.column("gpu_sm_clock_mhz"))
    usual = np.array([finite_median(np.delete(clocks, rank)) for rank in range(len(clocks))], float)  # None is NaN
    with np.errstate(divide="ignore", invalid="ignore"):
        slow = clocks / usual
    bad = [rank for rank in range(len(clocks)) if throttled[rank] >= THROTTLED or slow[rank] < CLOCK]
    if not bad:
        return None
    rank = max(bad, key=lambda one: (np.nan_to_num(1 - slow[one]), np.nan_to_num(throttled[one])))
    share, about = float(np.nan_to_num(throttled[rank])), run.ranks.about[rank]
    reasons = run.ranks.throttle_reasons(rank) or "no reason recorded"
    clock = f"{clocks[rank]:.0f} MHz" if np.isfinite(clocks[rank]) else "clock not recorded"
    clock += f" against {usual[rank]:.0f} MHz on the others" if np.isfinite(usual[rank]) else ""
    more = f" {len(bad) - 1} more GPUs are throttled." if len(bad) > 1 else ""
    ratio = float(slow[rank]) if np.isfinite(slow[rank]) and slow[rank] < 1 else None
    return Finding(
        rule="throttling",
        headline=f"The GPU of {run.ranks.names(rank)} is throttled",
        figures=(f"in {percent(share)} of samples ({reasons})", f"SM clock {clock}"),
        evidence=f"{run.ranks.names(rank)}: throttled in {percent(share)} of samples (threshold {percent(THROTTLED)}), "
        f"{reasons}; SM clock {clock} (threshold {percent(CLOCK)} of the others').{more}",
        advice=f"run `nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE -i {about['gpu'] or 0}` on "
        f"{run.ranks.host(rank)}, and check cooling and power limit (`nvidia-smi -pl`)",
        gain=f"up to {1 / ratio:.2f} times the speed, the ratio of the clocks"
        if ratio
        else f"up to {percent(share)} of the time at full clock",
        lost=1 - ratio if ratio else 0.0,
        confidence=confidence(max(share / THROTTLED, 2.0 if ratio else 0.0), 1.0, len(run.ranks.steps)),
        charts=("gpu_throttled", "gpu_clock"),
    )


def _per_rank(values: np.ndarray) -> np.ndarray:
    """float64 [ranks]: mean over records; NaN if not recorded."""
    finite = [column[np.isfinite(column)] for column in values.T]
    return np.array([one.mean() if len(one) else np.nan for one in finite])
