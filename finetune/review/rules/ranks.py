"""What several ranks lose to each other: communication, efficiency, uneven memory, throttled GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from finetune.review.events import finite_median
from finetune.review.finding import Explanation, Finding, confidence, duration, micro_batch, number, percent
from finetune.review.rules import straggler, timing
from finetune.review.run import Run

COMMUNICATION = 0.10  # of the step, exposed
ALONE = 0.05  # of the step, on the rank that waits for no other; calibrated
CHEAPER = 0.30  # above it a second GPU costs more than it brings
EFFICIENCY = 0.70  # of N times one GPU
UNEVEN = 0.05
UNEVEN_GIB = 0.25  # less is one large row
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
    unknown = " Ranks were not recorded: waiting for a slower rank may be in it."
    if least is not None:
        unknown = f" {percent(least)} remain on the rank that waits for no other."
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
        f"{run.world_size} ranks (threshold {percent(COMMUNICATION)}); no rank is behind.{one}{unknown}",
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
    costs = [_gpu_hours(one), _gpu_hours(run)]
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


def scaling(run: Run, others: Sequence[Run]) -> tuple[Run, float, float] | None:
    """The one-GPU run to compare with, efficiency and speed-up; None if there is none."""
    world = run.world_size
    if world is None or world < 2:
        return None
    for one in others:
        if one.world_size != 1 or one.hardware != run.hardware or not _same_job(one, run):
            continue
        for name in ("rows_per_second", "tokens_total", "tokens_per_gpu"):
            mine, single = run.typical(name), one.typical(name)
            if mine and single and single > 0:
                speed_up = mine / single * (world if name == "tokens_per_gpu" else 1)
                return one, speed_up / world, speed_up
    return None


def _same_job(one: Run, other: Run) -> bool:
    keys = ("config.model", "config.lora", "config.data.max_length", "config.data.packing", "data_fingerprint")
    return all(one.at(key) == other.at(key) for key in keys) and not one.foreign


def _gpu_hours(run: Run) -> float | None:
    rate = run.typical("tokens_per_gpu")
    return 1e6 / rate / 3600 if rate and rate > 0 else None


def memory_uneven(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """Peak memory of the ranks differs by more than 5 %. House rule: the plan levels ranks within 2 %. GPUs alone: the
    memory of a CPU process is mostly libraries."""
    found = _peaks(run)
    if found is None or run.ranks is None:
        return None
    rank, most, usual = found
    excess = most - usual
    if usual <= 0 or excess / usual <= UNEVEN or excess < UNEVEN_GIB:
        return None
    about = run.ranks.about[rank]
    where = f" -i {about['gpu']}" if about["gpu"] is not None else ""
    tokens = run.ranks.column("tokens")
    rows = ""
    if np.isfinite(tokens).all() and tokens.any():
        rows = f" Its share of the tokens is {np.median(tokens[:, rank] / tokens.mean(axis=1)):.2f} of an even one."
    return Finding(
        rule="memory-uneven",
        level="note",
        headline=f"{run.ranks.names(rank)} needs more memory than the others",
        figures=(f"{most:.2f} GiB", f"{usual:.2f} GiB on the others"),
        evidence=f"Peak memory of {run.ranks.names(rank)} is {percent(excess / usual)} above the others' "
        f"{usual:.2f} GiB (threshold {percent(UNEVEN)}).{rows}{_company(run, rank)}",
        advice=f"run `nvidia-smi{where}` on {run.ranks.host(rank)} to see who else is on this GPU; "
        "data.packing: true levels the rows",
        gain=f"up to {excess:.2f} GiB per GPU for a larger micro-batch",
        confidence=confidence(excess / usual, UNEVEN, len(run.ranks.steps)),
        charts=("peak_of_rank",),
    )


def _company(run: Run, rank: int) -> str:
    """How many other processes compute on the GPU of a rank, as a sentence."""
    if run.ranks is None:
        return ""
    known = finite_median(run.ranks.column("gpu_other_processes")[:, rank])
    return "" if known is None else f" Other processes on its GPU: {known:.0f}."


def unevenness(run: Run) -> float | None:
    """Peak memory of the fullest rank above the median of the others, as a share of it; GPUs alone."""
    found = _peaks(run)
    return found[1] / found[2] - 1 if found is not None and found[2] > 0 else None


def _peaks(run: Run) -> tuple[int, float, float] | None:
    """Column of the rank with the highest peak, that peak, and the median of the others' peaks in GiB."""
    if run.ranks is None or not run.on_gpus or run.ranks.world_size < 2:
        return None
    peaks = run.ranks.column("peak_gib")
    if not np.isfinite(peaks).any(axis=0).all():
        return None
    most = np.nanmax(peaks, axis=0)
    rank = int(most.argmax())
    return rank, float(most[rank]), float(np.median(np.delete(most, rank)))


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
    return np.array([_mean(column) for column in values.T])


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else np.nan


