"""The rule set study2025 at every one of its boundaries."""

from __future__ import annotations

import pytest

from finetune.measure.rules import study2025


@pytest.mark.parametrize(
    ("parameters", "batch", "efficiency", "verdict"),
    [
        (258_000, 128, 0.99, "one GPU"),
        (999_999, 512, 0.99, "one GPU"),  # under 1 M: never
        (1_000_000, 128, 0.61, "evaluate"),
        (1_000_000, 127, 0.61, "one GPU"),
        (1_000_000, 128, 0.60, "one GPU"),  # above 0.6, not at it
        (1_000_000, 128, None, "one GPU"),  # nothing estimated
        (4_999_999, 128, 0.61, "evaluate"),
        (4_999_999, 64, 0.61, "one GPU"),
        (5_000_000, 512, 0.99, "measure"),  # 5 to 10 M: case by case
        (6_900_000, 64, None, "measure"),
        (9_999_999, 64, None, "measure"),
        (10_000_000, 64, None, "several GPUs"),
        (10_000_000, 63, None, "measure"),  # the study is silent below a batch of 64
        (50_000_001, 64, None, "several GPUs"),
        (None, 64, None, "measure"),
    ],
)
def test_boundaries(parameters: int | None, batch: int, efficiency: float | None, verdict: str) -> None:
    found = study2025(parameters, batch, efficiency)
    assert found.verdict == verdict and found.reason
    assert found.several == (verdict == "several GPUs")


def test_it_falls_back_to_one_where_there_is_no_second() -> None:
    assert study2025(10**9, 1024, 0.99, gpus=1).verdict == "one GPU"
    assert study2025(10**9, 1024, 0.99, gpus=0).reason == "no second GPU is available"


def test_above_50_m_gains_are_clear() -> None:
    assert "clear gains" in study2025(50_000_001, 64).reason
    assert "clear gains" not in study2025(50_000_000, 64).reason
