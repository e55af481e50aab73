"""Tests of finetune/advise/candidates.py."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from finetune import advise
from finetune.advise import candidates
from finetune.advise.candidates import DryRunner, DryRunResult
from finetune.config import load
from finetune.errors import UserError
from finetune.measure.measurements import Measurement
from tests.helpers.advise import OFF, SIZE, DryRuns, FakeBench, configuration, measurement


def config(folder: Path, *extra: str):
    return load(configuration(folder, *extra), command="advise")


def test_better_settings_of_one_device_come_first(tmp_path: Path) -> None:
    base = DryRunResult(measured=measurement(), recommended=16)
    bench = FakeBench(
        {
            "--data.packing true": DryRunResult(measured=measurement(step=0.4, packed=True)),
            OFF: DryRunResult(measured=measurement(step=0.8)),
            f"{SIZE} 16": DryRunResult(measured=measurement(step=0.99, per_device=16)),  # 1 %: noise
        }
    )
    found = candidates.improvements(config(tmp_path), bench, base)
    assert [one.change.name for one in found] == ["packing", "no checkpointing"]
    assert found[0].factor == pytest.approx(2.5) and not found[0].change.same_result
    # Packing changes what a step is: it is told, and not put into the launch line.
    assert candidates.choose_changes(bench, found) == tuple(OFF.split())


def test_fewer_rows_at_a_time_may_be_faster(tmp_path: Path) -> None:
    """Else one device would be compared with two that have smaller micro-batches, and these would get the credit."""
    sizes = {4: 0.5, 16: 0.9}
    bench = FakeBench(
        {f"{SIZE} {n}": DryRunResult(measured=measurement(step=t, per_device=n)) for n, t in sizes.items()}
    )
    found = candidates.improvements(config(tmp_path), bench, DryRunResult(measured=measurement()))
    assert [one.change.name for one in found] == ["4 rows at a time"]  # of two sizes the better
    assert candidates.choose_changes(bench, found) == (SIZE, "4")
    fixed = config(tmp_path, "--training.gradient_accumulation_steps", "2")
    assert candidates.other_micro_batches(fixed, DryRunResult(measured=measurement())) == []


def test_faster_settings_are_taken_together_only_where_that_is_faster(tmp_path: Path) -> None:
    base = DryRunResult(measured=measurement(), recommended=16)
    singles = {
        OFF: DryRunResult(measured=measurement(step=0.8)),
        f"{SIZE} 16": DryRunResult(measured=measurement(step=0.9, per_device=16)),
    }
    for together, expected in ((0.7, f"{OFF} {SIZE} 16"), (0.85, OFF)):
        both = {f"{OFF} {SIZE} 16": DryRunResult(measured=measurement(step=together, per_device=16))}
        bench = FakeBench(singles | both)
        found = candidates.improvements(config(tmp_path), bench, base)
        assert " ".join(candidates.choose_changes(bench, found)) == expected
    full = FakeBench(singles)  # both together do not fit
    assert " ".join(candidates.choose_changes(full, candidates.improvements(config(tmp_path), full, base))) == OFF


def test_each_world_size_is_measured_with_its_own_micro_batch(tmp_path: Path) -> None:
    bench = FakeBench({f"{SIZE} {n}": DryRunResult(measured=measurement(per_device=n)) for n in (1, 2, 4, 8)})
    found = candidates.measure_at_world_sizes(config(tmp_path), bench, measurement(), (), [1, 2, 3, 4, 16])
    assert [one if isinstance(one, str) else one.per_device for one in found.values()][:2] == [8, 8]
    assert f"{SIZE} 8" not in bench.asked  # what was measured already; ranks on a CPU share it, and are measured anew
    bench.cpu_cores = 2
    assert (
        candidates.measure_at_world_sizes(config(tmp_path), bench, measurement(), (), [2])[2]
        and bench.asked[-1] == f"{SIZE} 8"
    )
    assert "the global batch does not fit 3 devices" in str(found[3])
    assert isinstance(found[4], Measurement) and found[4].per_device == 4
    assert isinstance(found[16], Measurement) and found[16].per_device == 1


def test_settings_that_cannot_be_tried_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes is missing, say: no reason to give no advice. The configuration as given has to be sound."""

    def refused(*args: Any, **kw: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 2, stdout="", stderr="error: model.load_in_4bit needs bitsandbytes\n")

    monkeypatch.setattr(candidates.subprocess_dry_run.subprocesses, "run", refused)
    bench = DryRunner(arguments=[])
    assert bench.try_out(["--model.load_in_4bit", "true"]) == DryRunResult(
        measured=None, reason="A dry run failed: model.load_in_4bit needs bitsandbytes"
    )
    with pytest.raises(UserError, match="needs bitsandbytes"):
        bench.try_out([])


def mode(kind: str | bool, speed: float, *, fits: bool = True) -> dict[str, Any]:
    settings = {"gradient_checkpointing": kind, "tiled_mlp": False}
    return {"mode": settings, "fits": fits, "predicted_tokens_per_second": speed}


def test_ways_to_keep_activations_are_taken_from_the_dry_run(tmp_path: Path) -> None:
    own = {"gradient_checkpointing": "offload", "tiled_mlp": False, "reason": "as configured"}
    modes = [mode(False, 900, fits=False), mode("selective", 800), mode(True, 700), mode("offload", 600)]
    base = DryRunResult(measured=measurement(), longest_rows={"own": own, "modes": modes})
    names = [one.name for one in candidates.changes(config(tmp_path), base, False)]
    assert "training.gradient_checkpointing: selective" in names and "no checkpointing" not in names
    assert (
        candidates.faster_modes({"own": own, "modes": [modes[0], modes[3]]}) == []
    )  # its own is the fastest that fits


def test_what_would_make_a_job_fit_is_what_its_dry_run_has_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    DryRuns(monkeypatch, tmp_path, memory=0)
    assert advise.main(["mine.py"]) == 1
    assert "a run from a configuration can shard" in " ".join(capsys.readouterr().out.split())
    report = {"go": False, "reason": "full", "out_of_memory": True, "fits_with": ["--model.tiled_mlp", "true"]}
    found = candidates.parse_report(report)
    assert found == DryRunResult(measured=None, reason="full", full=True, fits_with=("--model.tiled_mlp", "true"))
