"""Programs that this one starts: none of them, and none of their ranks, outlives it."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.runtime import interrupt, launcher

STOP_SECONDS = 45  # that a launcher has to end its ranks: torch gives them 30 s, and then kills them


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its code and what it said.

    Not `subprocess.run`, which kills the command where this process is stopped meanwhile: a launcher that is killed
    leaves its ranks on the GPUs.

    Raises:
        subprocess.TimeoutExpired: it was stopped after `timeout` seconds.
    """
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace", env=env)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:  # a signal above all
        stop(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def start(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, errors: str | None = None, **streams: Any
) -> subprocess.Popen[str]:
    """Start a command that ends when this process does, even if that is killed. Call in the main thread.

    On Linux the kernel sends it SIGTERM, which launchers pass on to their ranks; elsewhere programs of this project
    notice by themselves (`finetune.runtime.interrupt`).
    """
    parent = os.getpid()
    follow = functools.partial(launcher.signal_at_end_of, parent) if sys.platform == "linux" else None
    env = launcher.child_environment(env)
    return subprocess.Popen(command, env=env, text=True, errors=errors, preexec_fn=follow, **streams)


def error_of(said: str) -> str | None:
    """The first error that a program of this project printed, with its indented lines (one per problem); None if
    it printed none."""
    lines = iter(said.splitlines())
    for line in lines:
        if line.startswith("error: "):
            rest = itertools.takewhile(lambda one: one.startswith("  "), lines)
            return "\n".join([line.removeprefix("error: "), *rest])
    return None


@interrupt.busy()
def stop(process: subprocess.Popen[str]) -> None:
    """Ask it to end, which torch's launcher passes on to its ranks; insist where it does not."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
