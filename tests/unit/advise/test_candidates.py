"""Tests of finetune/advise/candidates.py."""

from __future__ import annotations

import inspect
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
from tests.helpers.advise import SIZE, DryRuns, FakeBench, all_reduce, card, configuration, host, measurement


def config(folder: Path, *extra: str):
    return load(configuration(folder, *extra), command="advise")


def test_each_world_size_is_measured_with_its_own_micro_batch(tmp_path: Path) -> None:
    bench = FakeBench({f"{SIZE} {n}": DryRunResult(measured=measurement(per_device=n)) for n in (1, 2, 4, 8)})
    found = candidates.measure_at_world_sizes(config(tmp_path), bench, measurement(), None, [1, 2, 3, 4, 16])
    assert [one if isinstance(one, str) else one.per_device for one in found.values()][:2] == [8, 8]
    assert f"{SIZE} 8" not in bench.asked  # what was measured already; ranks on a CPU share it, and are measured anew
    bench.cpu_cores = 2
    assert (
        candidates.measure_at_world_sizes(config(tmp_path), bench, measurement(), None, [2])[2]
        and bench.asked[-1] == f"{SIZE} 8"
    )
    assert "the global batch does not fit 3 devices" in str(found[3])
    assert isinstance(found[4], Measurement) and found[4].per_device == 4
    assert isinstance(found[16], Measurement) and found[16].per_device == 1
    found = candidates.measure_at_world_sizes(config(tmp_path), bench, measurement(), 2, [1, 16])  # by its search
    assert [one if isinstance(one, str) else one.per_device for one in found.values()] == [2, 1]
    fixed = config(tmp_path, "--training.gradient_accumulation_steps", "2")
    assert candidates.micro_batch_size(fixed, 1, 2) == 8


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


def test_what_would_make_a_job_fit_is_what_its_dry_run_has_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    DryRuns(monkeypatch, tmp_path, memory=0)
    assert advise.main(["mine.py"]) == 1
    assert "a run from a configuration can shard" in " ".join(capsys.readouterr().out.split())
    report = {"go": False, "reason": "full", "out_of_memory": True}
    found = candidates.parse_report(report)
    assert found == DryRunResult(measured=None, reason="full", full=True)


def test_all_reduces_are_asked_for_as_the_benchmark_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = inspect.signature(candidates.comm.measure)

    def measured(*args: Any, **kw: Any) -> dict[str, Any]:
        taken.bind(*args, **kw)
        return all_reduce(*args, **kw)

    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(candidates.comm, "measure", measured)
    found, _ = candidates.measure_curves([1, 2], host(card(0), card(1)), [4096])
    assert list(found) == [2] and found[2][0] is not None


def test_a_job_shorter_than_its_dry_run_is_measured_on_one_device_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its 100 steps of 1 s, and 10 s to start, take less than the 120 s of a dry run."""
    dry, now = DryRuns(monkeypatch, tmp_path), iter(range(0, 100_000, 120))
    monkeypatch.setattr(candidates.time, "monotonic", lambda: float(next(now)))
    assert advise.main(["mine.py", "--json", "advice.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert len(dry.asked) == 1 and "Dry run 1 of at most 2 (at most 5 minutes, and loading the model)" in said
    assert "ADVICE: One device. The whole run takes 110 s there, less than each further dry run (120 s)" in said
    assert advise.main(["mine.py", "--world-sizes", "1,2"]) == 0  # as asked for
    said = " ".join(capsys.readouterr().out.split())
    assert "Dry run 2 of at most 2 (the first took 120 s): " in said and "Communication of 2 devices, 1 of 1" in said