EXPLANATIONS = {
    "communication": Explanation(
        question="Do the ranks spend their time exchanging gradients?",
        sees="Two GPUs are much slower than twice one, and the bars of all ranks have a long part `communication`.",
        means="With several GPUs, each computes the gradients of its own rows, and then all gradients are added up "
        "over the connection between them. Most of that happens while the backward pass still computes, and costs "
        "nothing. What remains is exposed communication: data travels and nobody computes.",
        measured="Exposed communication as a share of the step, by DDP's own clock in one step per record. Reported "
        f"from {percent(COMMUNICATION)} on, if no rank is behind and the rank that waits for nobody still has "
        f"{percent(ALONE)}. From {percent(CHEAPER)} on, one GPU is likely cheaper.",
        example="Gradients travel while nothing is computed for 25 % of the step of 45.1 ms on 2 ranks (threshold "
        "10 %); no rank is behind. 15 % remain on the rank that waits for no other.",
        source="tests/review/fixtures/communication, two CPU ranks",
        remedy="More work per exchange: a larger training.per_device_train_batch_size or global_batch_size. LoRA "
        "exchanges far fewer gradients than full fine-tuning. `finetune doctor` shows whether the GPUs are connected "
        "directly (NVLink, peer access), `finetune advise` measures how many are worth it.",
        brings="At most the exposed share of the step; about half of it with twice the work per step.",
    ),
    "efficiency": Explanation(
        question="Is a second GPU worth it?",
        sees="A run on several GPUs is reviewed together with a run of the same job on one GPU.",
        means="Two GPUs cost twice as much per hour. If they are 1.3 times as fast, each row costs 1.5 times as much "
        "as on one.",
        measured="Rows per second, divided by those of the one-GPU run of the same model, rows and hardware and by the "
        f"number of GPUs. Reported below {percent(EFFICIENCY)}, the limit of the published dual-GPU study.",
        example="Two GPUs reach 0.79 times the throughput of one, an efficiency of 39 %: a classifier of 258,000 "
        "parameters with 16 rows per step, whose step of 1.7 ms is too short to share",
        source="two H200s, benchmarks/results/2026-11-22-study-h200.json",
        remedy="Use one GPU (training.strategy: auto chooses), or give each GPU more work per step. The finding about "
        "communication, the slowest rank or the host says what limits it.",
        brings="On one GPU the same result at a lower cost; the finding has both figures.",
    ),
    "memory-uneven": Explanation(
        question="Does one GPU need more memory than the others?",
        sees="One GPU decides which micro-batch fits, while the others have room.",
        means="Ranks get rows of about equal cost, so their peaks should be equal. If one is higher, it got longer "
        "rows, or something else uses its GPU.",
        measured=f"How far the highest peak is above the median of the others': reported above {percent(UNEVEN)} and "
        f"{UNEVEN_GIB} GiB, on GPUs alone.",
        example="No recorded run of this project meets it: two H200s with packed rows peaked at 4.01 and 4.05 GiB, "
        "0.8 % apart",
        source="tests/review/fixtures/h200-slow-rank, two H200s",
        remedy="`nvidia-smi` shows other processes on that GPU. data.packing: true makes rows equally long.",
        brings="Room for a larger micro-batch on all GPUs: the difference between the peaks.",
    ),
    "throttling": Explanation(
        question="Does heat or a fault slow a GPU down?",
        sees="The same run is slower than yesterday, or one GPU is slower than its neighbors.",
        means="A GPU lowers its clock when it becomes too hot or the board asks for it, and computes more slowly by "
        "the same ratio. The power cap does not count: it governs every GPU under full load.",
        measured=f"NVML names such a reason in at least {percent(THROTTLED)} of the samples (one every 5 s), or the SM "
        f"clock is below {percent(CLOCK)} of the others'.",
        example="No recorded run of this project meets it. The closest: a slowed rank's clock was 1,665 MHz against "
        "1,890 MHz on the other, 88 %, under the power cap alone",
        source="two H200s, benchmarks/results/2026-11-23-dashboard-h200.json",
        remedy="`nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE` on that host names the reason. Check cooling and the "
        "power limit, or use another GPU.",
        brings="Up to the ratio of the clocks.",
    ),
}
