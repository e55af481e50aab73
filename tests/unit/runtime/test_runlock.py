"""One run at a time in an output folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
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


def owner(**values: object) -> dict[str, object]:
    """What this process writes into its lock file, with other values."""
    own = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
    return own | values


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
    output_folder.clear(out)  # overwrite_output_dir
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


def test_a_lock_file_that_its_owner_removes_meanwhile_is_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / runlock.FILE_NAME, fcntl.lockf
    path.write_text("")
    opened: list[int] = []

    def removed_once(descriptor: int, operation: int) -> None:
        if not opened:
            path.unlink()
        opened.append(descriptor)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "lockf", removed_once)
    with runlock.lock(tmp_path, print):
        assert len(opened) == 2
        assert path.exists()


@pytest.mark.parametrize(
    ("values", "free"),
    [
        ({}, False),
        ({"started": 1.0}, True),  # another process has this number now
        ({"pid": 2**22 + 1}, True),
        ({"host": "elsewhere", "pid": 2**22 + 1}, False),  # nothing is known about it
    ],
    ids=["alive", "number used again", "dead", "another machine"],
)
def test_without_locks_the_owner_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, object], free: bool
) -> None:
    """A network file system without locks, and Windows."""

    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    (tmp_path / runlock.FILE_NAME).write_text(json.dumps(owner(**values)))
    if free:
        with runlock.lock(tmp_path, print):
            assert json.loads((tmp_path / runlock.FILE_NAME).read_text()) == owner()
        return
    with pytest.raises(UserError, match="in use by another run") as error, runlock.lock(tmp_path, print):
        raise AssertionError("two runs in one folder")
    assert ("delete" in str(error.value)) == ("host" in values)


NO_LOCKS = {
    "text": b"precious",
    "a list": b"[1]",
    "nested": b"[" * 4000,
    "a long owner": json.dumps(owner()).encode() + b" " * 5000,
    "no process": json.dumps(owner(pid=-1)).encode(),
    "a process of no system": json.dumps(owner(pid=10**30)).encode(),
    "no time": json.dumps(owner(started=1e300)).encode(),
    "another type": json.dumps(owner(host=["x"])).encode(),
}


@pytest.mark.parametrize("name", NO_LOCKS)
def test_a_file_that_no_run_wrote_is_refused_and_kept(name: str, tmp_path: Path) -> None:
    path = tmp_path / runlock.FILE_NAME
    path.write_bytes(NO_LOCKS[name])
    with pytest.raises(UserError, match="is not the lock of a run: its content .*Remove it") as error:
        with runlock.lock(tmp_path, print):
            raise AssertionError
    assert error.value.exit_code == 2 and str(path) in str(error.value)
    assert path.read_bytes() == NO_LOCKS[name]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path, victim: path.symlink_to(victim), "it is a symbolic link"),
        (lambda path, victim: path.symlink_to(victim.parent / "none"), "it is a symbolic link"),
        (lambda path, victim: path.hardlink_to(victim), "it is a second name of another file"),
        (lambda path, victim: os.mkfifo(path), "it is a FIFO"),
        (lambda path, victim: path.mkdir(), "it is a folder"),
    ],
    ids=["link", "dangling link", "hard link", "FIFO", "folder"],
)
def test_a_lock_that_names_another_file_leaves_it_alone(
    make: Callable[[Path, Path], None], why: str, tmp_path: Path
) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("")  # empty, as a lock just after its creation
    out.mkdir()
    make(out / runlock.FILE_NAME, victim)
    with pytest.raises(UserError, match=f"is not the lock of a run: {why}"), runlock.lock(out, print):
        raise AssertionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "victim"] and victim.read_text() == ""


def test_folders_that_cannot_be_written_keep_their_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """output_folder.check_output is next, and knows what is wrong; any other reason is said."""
    (tmp_path / "file").write_text("")
    with runlock.lock(tmp_path / "file", print), pytest.raises(UserError, match="which is a file"):
        output_folder.check_output(tmp_path / "file", resuming=False, overwrite=False)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match="cannot be written there: No space left"), runlock.lock(tmp_path, print):
        raise AssertionError


def test_other_ranks_hold_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlock.distributed, "ranks", lambda: type("Ranks", (), {"is_main": False}))
    with runlock.lock(tmp_path / "out", print):
        assert not (tmp_path / "out").exists()
