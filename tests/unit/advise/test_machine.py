"""Tests of finetune/advise/machine.py."""

from __future__ import annotations

from finetune.advise import machine
from tests.helpers.advise import card, host


def test_unlike_gpus_are_not_scaled_over() -> None:
    mixed = host(card(0), card(1, "NVIDIA L40S"))
    assert machine.devices_here(mixed) == 1
    assert any("the slowest would set the pace" in text and "L40S" in text for text in machine.warnings(mixed))
    assert machine.devices_here(host(card(0), card(1))) == 2 and machine.warnings(host(card(0), card(1))) == []


def test_machines_to_be_warned_of() -> None:
    assert "in use by another process (4711)" in machine.warnings(host(card(0, other_processes=(4711,))))[0]
    assert "NVML is unavailable (no driver)" in machine.warnings(host(card(0), unknown={"NVML": "no driver"}))[0]
    throttled = host(card(0, power_limit_w=72.0), card(1, power_limit_w=60.0))
    assert machine.devices_here(throttled) == 2 and "may wait for the slower" in machine.warnings(throttled)[0]
    assert "there is no GPU" in machine.warnings(host())[0]
    assert machine.devices_here(host()) == 2 and machine.devices_here(host(cpu_cores=1)) == 1
