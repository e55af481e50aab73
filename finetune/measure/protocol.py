"""The protocol behind every measured figure: warm-up, outliers and the confidence interval of the mean.

A run has WARM_UP steps that are discarded and MEASURED steps that count; a figure is taken from several runs. In each
run, steps with a modified Z-score above MOST_Z are removed, and their number is reported. The confidence interval is
that of the mean over runs, because steps of one run are correlated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

WARM_UP = 10  # steps per run that are discarded
MEASURED = 100  # steps per run that count
RUNS = 5
MOST_Z = 3.5  # Iglewicz and Hoaglin (1993), "How to Detect and Handle Outliers": above it a value is an outlier


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One figure from several runs, in the unit of its values."""

    mean: float  # of the runs' means
    median: float  # of all steps kept
    ci95: tuple[float, float] | None  # of the mean, Student's t over the runs' means; None for a single run
    runs: int
    n: int  # steps kept
    removed: int  # number of outliers

    def to_dict(self) -> dict:
        """The summary as JSON."""
        return asdict(self)


def summarize(runs: Sequence[Sequence[float]]) -> Summary:
    """Summarize `runs`, each a sequence of values after warm-up.

    Raises:
        ValueError: no runs, or a run without values.
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


def without_outliers(values: Sequence[float]) -> list[float]:
    """The values with a modified Z-score of at most MOST_Z, in their order."""
    return [value for value, z in zip(values, modified_z(values), strict=True) if abs(z) <= MOST_Z]


def modified_z(values: Sequence[float]) -> list[float]:
    """0.6745 (x - median) / MAD, with MAD the median of |x - median| (Iglewicz and Hoaglin 1993).

    If MAD is 0 (more than half of the values are equal), the mean of |x - median| times 1.2533 replaces MAD / 0.6745:
    both estimate the standard deviation of a normal distribution. If that is also 0, all values are equal and all
    scores are 0.
    """
    middle = statistics.median(values)
    distances = [abs(value - middle) for value in values]
    deviation = statistics.median(distances) / 0.6745
    if deviation == 0:
        deviation = statistics.fmean(distances) * math.sqrt(math.pi / 2)
    return [(value - middle) / deviation if deviation else 0.0 for value in values]


def student_t(freedom: int, confidence: float = 0.95) -> float:
    """Two-sided critical value of Student's t at this confidence, for `freedom` >= 1 degrees of freedom."""
    low, high = 0.0, 1.0
    while _central_probability(high, freedom) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_probability(middle, freedom) < confidence else (low, middle)
    return high


def _central_probability(t: float, freedom: int) -> float:
    """P(|T| <= t), exact for integer degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for place in range(1 + odd, freedom, 2):  # odd: 2/3, 4/5, ...; even: 1/2, 3/4, ...
        total += term
        term *= square * place / (place + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
