"""Tests of finetune/advise/command.py."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune import advise
from finetune.advise import candidates, command
from finetune.advise.candidates import DryRunResult
from finetune.config import load
from finetune.errors import RunError, UserError
from finetune.measure import measurements
from tests.helpers.advise import FULL, SIZE, DryRuns, FakeBench, all_reduce, card, configuration, host, measurement


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--price-per-gpu-hour", "-1"], "--price-per-gpu-hour: expected a number of at least 0, got '-1'"),
        (["--price-per-gpu-hour", "nan"], "expected a number of at least 0"),
        (["--world-sizes", "1,two"], "expected integers of at least 1, such as 1,2,4"),
        (["--world-sizes", "0"], "expected integers of at least 1, such as 1,2,4"),
        (["--comm", "missing.json"], "Not a valid result of `finetune bench comm --json`"),
        (["--training.learing_rate", "1"], "learning_rate"),
    ],
)
def test_bad_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert advise.main([*arguments, *configuration(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.process
def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from finetune import advise\n"
        "assert advise.main(['--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    from tests.helpers import launch as runs

    done = subprocess.run([*runs.command("python"), "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--price-per-gpu-hour" in done.stdout


def test_a_model_that_fits_no_gpu_gets_no_launch_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = {"mode": {"gradient_checkpointing": "offload", "tiled_mlp": True}, "points": [], "fits": True}
    longest = {"modes": [mode], "rows": {"most": 100}, "limit_gib": 8.0}
    bench = FakeBench({"": replace(FULL, longest_rows=longest)})
    monkeypatch.setattr(candidates, "DryRunner", lambda **kw: bench)
    monkeypatch.setattr("finetune.runtime.machine.hardware.survey", lambda: host(card(0), card(1)))
    report = tmp_path / "advice.json"
    assert advise.main(configuration(tmp_path, "--json", str(report))) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "NO: CUDA ran out of memory" in said and "Run advise again with one of these" in said
    assert "accelerate-launch" not in said and bench.asked == [""]  # nothing else is tried
    content = json.loads(report.read_text())
    assert content["launch"] is None and content["longest_rows"] == longest
    bench.results.clear()
    assert advise.main(configuration(tmp_path)) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "With DDP more GPUs do not help" in said and "dryrun` with --training.strategy shard predicts" in said


@pytest.mark.parametrize("key", ["training.context_parallel: 2", "training.strategy: shard"])
def test_a_job_that_gpus_share_is_measured_by_the_dry_run(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise.main(configuration(tmp_path, *f"--{key}".split(": "))) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"GPUs that each train whole rows with the whole model: got {key}. `finetune dryrun` measures" in said


def test_the_whole_story_on_two_like_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the options to the files, with dry runs and the all-reduce made up."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    bench = FakeBench({"": DryRunResult(measured=measurement()), f"{SIZE} 8": DryRunResult(measured=measurement())})
    monkeypatch.setattr(candidates, "DryRunner", lambda **kw: bench)
    monkeypatch.setattr("finetune.runtime.machine.hardware.survey", lambda: host(card(0), card(1)))
    monkeypatch.setattr(candidates.comm, "measure", all_reduce)
    report = tmp_path / "advice.json"
    arguments = configuration(tmp_path, "--json", str(report))
    assert advise.main([*arguments, "--price-per-gpu-hour", "0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "ADVICE: 2 devices. They would be" in said and "only those of the adapter," in said
    advice = json.loads(report.read_text())
    assert advice["world_size"] == 2 and [row["cost"] for row in advice["rows"]] == [0.0, 0.0]
    assert advice["environment"] == {"NCCL_P2P_DISABLE": "1"} and "NCCL_P2P_DISABLE=1 accelerate" in advice["launch"]
    # For the score of the real run, which has the environment that was measured, and of no other.
    same = {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"}
    assert measurements.find_comm(2, "nccl", "NVIDIA L4", same)[0] is not None
    assert measurements.find_comm(2, "nccl", "NVIDIA L4", {})[0] is None
    # `training.strategy: auto` finds it.
    from finetune.measure import strategy

    found = strategy.find_advice(load(configuration(tmp_path)), 2)
    assert found and found["world_size"] == 2 and found["environment"] == {"NCCL_P2P_DISABLE": "1"}
    assert strategy.find_advice(load(configuration(tmp_path, "--lora.r", "8")), 2) is None
    # A rank that dies while the all-reduce is measured leaves one device, and says so.
    monkeypatch.setattr(candidates.comm, "measure", dies)
    assert advise.main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "could not be measured: rank 1 of 2 died (SIGKILL)" in said and "ADVICE: One device. " in said


def dies(*args: Any, **kw: Any) -> dict[str, Any]:
    raise RunError("rank 1 of 2 died (SIGKILL); the others were stopped")


def test_a_file_of_bench_comm_also_speaks_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    runs = [all_reduce(2, [1024]), all_reduce(8, [1024, 4096]), all_reduce(2, [9]) | {"variant": "Tree"}]
    path = tmp_path / "comm.json"
    path.write_text(json.dumps({"kind": "comm", "runs": runs}))
    found = measurements.read_comm(path)
    assert set(found) == {2, 8} and found[2].points[0][0] == 1024  # of two settings the first: the advised ones
    assert command.world_sizes(command.own_options().split_script([])[0], 1, found) == [1, 2, 8]
    path.write_text(json.dumps(all_reduce(4, [1024])))
    assert set(measurements.read_comm(path)) == {4}
    path.write_text("[1]")
    with pytest.raises(UserError, match="Measure again"):
        measurements.read_comm(path)


def test_a_script_is_advised_by_dry_runs_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = DryRuns(monkeypatch, tmp_path)
    words = ["mine.py", "--model", "x", "--world-sizes", "1,2", "--batch", "7", "--json", "advice.json"]
    assert advise.main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    first, *others = dry.asked
    assert first == "-m finetune.dryrun --devices 2 --longest mine.py -- --model x --batch 7"
    fixed = "-m finetune.dryrun --devices 1 mine.py -- --model x --batch 7 --finetune training.global_batch_size=16"
    assert others and all(one.startswith(fixed) for one in others)
    assert "ADVICE: 2 devices" in said
    advice = json.loads(Path("advice.json").read_text())
    given = "--model x --batch 7 --finetune training.global_batch_size=16"
    command_line = f"mine.py {given} --finetune training.per_device_train_batch_size=8"
    assert advice["world_size"] == 2 and advice["launch"].endswith(command_line)
    assert "finetune.train" not in advice["launch"]
    assert not list(Path("cache").rglob("advice-*"))  # of `training.strategy: auto`, which a script does not have
