"""Locks the output folder, so that only one run at a time uses it. The kernel releases the lock when the run ends."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import filelock
import psutil

from finetune.errors import UserError
from finetune.runtime import files
from finetune.runtime.ranks import distributed

FILE_NAME, OWNER = ".finetune.lock", ".finetune.owner"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # network file systems that are mounted without them


@contextlib.contextmanager
def lock(output_dir: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Context that keeps other runs out of `output_dir`. Rank 0 holds the lock; other ranks do nothing.

    The folder is created if needed, and removed at the end if nothing else was written to it.

    Args:
        warn: called with a sentence if an earlier run has left the folder locked, and this one takes it over, or if the
            file system does not support locks.

    Raises:
        UserError: another run is using the folder, or something else has the name of the lock.
    """
    if not distributed.ranks().is_main:
        yield
        return
    folder = Path(os.path.realpath(output_dir))
    made = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    held = filelock.FileLock(folder / FILE_NAME, timeout=0, mode=0o644)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.check_output(folder / FILE_NAME)
        _acquire(held, folder, output_dir, warn)
    except files.NotRegular as error:
        raise UserError(f"The lock of a run cannot be written: {error}") from None
    except OSError as error:
        existing = files.nearest_existing(folder)
        if existing.is_dir() and os.access(existing, os.W_OK):
            raise UserError(
                f"training.output_dir is {output_dir}, but {FILE_NAME} cannot be written there: {error.strerror}. Use "
                "another folder."
            ) from error
        yield  # the caller's next step, output_folder.check_output, reports a path that is unusable
        return
    try:
        yield
    finally:
        files.remove(folder / OWNER)
        files.remove(folder / FILE_NAME)
        held.release()
        for one in made:
            with contextlib.suppress(OSError):  # it holds the run's files
                one.rmdir()


def _acquire(held: filelock.BaseFileLock, folder: Path, output_dir: Path, warn: Callable[[str], None]) -> None:
    """Take the lock, and write this process beside it."""
    try:
        held.acquire()
    except filelock.Timeout:
        raise _in_use(output_dir, _owner(folder)) from None
    except (OSError, NotImplementedError) as error:  # filelock's own for ENOSYS
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
        warn(
            f"warning: the file system of {output_dir} does not support locks: a second run in this folder would not "
            "be refused"
        )
    earlier = _owner(folder)
    if earlier is not None:
        host, pid, started = earlier
        where = "" if host == socket.gethostname() else f" on {host}"
        warn(
            f"warning: the last run in {output_dir} (process {pid}{where}, started "
            f"{(time.time() - started) / 3600:.1f} hours ago) ended without cleaning up; this run takes over the folder"
        )
    own = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
    files.write_json(folder / OWNER, own)


def _owner(folder: Path) -> tuple[str, int, float] | None:
    """Host, process id and start (seconds since 1970) of the run that has or had the lock; None if unknown."""
    try:
        found = files.read_json(folder / OWNER)
        return str(found["host"]), int(found["pid"]), float(found["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _in_use(output_dir: Path, owner: tuple[str, int, float] | None) -> UserError:
    if owner is None:
        who, stop = "a process that has just started", "stop it"
    else:
        host, pid, started = owner
        who = f"process {pid} on {host}, running since {datetime.fromtimestamp(started):%Y-%m-%d %H:%M:%S}"
        stop = f"stop it (`kill {pid}` on {host} saves a checkpoint)"
    return UserError(
        f"training.output_dir is in use by another run: {output_dir} ({who}). Wait until it ends, {stop}, or use "
        "another folder."
    )
