"""The arithmetic of `benchmarks.scaling`, on runs whose figures are known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import scaling


def run(number: int, world: int, seconds: float, losses: list[float]) -> dict[str, Any]:
    error = {"step_seconds": {"predicted": 1.0, "measured": 2.0, "error": -0.5}}
    return {
        "round": number, "world_size": world, "tokens_per_second": 1000 / seconds,
        "losses": losses, "exposed_communication_fraction": 0.1, "peak_memory_gib": [1.0] * world,
        "seconds_to_first_step": 9.0, "prediction": error,
    }  # fmt: skip


def test_efficiency_is_against_one_gpu_of_the_same_round() -> None:
    curve = [4.0, 2.0]
    runs = [run(0, 1, 1.0, curve), run(0, 2, 0.5, curve), run(1, 2, 1.0, curve), run(1, 1, 1.0, curve)]
    found = scaling.summary(runs, strong=True)
    assert found["1"]["efficiency"]["mean"] == 1.0
    assert found["2"]["efficiency"]["mean"] == pytest.approx((1.0 + 0.5) / 2)
    assert found["2"]["tokens_per_second"]["mean"] == pytest.approx(1500)
    assert found["2"]["prediction_error"] == [-0.5, -0.5]
    assert found["largest_loss_difference"] == 0.0


def test_loss_curves_are_compared_within_a_round() -> None:
    runs = [run(0, 1, 1.0, [4.0, 2.0]), run(0, 2, 1.0, [4.0, 2.02]), run(1, 1, 1.0, [9.0])]
    assert scaling.summary(runs, strong=True)["largest_loss_difference"] == pytest.approx(0.01)
    assert "largest_loss_difference" not in scaling.summary(runs, strong=False)
    assert scaling.difference([1.0], [1.0, 2.0]) == float("inf")


def test_tokens_and_seconds_are_added_up_over_the_records_that_count() -> None:
    """Not the mean of rates, nor a median step; without the first record and one that something else held up."""
    found = [(100, [9.0]), (400, [1.0, 3.0]), (300, [1.0]), (200, [1.0, 1.0]), (100, [90.0])]
    lines = [json.dumps({"kind": "start"})] + [
        json.dumps({"kind": "record", "step_seconds": seconds, "ranks": [{"tokens": tokens}, {"tokens": tokens}]})
        for tokens, seconds in found
    ]
    assert scaling.rate(lines) == {"tokens_per_second": pytest.approx(2 * 900 / 7), "records_left_out": 1}


def test_a_cell_is_known_or_refused() -> None:
    with pytest.raises(SystemExit, match="cell '1.2b lora sideways'"):
        scaling.measure("1.2b lora sideways", None, {}, 0.0)  # type: ignore[arg-type]
