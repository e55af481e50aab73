"""Which attempts of a launch resume by themselves, on one machine and on several."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.config import Config, load
from finetune.engine.checkpoint import checkpoints, output_folder, restart
from finetune.runtime.ranks import distributed, launcher

OWN, OTHER = "run@node-b:7:2.00", "run@node-a:7:1.00"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of the second of two machines. The folder has a run of this launch, whose rank 0 was on the first one."""
    me = distributed.Ranks(rank=1, local_rank=0, world_size=2, local_world_size=1)
    monkeypatch.setattr(distributed, "ranks", lambda: me)
    monkeypatch.setattr(launcher, "launch_id", lambda: OWN)
    monkeypatch.setattr(launcher, "restarts", lambda: 0)
    monkeypatch.setattr(restart, "_is_first_run", True)
    hosts = [{"host": "node-a", "ranks": [0], "launch": OTHER}, {"host": "node-b", "ranks": [1], "launch": OWN}]
    (tmp_path / "run.json").write_text(json.dumps({"launch": OTHER, "hosts": hosts}))
    (checkpoint := tmp_path / "checkpoint-3").mkdir()
    (checkpoint / "weights").write_text("w")
    checkpoints.seal(checkpoint, {"step": 3, "launch": OTHER})
    given: Any = load(["--training.output_dir", str(tmp_path)], command="train")
    return given


def resumes_from(config: Config) -> bool | str:
    return restart.resume_after_restart(config).training.resume_from_checkpoint


def test_a_machine_resumes_whose_launcher_has_counted_no_restart(config: Config, tmp_path: Path) -> None:
    """c10d starts the ranks of a healthy machine again without counting it."""
    assert resumes_from(config) == str(tmp_path / "checkpoint-3")


def test_a_second_run_of_one_process_is_no_restart(config: Config) -> None:
    resumes_from(config)
    assert resumes_from(config) is False


def test_another_launch_is_no_restart(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "launch_id", lambda: "run@node-b:9:3.00")
    assert resumes_from(config) is False


def test_on_one_machine_the_count_decides(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = replace(distributed.ranks(), local_world_size=2)
    monkeypatch.setattr(distributed, "ranks", lambda: alone)
    assert resumes_from(config) is False
    monkeypatch.setattr(launcher, "restarts", lambda: 1)
    assert resumes_from(config) == str(tmp_path / "checkpoint-3")


# --- the folder that all machines share -------------------------------------------------------------------------------


def shared(monkeypatch: pytest.MonkeyPatch, rank: int, *others: list[Any]) -> list[Any]:
    """`check_shared` on one of two machines; `others`: what the other rank contributes to each exchange."""
    me = distributed.Ranks(rank=rank, local_rank=0, world_size=2, local_world_size=1)
    monkeypatch.setattr(distributed, "ranks", lambda: me)
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    monkeypatch.setattr(socket, "gethostname", lambda: f"node-{rank}")
    monkeypatch.setattr(output_folder, "SHARED_SECONDS", 0.0)
    answers, said = iter(others), []

    def gather(own: Any) -> list[Any]:
        said.append(own)
        return [own, next(answers)] if rank == 0 else [next(answers), own]

    monkeypatch.setattr(distributed, "gather_objects", gather)
    return said


@pytest.mark.parametrize("seen", [True, False])
def test_a_folder_that_a_machine_does_not_share_is_refused(
    seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seen:
        (tmp_path / ".finetune-token").touch()  # rank 0's
    said = shared(monkeypatch, 1, "token", ("node-0", None))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    why = "cannot write into it" if seen else "has another folder under that path, or none"
    with pytest.raises(checkpoints.UserError, match=rf"not on a disk that all machines share: node-1 \(rank 1\) {why}"):
        output_folder.check_shared(tmp_path)
    assert said[1] == ("node-1", why)


def test_rank_0_leaves_nothing_in_the_shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared(monkeypatch, 0, None, ("node-1", None))
    output_folder.check_shared(tmp_path)
    assert not list(tmp_path.iterdir())
