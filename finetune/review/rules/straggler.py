"""One rank works longer than the others, which wait for it in every step.

Under DDP all ranks have the same step time: what differs is own work, the step without exposed communication.
NVIDIA's Resiliency Extension scores ranks in the same way, relative to the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from finetune.review.finding import Finding, confidence, percent
from finetune.review.ranks import Ranks
from finetune.review.rules import timing
from finetune.review.run import Run
from finetune.text import duration

THRESHOLD = 1.10  # own work by the median of the others'; calibrated on GPUs
THRESHOLD_CPU = 1.30  # processes that share the cores of a CPU vary more; calibrated
THRESHOLD_FEW = 2.0  # with fewer than FEW records chance is not ruled out
FEW = 3
BEHIND = 0.5  # of the threshold's excess, in 80 % of the records
LOST = 0.03  # share of the step that the others wait: less is not worth the search
EXPLAINED = 0.5  # share of the additional work that a cause must account for
EXPLAINED_BY_CLOCK = 0.8  # a GPU that computes more than the others also draws more power and lowers its clock
CLOCK_LOWER = 0.05  # below the others': a clock that explains less than the delay is named from here on
THROTTLED = 0.10  # samples more than on the others


def check(run: Run, others: Sequence[Run] = ()) -> Finding | None:
    """Own work of one rank is at least THRESHOLD times the median of the others, the same rank is behind by half of
    that in 80 % of the records, and at least 3 % of the step is lost to it. Calibrated against healthy runs."""
    found = slowest(run)
    if found is None or run.ranks is None:
        return None
    rank, ratio, own, usual, step = found
    lost = (own - usual) / step
    name = run.ranks.names(rank)
    cause, advice = _cause(run, run.ranks, rank, own - usual)
    records = len(timing.own_work_ratios(run))
    return Finding(
        rule="straggler",
        headline=f"{name} holds the others up",
        figures=(
            f"own work {duration(own)} per step against {duration(usual)} on the others",
            f"{percent(lost)} of each step lost",
        ),
        evidence=f"Own work of {name} is {ratio:.2f} times the median of the others (threshold "
        f"{threshold(run, records):.2f}), and it is behind in at least 80 % of {records} records. Cause: {cause}.",
        advice=advice,
        gain=f"step {duration(step)} -> about {duration(max(step - (own - usual), 0.0))} ({percent(-lost)})",
        lost=lost,
        confidence=confidence(ratio - 1, threshold(run, records) - 1, records),
        charts=("own_work_of_rank", "lost_to_slowest", "data_wait_of_rank"),
    )


def threshold(run: Run, records: int) -> float:
    """The ratio above which a rank is behind."""
    usual = THRESHOLD if run.on_gpus else THRESHOLD_CPU
    return max(usual, THRESHOLD_FEW) if records < FEW else usual


def value(run: Run) -> float | None:
    """What the threshold is compared with: the median ratio of the rank that is behind most consistently."""
    ratios = timing.own_work_ratios(run)
    return float(np.median(ratios[:, timing.consistent_ratio(ratios).argmax()])) if ratios.size else None


def slowest(run: Run) -> tuple[int, float, float, float, float] | None:
    """(column of the rank, ratio, own work, median of the others, step), all in seconds; None without a straggler."""
    ratios = timing.own_work_ratios(run)
    step = run.step_seconds
    if not ratios.size or not step:
        return None
    consistent, limit = timing.consistent_ratio(ratios), threshold(run, len(ratios))
    rank = int(consistent.argmax())
    ratio = float(np.median(ratios[:, rank]))
    own = np.nanmedian(run.phase("own_work"), axis=0)
    usual = float(np.median(np.delete(own, rank)))
    lost = (float(own[rank]) - usual) / step
    if ratio < limit or consistent[rank] < 1 + BEHIND * (limit - 1) or lost < LOST:
        return None
    return rank, ratio, float(own[rank]), usual, step


def _cause(run: Run, ranks: Ranks, rank: int, excess: float) -> tuple[str, str]:
    """Why the rank is behind, and what to change.

    Args:
        excess: its own work beyond the others', in seconds per step.
    """
    waits = run.phase("data_wait")
    if waits.ndim == 2 and waits.shape[1] > rank and waits.shape[1] > 1:
        mine, usual = _against(waits, rank)
        if mine - usual >= EXPLAINED * excess:
            return (
                f"its loader: it waits {duration(mine)} per step for rows, the others {duration(usual)}",
                "training.dataloader_num_workers: 4; check the disk and the CPU load of that host",
            )
    excess_share = excess / max(_against(run.phase("own_work"), rank)[1], 1e-9)
    return (
        _rows(ranks, rank, excess_share)
        or _clocks(ranks, rank, excess_share)
        or _process(ranks, rank)
        or _computation(run, ranks, rank, excess_share)
    )


def _rows(ranks: Ranks, rank: int, excess: float) -> tuple[str, str] | None:
    for name, what in (("tokens", "tokens"), ("squared_lengths", "attention (squared lengths)")):
        mine, usual = _against(ranks.column(name), rank)
        # Attention is a part of the work: only a large excess of it explains the whole.
        if usual > 0 and mine / usual - 1 >= (EXPLAINED if name == "tokens" else 1.0) * excess:
            return (
                f"its rows: {mine / usual:.2f} times the others' {what}",
                "set data.packing: true, which levels the ranks",
            )
    return None


def _clocks(ranks: Ranks, rank: int, excess: float) -> tuple[str, str] | None:
    about = ranks.about[rank]
    gpu = f" -i {about['gpu']}" if about["gpu"] is not None else ""
    advice = (
        f"run `nvidia-smi -q -d PERFORMANCE,CLOCK,POWER{gpu}` on {ranks.host(rank)}, and check cooling and power limit"
    )
    mine, usual = _against(ranks.column("gpu_sm_clock_mhz"), rank)
    if mine > 0 and usual / mine - 1 >= EXPLAINED_BY_CLOCK * excess:
        return f"its clocks: {mine:.0f} MHz, the others {usual:.0f} MHz", advice
    mine, usual = _against(ranks.column("gpu_throttled"), rank)
    if mine - usual >= THROTTLED:
        reasons = ranks.throttle_reasons(rank)
        return f"its clocks: throttled in {percent(mine)} of samples" + (f" ({reasons})" if reasons else ""), advice
    return None


def _process(ranks: Ranks, rank: int) -> tuple[str, str] | None:
    processes = ranks.column("gpu_other_processes")[:, rank]
    if not np.isfinite(processes).any() or np.nanmedian(processes) < 1:
        return None
    about = ranks.about[rank]
    host = f" on host {about['host']}" if about["host"] else ""
    return "another process computes on its GPU", f"find it with `nvidia-smi`{host} and end it, or take another GPU"


def _computation(run: Run, ranks: Ranks, rank: int, excess: float) -> tuple[str, str]:
    differences = {}
    for phase in ("forward", "backward", "optimizer", "other"):
        mine, usual = _against(run.phase(phase), rank)
        differences[phase] = mine - usual
    phase, most = max(differences.items(), key=lambda item: np.nan_to_num(item[1], nan=-np.inf))
    where = f", mostly in its {phase} phase (+{duration(most)})" if np.isfinite(most) and most > 0 else ""
    doctor = "run `finetune doctor` on that host, and check other processes, CPU load and the PCIe link"
    mine, usual = _against(ranks.column("gpu_sm_clock_mhz"), rank)
    if mine > 0 and mine <= (1 - CLOCK_LOWER) * usual:
        explained = min((usual / mine - 1) / excess, 1.0)
        return (
            f"its computation{where}. Its SM clock is {percent(1 - mine / usual)} lower ({mine:.0f} MHz, the others "
            f"{usual:.0f} MHz), which explains at most {percent(explained)} of the delay and may follow from more "
            "work; its rows and loader are like the others'",
            f"{doctor}; check cooling and power limit with `nvidia-smi -q -d PERFORMANCE,CLOCK,POWER`",
        )
    clocks = "rows, loader and clocks" if np.isfinite(mine) and np.isfinite(usual) else "rows and loader"
    return f"its computation{where}; why is unknown: its {clocks} are like the others'", doctor


def _against(values: np.ndarray, rank: int) -> tuple[float, float]:
    """Median over records of a rank, and of the median of the others; NaN if not recorded."""
    if values.ndim != 2 or values.shape[1] <= rank or not np.isfinite(values[:, rank]).any():
        return np.nan, np.nan
    others = np.delete(values, rank, axis=1)
    if not np.isfinite(others).any():
        return np.nan, np.nan
    each = [float(np.nanmedian(column)) for column in others.T if np.isfinite(column).any()]
    return float(np.nanmedian(values[:, rank])), float(np.median(each))
