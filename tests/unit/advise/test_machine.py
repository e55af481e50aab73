"""Tests of finetune/advise/machine.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from finetune.advise import machine
from finetune.advise.machine import launch
from finetune.errors import UserError
from finetune.measure import dry_run_report
from finetune.parity import command as parity
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


def test_launch_lines() -> None:
    assert launch(2, host(), ["--x", "1 2"])[1] == (
        "torchrun --standalone --nproc_per_node 2 -m finetune.train --x '1 2'"
    )
    assert "--multi_gpu --num_processes 2" in launch(2, host(card(0), card(1)), [])[1]
    assert launch(1, host(), [])[1].startswith("python -m finetune.train")


def test_secrets_of_the_command_line_stay_out_of_the_launch_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, word = "hf" + "_" + "aB3xK9qZ7mW2" * 3, "correct horse"
    arguments = ["--training.hub_token", word, f"--x.api_key={word}", "--model.loader_kwargs", f"{{name: {token}}}"]
    arguments += ["--training.seed", "7"]
    _, line = launch(1, host(), arguments)
    monkeypatch.setattr("sys.argv", ["finetune", "train", "--dry-run", *arguments])
    for shown in (line, dry_run_report.launch_line(2)):
        assert token not in shown and word not in shown and "--training.seed 7" in shown

    failed = subprocess.CompletedProcess([], 2, stdout="", stderr=f"error: no {token}\n")
    monkeypatch.setattr(parity.subprocesses, "run", lambda *_, **__: failed)
    with pytest.raises(UserError) as said:
        parity.run_case(parity.Case(1, "ddp", "auto"), tmp_path / "run", 1, "", arguments)
    assert token not in str(said.value) and "***" in str(said.value)
