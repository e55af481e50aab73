"""Checkpoints are whole or absent; records are written whole; output folders are not mixed up."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from finetune import keeping, train
from finetune.config import load
from finetune.errors import RunError, UserError
from finetune.record import RunRecord, write_json


def make_checkpoint(output: Path, step: int) -> Path:
    target = output / f"checkpoint-{step}"
    with keeping.staging(target) as folder:
        (folder / "weights.bin").write_bytes(b"x" * 100)
        keeping.seal(folder, {"step": step, "plan": "p"})
    return target


def test_newest_whole_checkpoint_is_found_and_torn_ones_are_named(tmp_path: Path) -> None:
    for step in (5, 20, 100):
        make_checkpoint(tmp_path, step)
    assert keeping.find(tmp_path, True).path == tmp_path / "checkpoint-100"
    (tmp_path / "checkpoint-100" / "weights.bin").write_bytes(b"x")
    (tmp_path / "checkpoint-20" / keeping.MANIFEST).unlink()
    found = keeping.find(tmp_path, True)
    assert found.path == tmp_path / "checkpoint-5"
    assert "1 bytes instead of 100" in found.skipped[0]
    assert keeping.MANIFEST in found.skipped[1]


def test_a_path_to_a_torn_checkpoint_is_refused_with_the_whole_ones(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 5)
    torn = make_checkpoint(tmp_path, 6)
    (torn / "weights.bin").unlink()
    with pytest.raises(UserError, match="weights.bin is missing.*checkpoint-5"):
        keeping.find(tmp_path, str(torn))
    with pytest.raises(UserError, match="no such folder"):
        keeping.find(tmp_path, str(tmp_path / "checkpoint-7"))
    assert keeping.find(tmp_path, False).path is None


def test_a_folder_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError), keeping.staging(tmp_path / "checkpoint-3") as folder:
        (folder / "half").write_text("")
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        make_checkpoint(tmp_path, step)
    keeping.rotate(tmp_path, 2, keep=str(tmp_path / "checkpoint-1"))
    assert [path.name for path in keeping.checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3", "checkpoint-10"]
    keeping.rotate(tmp_path, None)
    assert len(keeping.checkpoints(tmp_path)) == 3


def test_output_folder_of_another_run(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="holds another run .checkpoint-1.*resume_from_checkpoint"):
        keeping.check_output(tmp_path, resuming=False, overwrite=False)
    assert sorted(tmp_path.rglob("*")) == before
    keeping.check_output(tmp_path, resuming=True, overwrite=False)
    keeping.check_output(tmp_path, resuming=False, overwrite=True)
    (tmp_path / "mine.txt").write_text("")
    keeping.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_output_that_is_a_file_or_has_no_room(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="which is a file"):
        keeping.check_output(tmp_path / "file", resuming=False, overwrite=False)
    with pytest.raises(UserError, match="MiB free; a checkpoint needs"):
        keeping.check_space(tmp_path / "not" / "there", 2**62, "a checkpoint")
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(("save_steps", "weights"), [(500, 2), (0, 1)])
def test_a_run_without_checkpoints_needs_room_for_its_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_steps: int, weights: int
) -> None:
    """Two float32 moments of each of 1,024 weights belong to a checkpoint."""
    asked = []
    monkeypatch.setattr(train.keeping, "check_space", lambda _, needed, what: asked.append((needed, what)))
    files = ["--model.model_name_or_path", "m", "--data.train_file", "rows.jsonl"]
    config = load([*files, "--training.output_dir", str(tmp_path), "--training.save_steps", str(save_steps)])
    train.check_space(config, torch.nn.Linear(32, 32, bias=False))
    moments = 8 * 1024 * (weights - 1)
    (needed, what) = asked[0]
    assert needed == weights * 4 * 1024 + moments + keeping.SPARE_BYTES
    assert ("checkpoint" in what) == (save_steps > 0)


def test_full_disk_in_every_librarys_words(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 4)
    for error in (
        OSError(28, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ):
        with pytest.raises(RunError, match="newest whole checkpoint is checkpoint-4"), keeping.no_space(tmp_path, "x"):
            raise error
    with pytest.raises(ValueError), keeping.no_space(tmp_path, "x"):
        raise ValueError("something else")


def test_json_is_written_whole_and_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.json"
    write_json(path, {"a": math.nan, "b": [math.inf, 1.5], "c": Path("x")})
    assert json.loads(path.read_text()) == {"a": None, "b": [None, 1.5], "c": "x"}
    assert [item.name for item in path.parent.iterdir()] == ["run.json"]


def test_a_run_that_failed_before_it_began_leaves_no_record(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.fail("too early")
    assert list(tmp_path.iterdir()) == []
    record.update(status="running")
    record.fail("boom")
    assert json.loads((tmp_path / "run.json").read_text()) == {"status": "failed", "error": "boom"}
