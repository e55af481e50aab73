"""The one protocol of every measured figure: how steps are counted, which are left out, and how sure the mean is.

A run is WARM_UP steps that are not counted and MEASURED ones that are; a figure is taken from several runs. In each
run, steps whose modified Z-score is above MOST_Z are removed and counted. The confidence interval is that of the mean
over runs: steps of one run depend on each other, runs less so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

WARM_UP = 10  # steps of a run that are not counted
MEASURED = 100  # steps of a run that are
RUNS = 5  # the published study took 50
MOST_Z = 3.5  # Iglewicz and Hoaglin (1993), "How to Detect and Handle Outliers": beyond it a value is an outlier


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One figure from several runs, in the unit of its values."""

    mean: float  # of the runs' means
    median: float  # of all steps that were kept
    ci95: tuple[float, float] | None  # of the mean, Student's t over the runs' means; None for a single run
    runs: int
    n: int  # steps that were kept
    removed: int  # outliers

    def to_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


def summarise(runs: Sequence[Sequence[float]]) -> Summary:
    """The figure that `runs` measured, each a sequence of values after warm-up.

    Raises:
        ValueError: there is no run, or one without a value.
    """
    if not runs or not all(len(run) for run in runs):
        raise ValueError("a figure needs at least one run, and each run at least one value")
    kept = [without_outliers(run) for run in runs]
    means = [statistics.fmean(run) for run in kept]
    values = [value for run in kept for value in run]
    mean = statistics.fmean(means)
    interval = None
    if len(means) > 1:
        half = student_t(len(means) - 1) * statistics.stdev(means) / math.sqrt(len(means))
        interval = (mean - half, mean + half)
    return Summary(
        mean=mean,
        median=statistics.median(values),
        ci95=interval,
        runs=len(runs),
        n=len(values),
        removed=sum(map(len, runs)) - len(values),
    )


def apart(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    """Whether two intervals (low, high) share no value. Of a single run there is none, and nothing can be told."""
    return one is not None and other is not None and (one[1] < other[0] or other[1] < one[0])


def without_outliers(values: Sequence[float]) -> list[float]:
    """The values whose modified Z-score is at most MOST_Z, in their order."""
    return [value for value, z in zip(values, modified_z(values), strict=True) if abs(z) <= MOST_Z]


def modified_z(values: Sequence[float]) -> list[float]:
    """0.6745 (x - median) / MAD, with MAD the median of |x - median| (Iglewicz and Hoaglin 1993).

    Where MAD is 0, as more than half of the values are equal, the mean of |x - median| times 1.2533 stands for MAD /
    0.6745: both estimate a normal standard deviation. Where that is 0 too, all values are equal and none is far out.
    """
    middle = statistics.median(values)
    distances = [abs(value - middle) for value in values]
    deviation = statistics.median(distances) / 0.6745
    if deviation == 0:
        deviation = statistics.fmean(distances) * math.sqrt(math.pi / 2)
    return [(value - middle) / deviation if deviation else 0.0 for value in values]


def student_t(freedom: int, confidence: float = 0.95) -> float:
    """The value that |t| stays below with this confidence, for Student's t with `freedom` >= 1 degrees of freedom."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| <= t), exact for whole degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for place in range(1 + odd, freedom, 2):  # odd: 2/3, 4/5, ...; even: 1/2, 3/4, ...
        total += term
        term *= square * place / (place + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
