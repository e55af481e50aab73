"""Finds the launcher that started this process: torch's, accelerate's, or a command of this project.

A rank must not outlive its launcher, but a run started from a shell must outlive the shell (`nohup`, `disown`). So the
parent is only treated as a launcher on evidence.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
import time
from pathlib import Path

from finetune.runtime import files

PARENT = "FINETUNE_PARENT"  # process id of the `finetune` command that started this process


def find() -> int | None:
    """Process id of the launcher that started this process; None if a shell or a scheduler did."""
    parent = os.getppid()
    return parent if os.environ.get(PARENT) == str(parent) or is_library() else None


def is_library() -> bool:
    """Whether torch's or accelerate's launcher started this process, rather than a command of this project."""
    return "TORCHELASTIC_RUN_ID" in os.environ or accelerate_arguments() is not None


def accelerate_arguments() -> list[str] | None:
    """The arguments of the `accelerate launch` that started this process; None for other parents.

    They come from the parent's command line, because accelerate does not pass on the requested number of processes.
    """
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:  # set by accelerate launch, for every rank
        return None
    import psutil

    try:
        argv = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return None
    names = ("launch", "accelerate-launch", "accelerate.commands.launch")  # `accelerate launch` and its other spellings
    start = next((place for place, word in enumerate(argv) if word in names or Path(word).name in names), None)
    return None if start is None else argv[start + 1 :]


def environment() -> dict[str, str]:
    """The environment that the launcher itself was started with; empty if it cannot be read."""
    import psutil

    try:
        return psutil.Process(os.getppid()).environ()
    except psutil.Error:
        return {}


def leave_error(text: str) -> None:
    """Have torch's launcher end its own report with this rank's error, in place of a hint at tracebacks.

    The launcher calls the failure with the earliest time, in whole seconds, the root cause. The ranks that it ends
    because of this one may have the same second, so this one gets the second before.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    cause = {"py_callstack": text, "timestamp": str(int(time.time()) - 1)}
    with contextlib.suppress(OSError):
        files.write_json(Path(file), {"message": {"message": text, "extraInfo": cause}})


def is_gone(parent: int) -> bool:
    """Whether this process's original parent has ended."""
    return os.getppid() != parent


# --- children end with their parent ----------------------------------------------------------------------------------


def signal_at_end_of(parent: int) -> None:
    """On Linux, have the kernel send SIGTERM to this process when the thread that started it ends.

    Other systems have no such signal; poll `is_gone` there. The setting survives exec, but not fork.
    """
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if is_gone(parent):  # it ended between the fork and this line
            os.kill(os.getpid(), signal.SIGTERM)


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


# --- restarts: `--max-restarts` of torchrun and accelerate -----------------------------------------------------------


def restarts() -> int:
    """How many times this launch has restarted its ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@functools.cache  # the launcher may have ended by the second call
def launch_id() -> str | None:
    """An identifier of this launch, the same after each of its restarts and unique otherwise. None without a launcher.

    TORCHELASTIC_RUN_ID alone is not enough: it is `none` by default, and a job script may set the same value at every
    submission.
    """
    parent = find()
    if parent is None:
        return None
    import psutil

    try:
        started = psutil.Process(parent).create_time()
    except psutil.Error:  # it has just ended
        return None
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}@{socket.gethostname()}:{parent}:{started:.2f}"
