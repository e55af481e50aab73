"""Tests of finetune/bench/comm_report.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.bench import comm, comm_report, command
from finetune.bench.command import main
from finetune.errors import RunError, UserError
from finetune.measure import measurements
from finetune.runtime.ranks import distributed
from tests.helpers.bench import machine


def test_collectives_that_were_measured_stay_when_the_next_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(world: int, sizes: list[int], *arguments: Any, **named: Any) -> dict[str, Any]:
        if world == 4:
            raise RunError("a rank died")
        row = {"bytes": sizes[0], "seconds": {"median": 1e-4}, "algbw_gb_s": 1.0, "busbw_gb_s": 1.0}
        kept = {"kind": "comm", "world_size": world, "backend": "nccl"}
        return kept | {"collectives": {"all_reduce": [row]}, "environment": {}}

    found = machine(monkeypatch, 4, "NVLink")
    monkeypatch.setattr(comm_report, "survey", lambda: found)
    monkeypatch.setattr(comm, "measure", measure)
    report = tmp_path / "x.json"
    assert main(["comm", "--world-sizes", "2,4", "--sizes", "4096", "--json", str(report)]) == 1
    assert json.loads(report.read_text())["world_size"] == 2 and "a rank died" in capsys.readouterr().err


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a rank of a launcher, on the first of two machines."""
    me = distributed.Ranks(rank=0, local_rank=0, world_size=2, local_world_size=1)
    monkeypatch.setattr(distributed, "ranks", lambda: me)


def test_a_launched_comm_refuses_what_it_does_not_do(two_machines: None) -> None:
    with pytest.raises(UserError, match="got --world-sizes.*several machines"):
        command.run(["comm", "--world-sizes", "2"])


def test_a_curve_of_two_machines_is_for_two_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    rows = [{"bytes": size, "seconds": {"median": size / 1e9}} for size in (4096, 65536)]
    found = {"world_size": 2, "backend": "gloo", "environment": {}, "collectives": {"all_reduce": rows}}
    measurements.save_comm(found | {"machines": 2}, "cpu")
    assert measurements.find_comm(2, "gloo", "cpu", {}, machines=2)[0] is not None
    assert measurements.find_comm(2, "gloo", "cpu", {})[0] is None
    curve, why = measurements.find_comm(2, "gloo", "cpu", {}, machines=3)
    assert curve is None and "on 3 machines" in why and "torchrun" in why
