"""Turns errors about unreadable or unwritable files into one-sentence messages."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from finetune.errors import RunError

_DISK = {
    errno.ENOSPC: "No space left on the disk",
    errno.EROFS: "The disk is read-only",
    errno.EIO: "The disk reports an input/output error",
    errno.EFBIG: "The file size limit of this process or file system is reached",
    errno.EDQUOT: "The disk quota of this user is used up",
}
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Sockets and processes raise these as well: they concern a file only if the error names one.
_PATH = {
    errno.EACCES: "Permission denied",
    errno.EPERM: "Permission denied",
    errno.ENOTDIR: "A part of the path is a file, not a folder",
    errno.EEXIST: "A file is in the place of a folder",
    errno.EISDIR: "The path is a folder, not a file",
    errno.ENAMETOOLONG: "The file name is too long",
}


def reason(error: BaseException) -> str | None:
    """Why a file could not be read or written; None if `error` is not about a file or a disk."""
    if not isinstance(error, OSError) or error.errno is None:
        return None
    return _DISK.get(error.errno) or (_PATH.get(error.errno) if error.filename is not None else None)


def reason_in_text(error: BaseException) -> str | None:
    """Why a file could not be written, from a library's error: safetensors and torch keep only the text or number of
    the system's error, and torch sometimes neither. None if the error is not about writing a file."""
    text = str(error)
    if number := re.search(r"\(os error (\d+)\)", text):  # as Rust writes it
        return _DISK.get(int(number[1]))
    for code, why in _DISK.items():
        if os.strerror(code) in text:
            return why
    lost = "PytorchStreamWriter failed" in text or "inline_container.cc" in text or "iostream error" in text
    return "A file could not be written" if lost else None


def failure(error: BaseException) -> RunError | None:
    """The error to report for a file that could not be read or written; None if `error` is not about a file or disk."""
    why = reason(error)
    if why is None:
        return None
    file = getattr(error, "filename", None)
    at = f": {file}" if file is not None else ""
    remedy = "Free some space" if error.errno in _FULL else "Check the path"  # pyright: ignore[reportAttributeAccessIssue]
    return RunError(f"{why}{at}. {remedy} or give another folder, then run again.")


@contextlib.contextmanager
def disk_errors(folder: Path, what: str, newest: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Report a full or failing disk as a RunError, whichever way a library raised it.

    Args:
        what: what is being written.
        newest: returns the name of the checkpoint to resume from, if there is one.

    Raises:
        RunError: the disk is full, or a library could not write `what`.
    """
    try:
        yield
    except Exception as error:
        # safetensors and torch.save wrap the operating system's error in their own and keep only its text.
        why = reason(error) or reason_in_text(error)
        full = isinstance(error, OSError) and error.errno in _FULL
        if isinstance(error, OSError) and not full:  # it names its file; `command.run_guarded` reports it
            why = None
        if shutil.disk_usage(folder).free < 2**20:
            why = "No space left on the disk"
        if why is None:
            raise
        remedy = "free some space" if "space" in why or "quota" in why else "check the disk"
        checkpoint = newest()
        after = f"The newest complete checkpoint is {checkpoint}: {remedy}" if checkpoint else remedy.capitalize()
        then = "set training.resume_from_checkpoint: true" if checkpoint else "run again"
        raise RunError(f"{why}: {what} in {folder} was not written. {after} and {then}.") from error
