"""`from finetune import SFTTrainer` in a script on one rank and on two: resuming, signals, ranks that disagree."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, launch, warm

pytestmark = pytest.mark.process
SCRIPT = ROOT / "tests" / "dropin" / "own.py"


def run(ranks: int, model: Path, data: Path, out: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    argv = [str(SCRIPT), "--model", str(model), "--data", str(data / "train.jsonl"), "--out", str(out), *extra]
    env = launch.environment(out.parent, FINETUNE_BACKEND="transformers")
    server = warm.server("transformers")
    return server.run(argv, ranks=ranks, env=env, cwd=out.parent, timeout=launch.TIMEOUT, merged=True)


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout[-4000:]
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank reports that trains to the end."""
    return result(run(1, tiny_model, tiny_data, tmp_path_factory.mktemp("drop-in") / "whole"))


@pytest.mark.campaign
def test_a_stopped_script_resumes_on_another_number_of_ranks(
    whole: dict[str, Any], tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    sharded = result(run(2, tiny_model, tiny_data, tmp_path / "shard", "--finetune", "training.strategy=shard"))
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert sharded["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-5)
    assert json.loads((tmp_path / "shard" / "run.json").read_text())["sharding"]["sharded_fraction"] == 1

    stopped = run(2, tiny_model, tiny_data, tmp_path / "out", "--stop_at", "3")
    assert stopped.returncode == 130, stopped.stdout[-4000:]
    assert "Stopped by SIGTERM" in stopped.stdout and "Traceback" not in stopped.stdout
    found = {int(path.name.removeprefix("checkpoint-")) for path in (tmp_path / "out").glob("checkpoint-*")}
    assert found - {2, 4} <= {3, 5} and max(found) in (3, 4, 5)  # the ranks agree a step or two later
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "interrupted"

    resumed = result(run(1, tiny_model, tiny_data, tmp_path / "out", "--resume"))
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    assert resumed["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-5)
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.campaign
def test_two_ranks_share_rows(whole: dict[str, Any], tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    shared = result(run(2, tiny_model, tiny_data, tmp_path / "shared", "--shared_by", "2"))
    assert shared["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert shared["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-5)
    ours = json.loads((tmp_path / "shared" / "run.json").read_text())
    assert (ours["world_size"], ours["config"]["training"]["context_parallel"]) == (2, 2)
    alone = run(1, tiny_model, tiny_data, tmp_path / "alone", "--finetune", "training.context_parallel=2")
    assert alone.returncode == 1 and "context_parallel 2 does not divide 1 (processes)" in alone.stdout


def test_ranks_with_other_rows_are_refused(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    done = run(2, tiny_model, tiny_data, tmp_path / "out", "--split_without_seed")
    assert done.returncode != 0
    assert "rank 1 has different rows from rank 0: `train_dataset` differs" in done.stdout
    assert "train_test_split(seed=42)" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["python", "torchrun"])
def test_a_refusal_is_a_sentence_and_the_line_of_the_script(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, how: str
) -> None:
    argv = ["--model", str(tiny_model), "--data", str(tiny_data / "train.jsonl"), "--out", str(tmp_path / "out")]
    done = launch.run(how, [*argv, "--metrics"], cache=tmp_path, script=SCRIPT, FINETUNE_BACKEND="transformers")
    assert done.returncode == 1
    ours, _, of_launcher = done.stdout.partition("ChildFailedError")
    refusal = "`compute_metrics`: evaluation does not build the logits"
    assert ours.count(refusal) == 1  # also of two ranks
    assert of_launcher.count(refusal) == (how == "torchrun")
    assert "own.py:" in ours and "trainer = SFTTrainer(" in ours
    assert "Traceback (most recent call last):\n  File" not in ours.split("elastic")[0]
