"""The process that started this one, if it is a launcher: torch's, accelerate's, or a command of this project.

A rank must not outlive its launcher. A run that a shell started must outlive the shell (`nohup`, `disown`), so a parent
counts as a launcher on evidence only.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

PARENT = "FINETUNE_PARENT"  # process id of the command of this project that started this process


def find() -> int | None:
    """Process id of the launcher that started this process, or None if it was started by a shell or a scheduler."""
    parent = os.getppid()
    ours = os.environ.get(PARENT) == str(parent)
    return parent if ours or "TORCHELASTIC_RUN_ID" in os.environ or accelerate_arguments() is not None else None


def accelerate_arguments() -> list[str] | None:
    """The arguments of the `accelerate launch` that started this process; None for other parents.

    accelerate does not pass on how many processes it was asked for, so its command line is read.
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


def is_gone(parent: int) -> bool:
    """Whether the process that was this one's parent has ended."""
    if sys.platform == "win32":  # the parent's id stays the same after its death
        import psutil

        return not psutil.pid_exists(parent)
    return os.getppid() != parent


# --- the end of a parent is the end of its children ------------------------------------------------------------------


def signal_at_end_of(parent: int, number: int = signal.SIGTERM) -> None:
    """On Linux, have the kernel send signal `number` to this process when the thread that started it ends.

    Elsewhere there is no such signal, and `is_gone` has to be polled. The setting survives exec, but not fork.
    """
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if is_gone(parent):  # between the fork and this line
            os.kill(os.getpid(), number)


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def child_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """`env` (that of this process by default) for a child that is to end with this process."""
    return {**(os.environ if env is None else env), PARENT: str(os.getpid())}


# --- restarts: `--max-restarts` of torchrun and accelerate -----------------------------------------------------------


def restarts() -> int:
    """How many times this launch has started its ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@functools.cache  # the launcher may have gone by the second call
def launch_id() -> str | None:
    """Names this launch: the same in all its restarts, another in every new launch. None without a launcher.

    TORCHELASTIC_RUN_ID alone is not enough: it is `none` by default, and a job script may give it the same value in
    every submission.
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
