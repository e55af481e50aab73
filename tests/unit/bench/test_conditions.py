"""Tests of finetune/bench/conditions.py."""

from __future__ import annotations

import pytest

from finetune.bench import conditions
from finetune.runtime.machine import hardware
from tests.helpers.bench import machine, on_cpu
from tests.helpers.nvml import Card


def test_drift_is_warned_of() -> None:
    cool = {"sm_clock_mhz": 1980, "temperature_c": 45}
    warm = {"sm_clock_mhz": 1755, "temperature_c": 71}
    clock, heat = conditions.drift([cool, cool, None], [cool, warm, None])
    assert clock == "rank 1: the SM clock went from 1980 to 1755 MHz; the figures mix both"
    assert "from 45 to 71 C" in heat
    assert conditions.drift([cool], [{"sm_clock_mhz": 1965, "temperature_c": 54}]) == []
    assert conditions.drift([cool], [{"sm_clock_mhz": None, "temperature_c": None}]) == []


def test_unlike_and_shared_gpus_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Card(), Card(power_limit=450, processes=(4711,))]
    found = conditions.describe([], [], machine(monkeypatch, 2, "SYS", cards=cards))["warnings"]
    assert found == [
        "the GPUs differ, so the slowest sets the pace (power_limit_w: 700.0, 450.0)",
        "GPU 1 is shared with other processes: 4711",
    ]


def test_a_crowded_cpu_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for average, words in ((3.7, ["more runnable processes than the 2 CPU cores"]), (2.1, [])):
        monkeypatch.setattr(conditions.os, "getloadavg", lambda average=average: (average, 0.0, 0.0))
        found = conditions.describe([None], [None], hardware.Hardware(**on_cpu()))
        assert [warning.partition(":")[0] for warning in found["warnings"]] == words
        assert found["load_average"] == [average, 0.0, 0.0]
