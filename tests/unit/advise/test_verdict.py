"""Tests of finetune/advise/verdict.py."""

from __future__ import annotations

import json
import re

import pytest

from finetune.advise import report, verdict
from finetune.measure.predict import MIB
from tests.helpers.advise import FAST, SLOW, of, table


def test_large_work_and_fast_links_take_all_that_pay() -> None:
    found = table(FAST)
    chosen = verdict.choose(found)
    assert chosen and chosen.world_size == 4 and (chosen.efficiency or 0) >= 0.7
    assert verdict.decision_sentence(chosen, found).startswith("4 devices. They would be 3.0")


def test_below_70_percent_efficiency_is_not_taken_unless_the_fastest_is_asked_for() -> None:
    found = table(SLOW, gradients=400 * MIB)  # 0.39 s of communication
    four = found[-1]
    assert 1 < four.prediction.tokens_per_second / found[0].prediction.tokens_per_second < 2.8
    assert four.reason.endswith(" efficiency; below 70 %)")
    assert verdict.choose(found).world_size == 1
    assert verdict.choose(found, fastest=True).world_size > 1
    assert verdict.decision_sentence(found[0], found) == (
        "One device. Two would be slower (0.85 times as fast; 53 % of a step is waiting for communication)"
    )
    found = table(SLOW, gradients=200 * MIB, steps=5000)
    said = verdict.decision_sentence(found[0], found)
    plain = re.fullmatch(r"One device\. Two would be (1\.\d\d) times as fast \((\d\d) % efficiency; below 70 %\)", said)
    assert plain and float(plain[1]) / 2 == pytest.approx(int(plain[2]) / 100, abs=0.01)


def test_a_tiny_step_is_slower_on_several() -> None:
    found = table(SLOW, step=0.002)
    assert verdict.choose(found, fastest=True).world_size == 1
    assert "would be slower (0." in found[1].reason and found[1].break_even_steps is None


def test_a_short_run_ends_earlier_on_one() -> None:
    found = table(FAST, steps=5)
    assert verdict.choose(found, fastest=True).world_size == 1
    assert found[1].reason == "would end later: they take longer to start, and make up for it after 23 steps"
    assert found[1].break_even_steps == pytest.approx(10 / 0.45, rel=0.01)  # 10 s more to start, 0.45 s won a step
    assert verdict.choose(table(FAST, steps=200)).world_size == 4


def test_what_does_not_fit_is_never_chosen() -> None:
    found = table(FAST, memory=25e9, peak=20.5e9)  # 0.8 x 25 = 20 GB, without the buckets even
    assert [row.fits for row in found] == [True, False, False]
    assert verdict.choose(found, fastest=True).world_size == 1 and "above the margin" in found[1].reason


def test_devices_that_are_not_here_are_shown_and_not_chosen() -> None:
    found = table(FAST, here=2)
    assert [row.here for row in found] == [True, True, False]
    assert verdict.choose(found).world_size == 2
    assert verdict.describe(found[2]).startswith("4 devices would be ")
    assert verdict.describe(found[2]).endswith("; not here, predicted from measured")


def test_what_was_not_measured_has_a_reason_and_no_figures() -> None:
    found = verdict.rows(
        {1: of(1), 2: of(2), 3: "3 devices do not hold the global batch", 4: of(4)},
        {2: (None, "its all-reduce could not be measured: rank 1 of 2 died (SIGKILL)")},
        here=4,
    )
    assert [row.prediction is None for row in found] == [False, True, True, True]
    assert "died" in found[1].reason and "do not hold" in found[2].reason and "not measured" in found[3].reason
    assert verdict.choose(found, fastest=True).world_size == 1
    assert report.cells(found[1], False) == ["2", "-", "-", "-", "-", "-"]
    json.dumps([row.to_dict() for row in found])
