"""Locks the output folder, so that only one run at a time uses it. The kernel releases the lock when the run ends.

The lock is a POSIX record lock (fcntl), not flock: forked processes do not inherit it, so no data worker can keep it
alive, and network file systems that support locking support these locks (NFS, Lustre with `-o flock`). Without locking
support, the owner written in the file decides.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TypedDict

import psutil

from finetune.errors import UserError
from finetune.runtime import files
from finetune.runtime.ranks import distributed

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FILE_NAME = ".finetune.lock"
_MOST_BYTES = 4096  # of an owner
_YEAR_2200 = 7_258_118_400  # seconds since 1970

_locked: set[Path] = set()  # a process is never blocked by its own record locks


class _Owner(TypedDict):
    """The process that holds a lock, as it is written in the file."""

    host: str
    pid: int
    started: float  # seconds since 1970


@contextlib.contextmanager
def lock(output_dir: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Context that keeps other runs out of `output_dir`. Rank 0 holds the lock; other ranks do nothing.

    The folder is created if needed, and removed at the end if nothing else was written to it.

    Args:
        warn: called with a sentence if an earlier run has left the folder locked, and this one takes it over.

    Raises:
        UserError: another run is using the folder, or the lock file is not one of a run.
    """
    if not distributed.ranks().is_main:
        yield
        return
    path = Path(os.path.realpath(output_dir)) / FILE_NAME
    folders = (path.parent, *path.parent.parents)
    made = [folder for folder in folders if not os.path.lexists(folder)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path, output_dir, warn)
    except UserError:
        raise
    except OSError as error:
        existing = next(folder for folder in folders if os.path.lexists(folder))
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
        _release(path, descriptor)
        for folder in made:
            with contextlib.suppress(OSError):  # it holds the run's files
                folder.rmdir()


def _acquire(path: Path, output_dir: Path, warn: Callable[[str], None]) -> int:
    """Lock the file and write this process to it. Returns the file descriptor."""
    if path in _locked:
        raise _in_use(output_dir, _this_process())
    while True:
        try:
            descriptor, is_new = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
        except FileExistsError:
            try:
                descriptor, is_new = files.open_descriptor(path, os.O_RDWR, follow=False), False
            except FileNotFoundError:  # its owner has just removed it
                continue
            except files.NotRegular as error:
                raise _not_a_lock(path, str(error.strerror)) from None
        try:
            free = _try_lock(descriptor)
            owner = _read(descriptor, path)
            if free is None:  # the file system does not support locks
                free = is_new or (owner is not None and _has_ended(owner))
            if not free:
                raise _in_use(output_dir, owner, path)
            if not _is_same_file(path, descriptor):  # its owner ended and removed it after this process had opened it
                os.close(descriptor)
                continue
        except BaseException:
            os.close(descriptor)
            raise
        if owner is not None:
            warn(_taken_over(output_dir, owner))
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)
        _locked.add(path)
        return descriptor


def _release(path: Path, descriptor: int) -> None:
    """Remove the lock file, then unlock it: a process that opened it in between finds it removed and retries."""
    _locked.discard(path)
    if fcntl is None:  # Windows cannot remove an open file
        os.close(descriptor)
    with contextlib.suppress(OSError):  # the folder was removed, or its disk is gone
        path.unlink()
    if fcntl is not None:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Lock an open file: True if this process got the lock, False if another one has it, None without lock support."""
    if fcntl is None:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        return None  # ENOLCK, ENOSYS, EOPNOTSUPP: a network file system mounted without locks


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read(descriptor: int, path: Path) -> _Owner | None:
    """The process that wrote the file; None if it is empty, as just after its creation.

    Raises:
        UserError: a run did not write this file, which would be overwritten.
    """
    if os.fstat(descriptor).st_nlink > 1:
        raise _not_a_lock(path, "it is a second name of another file")
    content = os.pread(descriptor, _MOST_BYTES + 1, 0)
    if not content:
        return None
    try:
        found = json.loads(content) if len(content) <= _MOST_BYTES else None
        host, pid, started = found["host"], found["pid"], found["started"]  # pyright: ignore[reportOptionalSubscript]
        if type(host) is str and type(pid) is int and 0 < pid < 2**31 and 0 <= float(started) < _YEAR_2200:
            return {"host": host, "pid": pid, "started": float(started)}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    raise _not_a_lock(path, "its content does not name a process")


def _not_a_lock(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is not the lock of a run: {why}. Nothing was written to it. Remove it if no run uses the folder, or "
        "use another training.output_dir."
    )


def _this_process() -> _Owner:
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def _has_ended(owner: _Owner) -> bool:
    """Whether a process is known to have ended; never for processes on other machines."""
    if owner["host"] != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) > 1  # the id has been reused
    except psutil.NoSuchProcess:
        return True


def _in_use(output_dir: Path, owner: _Owner | None, path: Path | None = None) -> UserError:
    if owner is None:
        who, stop = "a process that has just started", "stop it"
    else:
        since = datetime.fromtimestamp(owner["started"]).strftime("%Y-%m-%d %H:%M:%S")
        who = f"process {owner['pid']} on {owner['host']}, running since {since}"
        stop = f"stop it (`kill {owner['pid']}` on {owner['host']} saves a checkpoint)"
    remove = ""
    if fcntl is None or (owner is not None and path is not None and owner["host"] != socket.gethostname()):
        remove = f" If that process no longer exists, delete {path}."
    return UserError(
        f"training.output_dir is in use by another run: {output_dir} ({who}). Wait until it ends, {stop}, or use "
        f"another folder.{remove}"
    )


def _taken_over(output_dir: Path, owner: _Owner) -> str:
    where = "" if owner["host"] == socket.gethostname() else f" on {owner['host']}"
    hours = (time.time() - owner["started"]) / 3600
    return (
        f"warning: the last run in {output_dir} (process {owner['pid']}{where}, started {hours:.1f} hours ago) ended "
        "without cleaning up; this run takes over the folder"
    )
