"""The output folder of a run: what it may hold, the room it needs, and files of earlier runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.engine.checkpoint import checkpoints, output_folder
from finetune.errors import UserError
from tests.helpers.runs import make_checkpoint


def test_a_folder_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError), checkpoints.staging(tmp_path / "checkpoint-3") as folder:
        (folder / "half").write_text("")
        raise ValueError
    with pytest.raises(ValueError), output_folder.final_files(tmp_path) as folder:
        (folder / "half").write_text("")
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_partial_files_of_dead_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    """Also when the run starts anew with overwrite_output_dir."""
    mine = [".checkpoint-x.partial", "notes.partial", ".run.json.partial", "final", "x.checkpoint-3.partial"]
    junk = [".checkpoint-7.partial", ".checkpoint-7.replaced.partial", ".final.partial", ".run.json.123.partial"]
    for name in (*junk[:3], *mine):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("")
    (tmp_path / junk[3]).write_text("{")
    output_folder.prepare_output(tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(mine)


def test_output_folder_of_another_run(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="holds another run .checkpoint-1.*resume_from_checkpoint"):
        output_folder.check_output(tmp_path, resuming=False, overwrite=False)
    assert sorted(tmp_path.rglob("*")) == before
    output_folder.check_output(tmp_path, resuming=True, overwrite=False)
    output_folder.check_output(tmp_path, resuming=False, overwrite=True)
    (tmp_path / "mine.txt").write_text("")
    output_folder.prepare_output(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_output_that_is_a_file_or_has_no_room(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for given, words in (
        ("file", "and .*file is a file. Give a folder"),
        ("file/deep/er", "and .*file is a file. Give a folder"),
        ("link", "symbolic link to .*nowhere, which does not exist"),
        ("link/deep", "symbolic link to .*nowhere, which does not exist"),
    ):
        for resuming in (False, True):
            with pytest.raises(UserError, match=words):
                output_folder.check_output(tmp_path / given, resuming=resuming, overwrite=False)
    with pytest.raises(UserError, match="MiB free; a checkpoint needs"):
        output_folder.check_space(tmp_path / "not" / "there", 2**62, "a checkpoint")
    assert not (tmp_path / "not").exists()
