"""Predict a run on N devices from its measurement on one device and the time of an all-reduce. Pure arithmetic.

The model of a data-parallel optimizer step, on the slowest rank:

    step = forward and backward of its micro-batches + data waits + exposed communication + optimizer + other

Only the last micro-batch of a step communicates (the others run under `no_sync`; torch's "Distributed Data Parallel"
note), bucket by bucket while its backward runs. Not modeled: computation that slows down during communication, and
ranks that share a CPU, its caches or its memory bandwidth.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.runtime.types import JsonObject

MIB = 2**20
# torch.nn.parallel.DistributedDataParallel: by default `bucket_cap_mb` is 25 MiB and the first bucket 1 MiB
# (`torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`), so that communication begins early.
BUCKET_BYTES = 25 * MIB
FIRST_BUCKET_BYTES = MIB


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Time of a collective at one world size, by message size.

    points: (bytes, seconds), at least one; sorted here and made non-decreasing, because a larger message that measured
            faster is noise
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points or any(size <= 0 or seconds <= 0 for size, seconds in self.points):
            raise ValueError(f"a curve needs points of positive bytes and seconds: {self.points}")
        risen: list[tuple[float, float]] = []
        for size, seconds in sorted(self.points):
            risen.append((float(size), max(float(seconds), risen[-1][1] if risen else 0.0)))
        object.__setattr__(self, "points", tuple(risen))

    def seconds(self, size: float) -> float:
        """Seconds of one call with `size` bytes; 0 for nothing.

        Interpolated in log-log between two measured sizes. Below the smallest: its time (latency); above the largest:
        at its bandwidth.
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


def all_reduce_curve(measured: JsonObject) -> Curve:
    """The all-reduce curve in a result of `finetune bench comm` for one world size, from its medians."""
    return Curve(
        points=tuple((one["bytes"], one["seconds"]["median"]) for one in measured["collectives"]["all_reduce"])
    )


def buckets(gradients: Sequence[int], cap: int = BUCKET_BYTES, first: int = FIRST_BUCKET_BYTES) -> list[int]:
    """Bytes of each bucket that DDP reduces, in the order in which the backward pass fills them.

    A bucket takes gradients until it reaches its limit: `compute_bucket_assignment_by_size` in torch's
    csrc/distributed/c10d/reducer.cpp. After the first step DDP applies it to the gradients in the order in which they
    became ready, about the reverse order of the parameters (Li et al. 2020, arXiv 2006.15704, section 3.2.3).

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
    """Exposed communication: seconds after the end of the backward pass, not hidden by the overlap.

    A bucket is ready once the backward has passed the same fraction as the cumulative bytes up to it (the work of a
    linear layer is proportional to its weights). Buckets are reduced one after the other, none before it is ready
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
class Gradients:
    """What DDP sends: bytes of each trained parameter's gradient, and how it stores them.

    cap, first:     limits of the buckets in bytes, and of the first of them
    as_bucket_view: the gradients live inside the buckets and need no more memory than on one device; otherwise the
                    buckets are a copy
    in_peak:        the one-device peak was measured with gradients held (accumulation of two or more)
    """

    sizes: tuple[int, ...]
    cap: int = BUCKET_BYTES
    first: int = FIRST_BUCKET_BYTES
    as_bucket_view: bool = False
    in_peak: bool = True


@dataclass(frozen=True, kw_only=True)
class Work:
    """One rank's share of a run, without communication. Times are means over the steps of the run.

    per_device:         rows of a micro-batch
    accumulation:       micro-batches per step
    compute_seconds:    forward and backward of a step's micro-batches, on the slowest rank of each step
    backward_share:     of compute_seconds, 0 to 1
    data_seconds:       waits for data, per step
    optimizer_seconds:  clipping, update, zeroing, per step
    other_seconds:      the rest of a step
    tokens:             real tokens of the global step
    steps:              optimizer steps of the run
    start_up_seconds:   from the start of the process to the first step
    gradients:          what DDP sends in each step
    peak_memory_bytes:  of one device without DDP
    memory_bytes:       of the device; None if it has no limit (CPU)
    """

    per_device: int
    accumulation: int
    compute_seconds: float
    backward_share: float
    data_seconds: float
    optimizer_seconds: float
    other_seconds: float
    tokens: float
    steps: float
    start_up_seconds: float
    gradients: Gradients
    peak_memory_bytes: float
    memory_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A run at one world size: start-up, then `steps` steps."""

    world_size: int
    step_seconds: float
    exposed_seconds: float  # communication not hidden by the backward pass, per step
    tokens_per_second: float  # of all ranks together
    peak_memory_bytes: float  # per rank
    steps: float
    start_up_seconds: float

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.world_size

    @property
    def exposed_fraction(self) -> float:
        """Share of the step in which a rank only waits for communication."""
        return self.exposed_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def hours(self) -> float:
        return (self.start_up_seconds + self.steps * self.step_seconds) / 3600

    def efficiency(self, one: Prediction) -> float:
        """Throughput per device over that of `one`, on the fewest (1 = linear speed-up)."""
        return self.tokens_per_second_per_gpu / one.tokens_per_second_per_gpu

    def cost(self, price_per_gpu_hour: float) -> float:
        """Price of the run. Every GPU is paid for from start to end, including start-up."""
        return self.hours * self.world_size * price_per_gpu_hour

    def break_even_steps(self, one: Prediction) -> float | None:
        """Steps above which this run ends before `one`; None if it never does."""
        gained = one.step_seconds - self.step_seconds
        return max(self.start_up_seconds - one.start_up_seconds, 0.0) / gained if gained > 0 else None


def predict(work: Work, world_size: int, curve: Curve | None) -> Prediction:
    """Predict one world size from a rank's `work` and the all-reduce `curve` of that world size.

    At world size 1 there is no communication, and the prediction is the measurement.

    Raises:
        ValueError: several ranks without a curve.
    """
    gradients = work.gradients
    exposed = memory = 0.0
    if world_size > 1:
        if curve is None:
            raise ValueError(f"{world_size} ranks need an all-reduce curve of that world size")
        filled = buckets(gradients.sizes, gradients.cap, gradients.first)
        backward = work.compute_seconds * work.backward_share / work.accumulation  # of the micro-batch that reduces
        exposed = exposed_seconds(filled, backward, curve)
        if not (gradients.as_bucket_view and gradients.in_peak):
            memory = float(sum(gradients.sizes))
    step = work.compute_seconds + work.data_seconds + exposed + work.optimizer_seconds + work.other_seconds
    return Prediction(
        world_size=world_size,
        step_seconds=step,
        exposed_seconds=exposed,
        tokens_per_second=work.tokens / step if step > 0 else 0.0,
        peak_memory_bytes=work.peak_memory_bytes + memory,
        steps=work.steps,
        start_up_seconds=work.start_up_seconds,
    )


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope) of seconds over size, neither negative: the median slope of all pairs (Theil 1950, Sen 1968),
    which is robust to outliers. A constant if all sizes are equal.

    Raises:
        ValueError: no points.
    """
    if not points:
        raise ValueError("a line needs at least one point")
    slopes = [(t1 - t0) / (x1 - x0) for i, (x0, t0) in enumerate(points) for x1, t1 in points[i + 1 :] if x1 != x0]
    slope = max(statistics.median(slopes), 0.0) if slopes else 0.0
    intercept = statistics.median([t - slope * x for x, t in points])
    if intercept < 0:  # force the line through the origin
        return 0.0, statistics.median([t / x for x, t in points if x > 0])
    return intercept, slope
