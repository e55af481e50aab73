"""Tests of finetune/advise/launch.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from finetune.advise import launch
from finetune.errors import UserError
from finetune.measure import dry_run_report
from finetune.parity import command as parity
from tests.helpers.advise import card, host


def test_launch_lines() -> None:
    assert launch.plan(2, host(), ["--x", "1 2"]).line == (
        "torchrun --standalone --nproc_per_node 2 -m finetune.train --x '1 2'"
    )
    assert "--multi_gpu --num_processes 2" in launch.plan(2, host(card(0), card(1)), []).line
    assert launch.plan(1, host(), []).line.startswith("python -m finetune.train")


def test_secrets_of_the_command_line_stay_out_of_the_launch_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, word = "hf" + "_" + "aB3xK9qZ7mW2" * 3, "correct horse"
    arguments = ["--training.hub_token", word, f"--x.api_key={word}", "--model.loader_kwargs", f"{{name: {token}}}"]
    arguments += ["--training.seed", "7"]
    plan = launch.plan(1, host(), arguments)
    monkeypatch.setattr("sys.argv", ["finetune", "train", "--dry-run", *arguments])
    for shown in (plan.line, dry_run_report.launch_line(2)):
        assert token not in shown and word not in shown and "--training.seed 7" in shown

    failed = subprocess.CompletedProcess([], 2, stdout="", stderr=f"error: no {token}\n")
    monkeypatch.setattr(parity.subprocesses, "run", lambda *_, **__: failed)
    with pytest.raises(UserError) as said:
        parity.run_case(parity.Case(1, "ddp", "auto"), tmp_path / "run", 1, "", arguments)
    assert token not in str(said.value) and "***" in str(said.value)
