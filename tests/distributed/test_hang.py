"""A stuck rank is named by the others, and a slow save is not killed. Two real ranks over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import launch

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform == "win32", reason="sends SIGSTOP")]
STEP = 3  # complete before the fault


def stuck(
    kind: str, rank: int, model: Path, data: Path, folder: Path, how: str = "2 ranks", seconds: int = 4
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], str]:
    """The end of a run that gets stuck, its hang/report.json and its run.json's error."""
    arguments = [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(data / "train.jsonl")),
        *("--model.backend", "transformers", "--training.global_batch_size", "4", "--logging.generate_samples", "0"),
        *("--training.max_steps", "6", "--training.save_steps", str(STEP), "--logging.logging_steps", "1"),
        *("--training.ddp_timeout", str(seconds), "--training.output_dir", str(folder / "out")),
    ]
    script = launch.SPIES / "hang.py"
    fault = {"STUCK": kind, "STUCK_RANK": str(rank), "STUCK_STEP": str(STEP)}
    done = launch.run(how, arguments, cache=folder, script=script, **fault)
    report = folder / "out" / "hang" / "report.json"
    assert report.is_file(), done.stdout[-5000:]
    return done, json.loads(report.read_text()), launch.read(folder / "out").get("error", "")


@pytest.mark.campaign
@pytest.mark.parametrize(("rank", "how"), [(1, "2 ranks"), (1, "torchrun")])
def test_a_stopped_rank_is_named(tiny_model: Path, tiny_data: Path, tmp_path: Path, rank: int, how: str) -> None:
    """By one sentence, without a traceback, which torchrun's own report repeats."""
    done, report, error = stuck("stop", rank, tiny_model, tiny_data, tmp_path, how)
    assert done.returncode != 0
    (missing,) = report["missing"]
    assert (missing["rank"], missing["step"], missing["phase"]) == (rank, STEP + 1, "data")
    assert not missing["answered"]
    assert [one["rank"] for one in report["answered"]] == [1 - rank] and report["step"] == STEP + 1
    ours, _, of_launcher = done.stdout.partition("ChildFailedError")
    assert "Traceback" not in ours.partition("torch/distributed/elastic")[0], done.stdout[-5000:]
    (sentence,) = [line for line in ours.splitlines() if line.startswith("error: ")]
    assert sentence.startswith(f"error: [rank {1 - rank}] Rank {rank} is missing at step {STEP + 1}, phase data, where")
    assert "it does not answer" in sentence
    assert "training.ddp_timeout" in sentence and "hang/report.md" in sentence and sentence.endswith(error)
    assert f"rank {1 - rank} has waited" in error
    folder = tmp_path / "out" / "hang"
    assert "_engine_run_backward" in (folder / f"rank-{1 - rank}.txt").read_text()
    assert f"| {rank} | **no** |" in (folder / "report.md").read_text() and (folder / f"gloo-rank-{1 - rank}").is_file()
    if how == "torchrun":
        root_cause = of_launcher.partition("Root Cause")[2]
        assert f"Rank {rank} is missing at step {STEP + 1}" in root_cause, of_launcher


@pytest.mark.campaign
def test_a_stopped_rank_0_is_named(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """It writes run.json, which the other rank then does."""
    done, report, error = stuck("stop", 0, tiny_model, tiny_data, tmp_path, "torchrun")
    ours = done.stdout.partition("torch/distributed/elastic")[0]  # the launcher ends with a traceback of its own
    assert done.returncode != 0 and "Traceback" not in ours, done.stdout[-5000:]
    assert [(one["rank"], one["step"]) for one in report["missing"]] == [(0, STEP + 1)]
    assert error.startswith(f"Rank 0 is missing at step {STEP + 1}, phase data, where") and error in done.stdout
    assert launch.read(tmp_path / "out")["status"] == "failed"


@pytest.mark.campaign
def test_a_rank_that_waits_for_its_rows_is_named_with_its_phase(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """It answers, so all ends at once, and its stack shows where it is."""
    done, report, error = stuck("loader", 1, tiny_model, tiny_data, tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stdout
    (missing,) = report["missing"]
    assert (missing["rank"], missing["step"], missing["phase"]) == (1, STEP + 1, "data") and missing["answered"]
    assert error.startswith(f"Rank 1 is missing at step {STEP + 1}, phase data, where it has been for ")
    assert "spies/hang.py" in (tmp_path / "out" / "hang" / "rank-1.txt").read_text()


@pytest.mark.campaign
def test_a_slow_save_is_reported_and_not_killed(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Rank 0 saves until the others have waited for longer than the timeout."""
    done, report, error = stuck("save", 0, tiny_model, tiny_data, tmp_path, seconds=2)
    assert done.returncode == 0 and not error, done.stdout[-5000:]
    (missing,) = report["missing"]
    assert (missing["rank"], missing["phase"], report["collective"]) == (0, "saving", "barrier")
    assert "warning: rank 0 keeps the others waiting after step 3, phase saving" in done.stdout
    assert launch.read(tmp_path / "out")["status"] == "done"
