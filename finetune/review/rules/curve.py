"""Statistics of a noisy curve, from medians, which single outliers do not move."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

MAD = 1.4826  # times the median absolute deviation: the standard deviation of a normal distribution
BLOCK = 20_000  # windows whose medians are taken at once
BLOCK_POINTS = 50


def running_median(values: np.ndarray, half: int) -> np.ndarray:
    """Median of the window of `half` points on each side, as long as `values`; nearer to an end the window is
    smaller and stays symmetric, so that a slope leaves no trace."""
    half = min(half, (len(values) - 1) // 2)
    if half < 1:
        return values.copy()
    middle = window_medians(values, 2 * half + 1)
    left = [np.median(values[: 2 * place + 1]) for place in range(half)]
    right = [np.median(values[len(values) - 2 * place - 1 :]) for place in reversed(range(half))]
    return np.concatenate([left, middle, right])


def window_medians(values: np.ndarray, width: int) -> np.ndarray:
    """Median of each full window."""
    windows = sliding_window_view(values, min(width, len(values)))
    parts = [np.median(windows[start : start + BLOCK], axis=1) for start in range(0, len(windows), BLOCK)]
    return np.concatenate(parts)


def noise(values: np.ndarray) -> float:
    """Standard deviation of single values about their trend, from the median of |second differences|: neither a slope
    nor single outliers move it."""
    return MAD * float(np.median(np.abs(np.diff(values, 2)))) / np.sqrt(6) if len(values) > 2 else 0.0


def usual_height(residuals: np.ndarray) -> np.ndarray:
    """For each residual, the size that 80 % of its neighborhood stay below: noise changes along a run. Blocks
    of BLOCK_POINTS, interpolated; at least half of that of all."""
    sizes = np.abs(residuals)
    blocks = np.array_split(np.arange(len(sizes)), max(len(sizes) // BLOCK_POINTS, 1))
    heights = [np.quantile(sizes[block], 0.8) for block in blocks]
    local = np.interp(np.arange(len(sizes)), [block.mean() for block in blocks], heights)
    return np.maximum(local, np.quantile(sizes, 0.8) / 2)


def level(values: np.ndarray, start: float, end: float) -> float:
    """Median of the part from `start` to `end`, both 0 to 1."""
    first = min(int(start * len(values)), len(values) - 1)
    return float(np.median(values[first : max(int(end * len(values)), first + 1)]))


def error_of_difference(values: np.ndarray, share: float) -> float:
    """Standard error of the difference of the medians of two parts of the curve, each with this share of it."""
    return noise(values) * 1.2533 * float(np.sqrt(2 / max(share * len(values), 1.0)))
