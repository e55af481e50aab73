"""Checkpoints are complete or absent; records are written atomically; output folders are not mixed up."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from finetune.engine.checkpoint import checkpoints, output_folder, run_artifacts
from finetune.errors import RunError, UserError
from finetune.runtime import files
from finetune.runtime.files import write_json
from finetune.runtime.machine import disk
from tests.helpers.runs import make_checkpoint


def test_newest_complete_checkpoint_is_found_and_damaged_ones_are_named(tmp_path: Path) -> None:
    for step in (5, 20, 100):
        make_checkpoint(tmp_path, step)
    assert checkpoints.find(tmp_path, True).path == tmp_path / "checkpoint-100"
    (tmp_path / "checkpoint-100" / "weights.bin").write_bytes(b"x")
    (tmp_path / "checkpoint-20" / checkpoints.MANIFEST).unlink()
    found = checkpoints.find(tmp_path, True)
    assert found.path == tmp_path / "checkpoint-5"
    assert "1 bytes instead of 100" in found.skipped[0]
    assert checkpoints.MANIFEST in found.skipped[1]


def test_a_path_to_a_damaged_checkpoint_is_refused_with_the_complete_ones(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 5)
    damaged = make_checkpoint(tmp_path, 6)
    (damaged / "weights.bin").unlink()
    with pytest.raises(UserError, match="damaged: weights.bin is missing.*checkpoint-5"):
        checkpoints.find(tmp_path, str(damaged))
    with pytest.raises(UserError, match="the folder does not exist"):
        checkpoints.find(tmp_path, str(tmp_path / "checkpoint-7"))
    assert checkpoints.find(tmp_path, False).path is None


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    "zeroed": lambda folder: (folder / "weights.bin").write_bytes(bytes(100)),
    "flipped": lambda folder: flip(folder / "weights.bin"),
    "truncated": lambda folder: (folder / "weights.bin").write_bytes(b"x" * 99),
    "missing": lambda folder: (folder / "weights.bin").unlink(),
    "a folder": lambda folder: replace_by_folder(folder / "weights.bin"),
    "no manifest": lambda folder: (folder / checkpoints.MANIFEST).unlink(),
    "manifest zeroed": lambda folder: (folder / checkpoints.MANIFEST).write_bytes(bytes(300)),
    "manifest a folder": lambda folder: replace_by_folder(folder / checkpoints.MANIFEST),
    "manifest of another step": lambda folder: (folder / checkpoints.MANIFEST).write_text(
        (folder / checkpoints.MANIFEST).read_text().replace('"step": 6', '"step": 5')
    ),
    **{
        f"manifest {text}": lambda folder, text=text: (folder / checkpoints.MANIFEST).write_text(text)
        for text in (
            "[]",
            "null",
            "7",
            '"files"',
            "[" * 100_000,
            '{"files": null, "step": 6}',
            '{"files": [], "step": 6}',
            '{"files": {}, "step": 6}',
            '{"files": {"weights.bin": "100"}, "step": 6}',
            '{"files": {"weights.bin": {"bytes": 100}}, "step": 6}',
            '{"files": {"weights.bin": 100}, "xxh3_128": {"weights.bin": 7}, "step": 6}',
            '{"files": {"weights.bin": 100}, "xxh3_128": {"other": "7"}, "step": 6}',
            '{"files": {"weights.bin": 100}, "xxh3_128": [], "step": 6}',
            '{"files": {"weights.bin": 100}}',
            '{"files": {"weights.bin": 100}, "step": "6"}',
            '{"files": {"weights.bin": 100}, "step": -1}',
            '{"files": {"../secret": 100}, "step": 6}',
            '{"files": {"a/../../secret": 100}, "step": 6}',
            '{"files": {"..\\\\secret": 100}, "step": 6}',
            '{"files": {"/tmp": 100}, "step": 6}',
            '{"files": {"C:secret": 100}, "step": 6}',
            '{"files": {"a\\u0000b": 100}, "step": 6}',
        )
    },
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_named_and_refused_by_path(tmp_path: Path, how: str) -> None:
    make_checkpoint(tmp_path, 5)
    DAMAGE[how](make_checkpoint(tmp_path, 6))
    (tmp_path / "secret").write_bytes(b"x" * 100)
    found = checkpoints.find(tmp_path, True)
    assert (found.path, found.step, found.damaged) == (tmp_path / "checkpoint-5", 5, {"checkpoint-6"})
    (sentence,) = found.skipped
    assert "checkpoint-6 is damaged" in sentence
    with pytest.raises(UserError, match="checkpoint-6: it is damaged.*: checkpoint-5"):
        checkpoints.find(tmp_path, str(tmp_path / "checkpoint-6"))


@pytest.mark.parametrize("name", ["weights.bin", checkpoints.MANIFEST, "tokenizer.json"])
def test_a_fifo_in_a_checkpoint_is_never_read(name: str, tmp_path: Path) -> None:
    """Also one that the manifest does not list: a library may look for it."""
    path = make_checkpoint(tmp_path, 5)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    why = "cannot be read" if name == checkpoints.MANIFEST else f"{name} is a FIFO, not a regular file"
    assert why in str(checkpoints.damage(path, verify=True))
    with pytest.raises(UserError, match="not a complete checkpoint|is damaged"):
        run_artifacts.find_trained_model(path)


def test_checksums_are_xxh3_of_the_content_of_every_file(tmp_path: Path) -> None:
    import xxhash

    folder = make_checkpoint(tmp_path, 7)
    manifest = json.loads((folder / checkpoints.MANIFEST).read_text())
    assert manifest["files"] == {"weights.bin": 100}
    assert manifest["xxh3_128"] == {"weights.bin": xxhash.xxh3_128_hexdigest(b"x" * 100)}
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 40_000)
    assert files.checksum(large) == xxhash.xxh3_128_hexdigest(large.read_bytes())


def test_a_checkpoint_of_another_name_says_its_step_itself(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 9).rename(tmp_path / "my best one")
    found = checkpoints.find(tmp_path, str(tmp_path / "my best one"))
    assert found.step == 9 and checkpoints.find(tmp_path, True).path is None


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling link"])
def test_a_checkpoint_takes_the_place_of_whatever_has_its_name(tmp_path: Path, kind: str) -> None:
    """A link itself is replaced; what it points to stays."""
    elsewhere, target = tmp_path / "elsewhere", tmp_path / "out" / "checkpoint-3"
    target.parent.mkdir()
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("")
    else:
        target.symlink_to(elsewhere)
    if kind == "link":
        elsewhere.mkdir()
        (elsewhere / "kept").write_text("")
    assert checkpoints.damage(make_checkpoint(target.parent, 3), verify=True) is None
    assert not target.is_symlink() and [path.name for path in target.parent.iterdir()] == ["checkpoint-3"]
    assert (elsewhere / "kept").exists() == (kind == "link")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open files need /proc")
def test_files_are_synced_before_they_get_their_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def name(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append(name(descriptor)), fsync(descriptor)))
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append(f"-> {Path(new).name}"), rename(old, new)))
    make_checkpoint(tmp_path, 3)
    renamed = events.index("-> checkpoint-3")
    assert {"weights.bin", checkpoints.MANIFEST, ".checkpoint-3.partial"} <= set(events[:renamed])
    assert events[renamed + 1 :] == [tmp_path.name]


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints.checkpoints(folder)]


def keep(limit: int | None, *protected: str, damaged: tuple[str, ...] = ()) -> checkpoints.Retention:
    return checkpoints.Retention(limit=limit, protected=frozenset(protected), damaged=frozenset(damaged))


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        make_checkpoint(tmp_path, step)
    checkpoints.rotate(tmp_path, keep(None), "checkpoint-10")
    assert len(names(tmp_path)) == 4
    checkpoints.rotate(tmp_path, keep(2), "checkpoint-10", "checkpoint-1")
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-10"]
    checkpoints.rotate(tmp_path, keep(1), "checkpoint-10", "checkpoint-1")
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-10"]


def test_rotation_keeps_the_one_just_written_beside_later_ones_and_the_one_resumed_from(tmp_path: Path) -> None:
    """Resumed by path from checkpoint-5 beside 10, 15 and 20."""
    for step in (5, 6, 10, 15, 20):
        make_checkpoint(tmp_path, step)
    checkpoints.rotate(tmp_path, keep(3, "checkpoint-5"), "checkpoint-6")
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6", "checkpoint-20"]
    make_checkpoint(tmp_path, 7)
    checkpoints.rotate(tmp_path, keep(3, "checkpoint-5"), "checkpoint-7")
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6", "checkpoint-7"]  # what was given up goes first


def test_rotation_counts_complete_checkpoints_only(tmp_path: Path) -> None:
    for step in (15, 16, 17, 20, 25):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-20" / "weights.bin").write_bytes(b"x")
    checkpoints.rotate(tmp_path, keep(2, damaged=("checkpoint-25",)), "checkpoint-17")
    assert names(tmp_path) == ["checkpoint-16", "checkpoint-17", "checkpoint-20", "checkpoint-25"]


def test_a_rotation_that_is_killed_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        make_checkpoint(tmp_path, step)

    def killed(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", killed)
        checkpoints.rotate(tmp_path, keep(1), "checkpoint-2")
    assert names(tmp_path) == ["checkpoint-2"]
    output_folder.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


# An error as a library raises it -> the message.
WRITES = {
    "full": (OSError(errno.ENOSPC, "No space left on device"), "No space left on the disk"),
    "quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk quota of this user"),
    "safetensors, full": (
        RuntimeError("I/O error: No space left on device (os error 28)"),
        "No space left on the disk",
    ),
    "safetensors, quota": (RuntimeError("I/O error: Disk quota exceeded (os error 122)"), "disk quota of this user"),
    "safetensors, broken": (RuntimeError("I/O error: Input/output error (os error 5)"), "input/output error"),
    "safetensors, read-only": (RuntimeError("I/O error: Read-only file system (os error 30)"), "is read-only"),
    "torch": (
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        "could not be written",
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_failing_disk_in_every_librarys_words(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 4)
    error, expected = WRITES[name]
    with pytest.raises(RunError, match="newest complete checkpoint is checkpoint-4") as said:
        with output_folder.explain_full_disk(tmp_path, "checkpoint-6"):
            raise error
    assert expected in str(said.value) and "checkpoint-6" in str(said.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_the_libraries_themselves_on_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="checkpoint-6 in .* was not written"):
        with output_folder.explain_full_disk(tmp_path, "checkpoint-6"):
            torch.save({"a": torch.zeros(100_000)}, "/dev/full")


def test_other_errors_pass_and_files_with_a_name_are_reported_by_the_command(tmp_path: Path) -> None:
    for error in (ValueError("something else"), OSError(errno.EIO, "Input/output error", "file")):
        with pytest.raises(type(error)), output_folder.explain_full_disk(tmp_path, "x"):
            raise error
    assert "input/output error: file" in str(disk.failure(error))


def test_json_is_written_whole_and_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.json"
    write_json(path, {"a": math.nan, "b": [math.inf, 1.5], "c": Path("x")})
    assert json.loads(path.read_text()) == {"a": None, "b": [None, 1.5], "c": "x"}
    assert [item.name for item in path.parent.iterdir()] == ["run.json"]


@pytest.mark.parametrize("name", ["runs", "hang"])
def test_records_are_not_written_through_a_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{name} is a symbolic link"):
        output_folder.check_output(tmp_path / "out", resuming=False, overwrite=True)
