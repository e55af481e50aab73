"""One run at a time in an output folder: a lock that the kernel releases when the process that holds it ends.

The lock is a POSIX record lock (fcntl), not flock: processes forked by a run do not inherit it, so no data worker can
keep it, and network file systems that support locks at all support these (NFS, Lustre with `-o flock`). Where there are
no locks, what the file says about its owner decides.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from finetune.errors import UserError
from finetune.runtime import distributed
from finetune.runtime.command import print_line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FILE_NAME = ".finetune.lock"

_held: set[Path] = set()  # record locks do not exclude the process that holds them


@contextlib.contextmanager
def held(output_dir: Path) -> Iterator[None]:
    """Keep other runs out of `output_dir` inside the block. For rank 0; nothing happens on other ranks.

    The folder is made if it is missing, and removed at the end if nothing else was written to it.

    Raises:
        UserError: another run is using the folder.
    """
    if not distributed.ranks().is_main:
        yield
        return
    path = Path(os.path.realpath(output_dir)) / FILE_NAME
    folders = (path.parent, *path.parent.parents)
    made = [folder for folder in folders if not os.path.lexists(folder)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _acquire(path, output_dir)
    except OSError as error:
        existing = next(folder for folder in folders if os.path.lexists(folder))
        if existing.is_dir() and os.access(existing, os.W_OK):
            raise UserError(
                f"training.output_dir is {output_dir}, where {FILE_NAME} cannot be written: {error.strerror}. Give "
                "another folder."
            ) from error
        yield  # keeping.check_output, which comes next, refuses what is not a folder or cannot be written
        return
    try:
        yield
    finally:
        _release(path, lock)
        for folder in made:
            with contextlib.suppress(OSError):  # it holds the run's files
                folder.rmdir()


def _acquire(path: Path, output_dir: Path) -> int:
    """Lock the file and write this process into it. Returns its descriptor."""
    if path in _held:
        raise _in_use(output_dir, _this_process())
    while True:
        try:
            lock, is_new = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
        except FileExistsError:
            try:
                lock, is_new = os.open(path, os.O_RDWR), False
            except FileNotFoundError:  # its owner has just removed it
                continue
        try:
            free = _lock(lock)
            owner = _read(lock)
            if free is None:  # no locks on this file system
                free = is_new or (owner is not None and _has_ended(owner))
            if not free:
                raise _in_use(output_dir, owner, path)
            if not _is_still(path, lock):  # its owner removed it at its end, after this process had opened it
                os.close(lock)
                continue
        except BaseException:
            os.close(lock)
            raise
        if owner is not None:
            _print_taken_over(output_dir, owner)
        os.truncate(lock, 0)
        os.pwrite(lock, json.dumps(_this_process()).encode(), 0)
        _held.add(path)
        return lock


def _release(path: Path, lock: int) -> None:
    """Remove the lock file, then unlock it: a process that has opened it meanwhile finds it gone, and tries again."""
    _held.discard(path)
    if fcntl is None:  # Windows removes no open file
        os.close(lock)
    with contextlib.suppress(OSError):  # the user has removed the folder, or its disk has gone
        path.unlink()
    if fcntl is not None:
        os.close(lock)


def _lock(lock: int) -> bool | None:
    """Lock an open file: True if this process has it now, False if another one has it, None if that is unknown."""
    if fcntl is None:
        return None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        return None  # ENOLCK, ENOSYS, EOPNOTSUPP: a network file system mounted without locks


def _is_still(path: Path, lock: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock))
    except FileNotFoundError:
        return False


def _read(lock: int) -> dict[str, Any] | None:
    """The process that wrote the file, or None if it is empty, as at the moment of its making."""
    try:
        found = json.loads(os.pread(lock, 4096, 0))
        return {"host": str(found["host"]), "pid": int(found["pid"]), "started": float(found["started"])}
    except (ValueError, KeyError, TypeError):
        return None


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def _has_ended(owner: dict[str, Any]) -> bool:
    """Whether a process is known to have ended. Nothing is known about other machines."""
    if owner["host"] != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) > 1  # the id is another process's now
    except psutil.NoSuchProcess:
        return True


def _in_use(output_dir: Path, owner: dict[str, Any] | None, path: Path | None = None) -> UserError:
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
        f"training.output_dir is in use by another run: {output_dir} ({who}). Wait for its end, {stop}, or give "
        f"another folder.{remove}"
    )


def _print_taken_over(output_dir: Path, owner: dict[str, Any]) -> None:
    where = "" if owner["host"] == socket.gethostname() else f" on {owner['host']}"
    hours = (time.time() - owner["started"]) / 3600
    print_line(
        f"warning: the last run in {output_dir} (process {owner['pid']}{where}, started {hours:.1f} hours ago) ended "
        "without cleaning up; this run takes the folder over",
        style="yellow",
    )
