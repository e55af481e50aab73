"""Tests of finetune/bench/comm.py."""

from __future__ import annotations

import pytest

from finetune.bench import comm


@pytest.mark.parametrize(
    ("collective", "ranks", "bus"),  # GB/s of 1 GB in 1 s, by the text of nccl-tests' PERFORMANCE.md
    [("all_reduce", 2, 1.0), ("all_reduce", 8, 1.75), ("reduce_scatter", 8, 0.875), ("all_gather", 4, 0.75)]
    + [("broadcast", 2, 1.0), ("broadcast", 8, 1.0), ("all_to_all", 4, 0.75)],
)
def test_bandwidths_are_those_of_nccl_tests(collective: str, ranks: int, bus: float) -> None:
    assert comm.bandwidths(collective, 10**9, 1.0, ranks) == pytest.approx({"algbw_gb_s": 1.0, "busbw_gb_s": bus})
