"""The protocol of every figure, against numpy and published tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.measure import protocol


def numpy_z(values: list[float]) -> np.ndarray:
    array = np.array(values)
    distance = np.abs(array - np.median(array))
    return 0.6745 * (array - np.median(array)) / np.median(distance)


# NIST/SEMATECH e-Handbook of Statistical Methods, table 1.3.6.7.2: two-sided 95 % and 99 %.
@pytest.mark.parametrize(
    ("freedom", "at_95", "at_99"),
    [(1, 12.706, 63.657), (2, 4.303, 9.925), (3, 3.182, 5.841), (4, 2.776, 4.604), (9, 2.262, 3.250)]
    + [(10, 2.228, 3.169), (29, 2.045, 2.756), (49, 2.010, 2.680), (100, 1.984, 2.626)],
)
def test_students_t(freedom: int, at_95: float, at_99: float) -> None:
    assert protocol.student_t(freedom) == pytest.approx(at_95, abs=5e-4)
    assert protocol.student_t(freedom, 0.99) == pytest.approx(at_99, abs=5e-4)


def test_students_t_against_drawn_samples() -> None:
    """The interval holds the true mean in 95 % of many small experiments."""
    draw = np.random.default_rng(0).normal(7.0, 2.0, (20_000, 5))
    half = protocol.student_t(4) * draw.std(axis=1, ddof=1) / math.sqrt(5)
    assert np.mean(np.abs(draw.mean(axis=1) - 7.0) <= half) == pytest.approx(0.95, abs=0.005)


def test_outliers_are_removed_and_counted() -> None:
    run = [*np.random.default_rng(1).normal(1.0, 0.01, 100).tolist(), 9.0, 0.1]
    kept = protocol.without_outliers(run)
    assert kept == [value for value, z in zip(run, numpy_z(run), strict=True) if abs(z) <= 3.5]
    assert 9.0 not in kept and 0.1 not in kept
    assert np.allclose(protocol.modified_z(run), numpy_z(run))


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([2.0] * 100, 100),
        ([2.0] * 99 + [50.0], 99),  # MAD is 0, and one is far out all the same
        ([2.0] * 51 + [2.1] * 49, 100),  # more than half are equal, and none is far out
        ([3.0], 1),
        ([3.0, 4.0], 2),
    ],
)
def test_values_of_which_many_are_equal(values: list[float], kept: int) -> None:
    assert len(protocol.without_outliers(values)) == kept


def test_a_figure_from_several_runs() -> None:
    runs = np.random.default_rng(2).normal(5.0, 0.1, (7, 30)).tolist()
    runs[3][4] = 500.0
    found = protocol.summarize(runs)
    kept = [[value for value, z in zip(run, numpy_z(run), strict=True) if abs(z) <= 3.5] for run in runs]
    means = np.array([np.mean(run) for run in kept])
    half = 2.4469 * means.std(ddof=1) / np.sqrt(7)  # t of 6 degrees of freedom
    assert found.ci95 is not None
    assert found.mean == pytest.approx(means.mean())
    assert found.ci95 == pytest.approx((means.mean() - half, means.mean() + half), rel=1e-4)
    assert found.median == pytest.approx(np.median(np.concatenate(kept)))
    assert (found.runs, found.n, found.removed) == (7, sum(map(len, kept)), 210 - sum(map(len, kept)))
    assert found.removed >= 1
    assert set(found.to_dict()) == {"mean", "median", "ci95", "runs", "n", "removed"}


def test_one_run_has_no_interval() -> None:
    found = protocol.summarize([[1.0, 2.0, 3.0]])
    assert (found.mean, found.median, found.ci95, found.removed) == (2.0, 2.0, None, 0)


@pytest.mark.parametrize("runs", [[], [[]], [[1.0], []]])
def test_nothing_measured_is_no_figure(runs: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        protocol.summarize(runs)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60))
def test_at_least_half_of_the_values_stay(values: list[float]) -> None:
    kept = protocol.without_outliers(values)
    assert len(kept) >= len(values) / 2
    assert np.median(values) >= min(kept) and np.median(values) <= max(kept)
