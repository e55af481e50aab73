"""From what one device takes, and what an all-reduce costs, to what N devices would take. Pure arithmetic.

The model of a data-parallel optimizer step, on the slowest rank:

    step = forward and backward of its micro-batches + data waits + exposed communication + optimizer + other

Only the last micro-batch of a step communicates (`no_sync` holds the others back; torch's "Distributed Data Parallel"
note), bucket by bucket while its backward runs. What is not modelled: a GPU that computes more slowly while it also
communicates, and ranks that share a CPU, its caches or its memory bandwidth.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MIB = 2**20
# torch.nn.parallel.DistributedDataParallel: `bucket_cap_mb` is 25 MiB where it is not given, and the first bucket then
# 1 MiB (`torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`), so that communication begins early.
BUCKET_BYTES = 25 * MIB
FIRST_BUCKET_BYTES = MIB


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a collective of one world size costs by message size.

    points: (bytes, seconds), at least one; sorted here, and made to rise: a larger message measured as faster is noise.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points or any(size <= 0 or seconds <= 0 for size, seconds in self.points):
            raise ValueError(f"a curve needs points of positive bytes and seconds; given: {self.points}")
        risen: list[tuple[float, float]] = []
        for size, seconds in sorted(self.points):
            risen.append((float(size), max(float(seconds), risen[-1][1] if risen else 0.0)))
        object.__setattr__(self, "points", tuple(risen))

    def seconds(self, size: float) -> float:
        """Seconds of one call with `size` bytes; 0 for nothing.

        Between two measured sizes a straight line of the logarithms; below the smallest its time, which is latency;
        above the largest its bandwidth.
        """
        if size <= 0:
            return 0.0
        sizes = [point[0] for point in self.points]
        place = bisect_left(sizes, size)
        if place == 0:
            return self.points[0][1]
        if place == len(sizes):
            return self.points[-1][1] * size / sizes[-1]
        (s0, t0), (s1, t1) = self.points[place - 1], self.points[place]
        along = math.log(size / s0) / math.log(s1 / s0)
        return t0 * (t1 / t0) ** along


def all_reduce_curve(measured: dict[str, Any]) -> Curve:
    """The all-reduce of what `finetune bench comm` writes for one world size, by its medians."""
    return Curve(
        points=tuple((one["bytes"], one["seconds"]["median"]) for one in measured["collectives"]["all_reduce"])
    )


def buckets(gradients: Sequence[int], cap: int = BUCKET_BYTES, first: int = FIRST_BUCKET_BYTES) -> list[int]:
    """Bytes of each bucket that DDP reduces, in the order in which the backward pass fills them.

    A bucket takes gradients until it holds its limit or more: `compute_bucket_assignment_by_size` in torch's
    csrc/distributed/c10d/reducer.cpp, as DDP applies it after the first step to the gradients in the order in which
    they came, about the reverse of the parameters' (Li et al. 2020, arXiv 2006.15704, section 3.2.3).

    Args:
        gradients: bytes of each trained parameter's gradient, in the order of `model.parameters()`.
        cap, first: limits of the buckets in bytes, and of the first of them.
    """
    found: list[int] = []
    held = 0
    for size in reversed(gradients):
        held += size
        if held >= (cap if found else first):
            found.append(held)
            held = 0
    return found + ([held] if held else [])


def exposed_seconds(filled: Sequence[int], backward_seconds: float, curve: Curve) -> float:
    """Seconds of communication after the end of the backward pass: what the overlap does not hide.

    A bucket is ready when the share of the backward that its bytes and those before it are has passed (the work of a
    linear layer is proportional to its weights); buckets are reduced one after the other, each not before it is ready
    (arXiv 2006.15704, figure 6). The last one is ready at the end of the backward, so its time is always exposed.
    """
    total = sum(filled)
    if not total:
        return 0.0
    done = passed = 0.0
    for size in filled:
        passed += size
        done = max(done, backward_seconds * passed / total) + curve.seconds(size)
    return max(done - backward_seconds, 0.0)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One optimizer step of one rank, all but the communication; the means over the steps of a run.

    compute_seconds:    forward and backward of its micro-batches, on the slowest rank of each step
    accumulation:       micro-batches of the step
    backward_share:     of compute_seconds, 0 to 1
    data_seconds:       waits for data, over the step
    optimizer_seconds:  clipping and the update
    other_seconds:      what stands between these parts
    tokens:             real tokens of the whole global step
    peak_memory_bytes:  of one device without DDP
    """

    compute_seconds: float
    accumulation: int
    backward_share: float
    data_seconds: float
    optimizer_seconds: float
    other_seconds: float
    tokens: float
    peak_memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What DDP sends: bytes of each trained parameter's gradient, and how it keeps them.

    as_bucket_view: the gradients live inside the buckets and take no more than on one device; otherwise the buckets are
                    a copy.
    in_peak:        the one-device peak was measured with gradients held (accumulation of two or more).
    """

    sizes: tuple[int, ...]
    cap: int = BUCKET_BYTES
    first: int = FIRST_BUCKET_BYTES
    as_bucket_view: bool = False
    in_peak: bool = True


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One world size."""

    world_size: int
    step_seconds: float
    exposed_seconds: float  # communication that the backward pass does not hide, per step
    communication_seconds: float  # all of it
    tokens_per_second: float  # of all ranks together
    peak_memory_bytes: float  # of one rank

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.world_size

    @property
    def exposed_fraction(self) -> float:
        """Share of the step in which a rank only waits for communication."""
        return self.exposed_seconds / self.step_seconds if self.step_seconds else 0.0

    def efficiency(self, one: Prediction) -> float:
        """Throughput over `world_size` times that of one device, the ideal (1 = linear speed-up)."""
        return self.tokens_per_second / (self.world_size * one.tokens_per_second)


