"""Files that cannot be written: the operating system's reason as one sentence."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from finetune.errors import RunError

_DISK = {
    errno.ENOSPC: "No space left on the disk",
    errno.EROFS: "The disk is read-only",
    errno.EIO: "The disk reports an input/output error",
    errno.EFBIG: "The file size limit of this process or file system is reached",
}
if hasattr(errno, "EDQUOT"):  # not on Windows
    _DISK[errno.EDQUOT] = "The disk quota of this user is used up"
# These mean a file only if the error names one: sockets and processes fail with them too.
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


def failure(error: BaseException) -> RunError | None:
    """The sentence for a file that could not be read or written; None if `error` is not about a file or a disk."""
    why = reason(error)
    if why is None:
        return None
    file = getattr(error, "filename", None)
    at = f": {file}" if file is not None else ""
    remedy = "Free some space" if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)) else "Check the path"  # pyright: ignore[reportAttributeAccessIssue]
    return RunError(f"{why}{at}. {remedy} or give another folder, then run again.")


@contextlib.contextmanager
def no_space(folder: Path, what: str, hint: Callable[[], str] = str) -> Iterator[None]:
    """Turn the many ways in which libraries report a full disk into one message.

    Args:
        what: what is being written.
        hint: called for a further sentence.

    Raises:
        RunError: the disk filled up while `what` was being written.
    """
    try:
        yield
    except Exception as error:
        # safetensors and torch.save wrap the operating system's error in their own; its text is what remains.
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None))
        if not full and "No space left" not in str(error) and shutil.disk_usage(folder).free > 2**20:
            raise
        text = f"No space left on the disk of {folder} while writing {what}; it was not written."
        raise RunError(f"{text} Free some space and run again. {hint()}".strip()) from error
