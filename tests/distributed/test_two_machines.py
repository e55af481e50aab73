"""Ranks on two machines, and what each sees of the other's end. `python -m benchmarks.two_machines` does it with
network namespaces; here, each rank is only told that it is on one of two machines, but for the last test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import namespaces, two_machines
from tests.helpers import launch

pytestmark = pytest.mark.process
STEPS = 6


def run(
    ranks: str, model: Path, data: Path, folder: Path, *extra: str, out: str = "out", **environment: str
) -> subprocess.CompletedProcess[str]:
    arguments = [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(data / "train.jsonl")),
        *("--model.backend", "transformers", "--training.global_batch_size", "4", "--logging.generate_samples", "0"),
        *("--training.max_steps", str(STEPS), "--logging.logging_steps", "1", "--training.save_steps", "3"),
        *("--training.output_dir", str(folder / out), *extra),
    ]
    how = f"{sum(map(int, ranks.split('+')))} ranks"
    script = launch.SPIES / "two_machines.py"
    return launch.run(how, arguments, cache=folder, script=script, MACHINES=ranks, **environment)


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert "Traceback" not in done.stdout, done.stdout[-5000:]
    return [line for line in done.stdout.splitlines() if line.startswith("error: ")]


@pytest.mark.campaign
def test_machines_with_different_numbers_of_ranks(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """The ranks' records have one length, and run.json has who was where."""
    done = run("1+3", tiny_model, tiny_data, tmp_path)
    assert done.returncode == 0, done.stdout[-5000:]
    found = launch.read(tmp_path / "out")
    assert [(host["host"], host["ranks"]) for host in found["hosts"]] == [("node-0", [0]), ("node-1", [1, 2, 3])]
    assert len(found["losses"]) == STEPS
    assert not list((tmp_path / "out").glob(".finetune-*"))


def test_a_machine_that_ends_is_named(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """In training, without a word of its own; the checkpoint stays."""
    done = run("1+1", tiny_model, tiny_data, tmp_path, KILL_STEP="4")
    (error,) = errors(done)
    assert done.returncode != 0 and error.startswith("error: [rank 0] node-1 (rank 1) is gone: its processes ended")
    assert "training.resume_from_checkpoint: true" in error
    found = launch.read(tmp_path / "out")
    assert found["status"] == "failed" and error.endswith(found["error"])
    assert (tmp_path / "out" / "checkpoint-3").is_dir()


def test_a_folder_that_is_not_shared_is_refused(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Before anything is loaded, on all ranks, by name; nothing stays behind."""
    for number in "01":
        (tmp_path / number).mkdir()
    done = run("1+1", tiny_model, tiny_data, tmp_path, out="MACHINE/out")
    found = errors(done)
    assert done.returncode == 2
    assert any("a folder on a shared file system" in error for error in found), found
    assert all("training.output_dir" in error for error in found)
    assert [path.name for path in tmp_path.glob("[01]/**/*")] == []


@pytest.mark.campaign
def test_a_file_that_one_machine_lacks_ends_all(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Rank 0, which has it, would wait half an hour for the other one."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "train.jsonl").write_bytes((tiny_data / "train.jsonl").read_bytes())
    done = run("1+1", tiny_model, tiny_data, tmp_path, "--data.train_file", str(tmp_path / "MACHINE" / "train.jsonl"))
    assert done.returncode == 2
    missing = f"{tmp_path / '1' / 'train.jsonl'} does not exist"
    found = errors(done)
    assert any(error.startswith(f"error: [rank 1] {missing}") for error in found)
    assert any(error.startswith(f"error: [rank 0] rank 1 on node-1: {missing}") for error in found), found


@pytest.mark.campaign
@pytest.mark.parametrize(
    "cell",
    [
        "accelerate-1+1",
        "torchrun-1+2",
        "ranks-1+1",
        "killed-first-torchrun",
        "link-down-accelerate",
        "rank-killed-restart",
    ],
)
def test_with_network_namespaces(cell: str, tmp_path: Path) -> None:
    """Cells of the benchmark: launchers, addresses, disks and processes of two machines."""
    if (why := namespaces.why_not()) is not None:
        pytest.skip(why)
    found = two_machines.measure(two_machines.Lab(tmp_path, Path(sys.executable)), cell)
    assert found["ok"], found