def predict(work: Work, gradients: Gradients, world_size: int, curve: Curve | None) -> Prediction:
    """One world size from one device's `work` and the all-reduce `curve` of that world size.

    At world size 1 there is no communication, and the measurement comes back as it is.

    Raises:
        ValueError: several ranks without a curve.
    """
    exposed = all_of_it = memory = 0.0
    if world_size > 1:
        if curve is None:
            raise ValueError(f"{world_size} ranks need an all-reduce curve of that world size")
        filled = buckets(gradients.sizes, gradients.cap, gradients.first)
        backward = work.compute_seconds * work.backward_share / work.accumulation  # of the micro-batch that reduces
        exposed = exposed_seconds(filled, backward, curve)
        all_of_it = sum(curve.seconds(size) for size in filled)
        if not (gradients.as_bucket_view and gradients.in_peak):
            memory = float(sum(gradients.sizes))
    step = work.compute_seconds + work.data_seconds + exposed + work.optimizer_seconds + work.other_seconds
    return Prediction(
        world_size=world_size,
        step_seconds=step,
        exposed_seconds=exposed,
        communication_seconds=all_of_it,
        tokens_per_second=work.tokens / step if step > 0 else 0.0,
        peak_memory_bytes=work.peak_memory_bytes + memory,
    )


# --- runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole run at one world size: start-up, then `steps` steps."""

    world_size: int
    step_seconds: float
    steps: float
    start_up_seconds: float

    @property
    def hours(self) -> float:
        return (self.start_up_seconds + self.steps * self.step_seconds) / 3600

    def cost(self, price_per_gpu_hour: float) -> float:
        """Every GPU is paid from the start to the end, also while it starts up."""
        return self.hours * self.world_size * price_per_gpu_hour

    def break_even_steps(self, one: Run) -> float | None:
        """Steps above which this run ends before `one`; None where it never does."""
        gained = one.step_seconds - self.step_seconds
        return max(self.start_up_seconds - one.start_up_seconds, 0.0) / gained if gained > 0 else None

    def price_of_an_hour_saved(self, one: Run, price_per_gpu_hour: float) -> float | None:
        """What each hour that this run ends before `one` costs in GPU hours; below zero it saves both. None where it
        ends no earlier."""
        saved = one.hours - self.hours
        return (self.cost(price_per_gpu_hour) - one.cost(price_per_gpu_hour)) / saved if saved > 0 else None


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope) of seconds over size, neither below zero: the median of all pairs' slopes (Theil 1950, Sen
    1968), which a stray measurement does not move. A constant where all sizes are one.

    Raises ValueError for no points.
    """
    if not points:
        raise ValueError("a line needs at least one point")
    slopes = [(t1 - t0) / (x1 - x0) for i, (x0, t0) in enumerate(points) for x1, t1 in points[i + 1 :] if x1 != x0]
    slope = max(statistics.median(slopes), 0.0) if slopes else 0.0
    intercept = statistics.median([t - slope * x for x, t in points])
    if intercept < 0:  # then through the origin
        return 0.0, statistics.median([t / x for x, t in points if x > 0])
    return intercept, slope
