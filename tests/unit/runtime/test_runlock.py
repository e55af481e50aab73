"""One run at a time in an output folder."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest

from finetune.engine.checkpoint import output_folder
from finetune.errors import UserError
from finetune.runtime import runlock
from tests.helpers import launch

HOLDER = """
import os, sys
from pathlib import Path
from finetune.runtime import runlock
with runlock.lock(Path(sys.argv[1]), print):
    print("held", flush=True)
    if sys.stdin.readline() and os.fork() == 0:
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds tmp_path/out until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out")]
    env = launch.environment(tmp_path)
    with subprocess.Popen(command, text=True, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == "held\n"
        yield process
        process.kill()
        process.stdin.close()


@pytest.mark.process
def test_a_second_run_is_refused_and_a_dead_ones_folder_is_taken_over(
    tmp_path: Path, holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (tmp_path / "link").symlink_to(out)
    for path in (out, tmp_path / "link", tmp_path / "not" / ".." / "out"):
        with pytest.raises(UserError, match=rf"process {holder.pid} on .*, running since .*kill {holder.pid}"):
            with runlock.lock(path, print):
                raise AssertionError("two runs in one folder")
    output_folder.check_output(out, resuming=False, overwrite=False)  # a lock is not a run that would have to go first
    output_folder.prepare_output(out, overwrite=True)
    assert (out / runlock.FILE_NAME).exists()
    holder.kill()
    holder.wait()
    with runlock.lock(out, print):
        assert (out / runlock.FILE_NAME).exists()
    said = capsys.readouterr().out
    assert f"process {holder.pid}" in said and "takes over the folder" in said
    assert not (out / runlock.FILE_NAME).exists()


def test_the_end_of_a_run_removes_the_lock_and_a_folder_that_it_left_empty(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    with runlock.lock(deep, print):
        assert (deep / runlock.FILE_NAME).exists()
        with pytest.raises(UserError, match=rf"process {os.getpid()} on"), runlock.lock(deep, print):
            raise AssertionError("twice in one process")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="failed"), runlock.lock(deep, print):
        (deep / "run.json").write_text("{}")
        raise ValueError("failed")
    assert [path.name for path in deep.iterdir()] == ["run.json"]


@pytest.mark.process
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    """As a data worker that outlives its run."""
    assert holder.stdin and holder.stdout
    holder.stdin.write("fork\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "forked\n"
    holder.kill()
    holder.wait()
    with runlock.lock(tmp_path / "out", print):
        pass
    assert holder.stdin.write("") == 0  # the child lives until its input ends


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("flock")], ids=str)
def test_without_locks_the_run_goes_on_with_a_warning(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network file system without locks."""

    def no_locks(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", no_locks)
    with runlock.lock(tmp_path, print):
        assert "does not support locks" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"text", b"[1]", b"[" * 4000, b'{"host": 1}', b'{"pid": "x"}'])
def test_an_owner_that_cannot_be_read_is_replaced(content: bytes, tmp_path: Path) -> None:
    (tmp_path / runlock.OWNER).write_bytes(content)
    with runlock.lock(tmp_path, print), pytest.raises(UserError, match=rf"process {os.getpid()} on"):
        with runlock.lock(tmp_path, print):
            raise AssertionError("twice in one process")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path, victim: path.symlink_to(victim), "is a symbolic link"),
        (lambda path, victim: path.symlink_to(victim.parent / "none"), "is a symbolic link"),
        (lambda path, victim: os.mkfifo(path), "is a FIFO"),
        (lambda path, victim: path.mkdir(), "is a folder"),
    ],
    ids=["link", "dangling link", "FIFO", "folder"],
)
def test_a_lock_that_names_another_file_leaves_it_alone(
    make: Callable[[Path, Path], None], why: str, tmp_path: Path
) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    out.mkdir()
    make(out / runlock.FILE_NAME, victim)
    with pytest.raises(UserError, match=f"The lock of a run cannot be written: .*{why}"), runlock.lock(out, print):
        raise AssertionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "victim"] and victim.read_text() == "precious"


def test_folders_that_cannot_be_written_keep_their_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """output_folder.check_output is next, and knows what is wrong; any other reason is said."""
    (tmp_path / "file").write_text("")
    with runlock.lock(tmp_path / "file", print), pytest.raises(UserError, match="file is a file"):
        output_folder.check_output(tmp_path / "file", resuming=False, overwrite=False)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runlock.files, "write_json", full)
    with pytest.raises(UserError, match="cannot be written there: No space left"), runlock.lock(tmp_path, print):
        raise AssertionError


def test_other_ranks_hold_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlock.distributed, "ranks", lambda: type("Ranks", (), {"is_main": False}))
    with runlock.lock(tmp_path / "out", print):
        assert not (tmp_path / "out").exists()
