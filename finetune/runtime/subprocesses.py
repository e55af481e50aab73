"""Starts child processes that, with all their ranks, end when this process ends."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.runtime.ranks import interrupt, launcher

STOP_SECONDS = 45  # for a launcher to end its ranks, which torch kills after 30 s


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its exit code and output.

    Unlike `subprocess.run`, it does not kill the command if this process is interrupted: a launcher that is killed
    leaves its ranks running on the GPUs.

    Raises:
        subprocess.TimeoutExpired: it was stopped after `timeout` seconds.
    """
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace", env=env)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:  # mostly signals
        stop(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def start(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, errors: str | None = None, **streams: Any
) -> subprocess.Popen[str]:
    """Start a command that ends when this process ends, even if this process is killed. Call in the main thread.

    On Linux the kernel sends it SIGTERM, which launchers forward to their ranks; on other systems this project's
    commands detect it themselves (`finetune.runtime.ranks.interrupt`).
    """
    parent = os.getpid()
    follow = functools.partial(launcher.signal_at_end_of, parent) if sys.platform == "linux" else None
    own = {**(os.environ if env is None else env), launcher.PARENT: str(parent)}
    return subprocess.Popen(command, env=own, text=True, errors=errors, preexec_fn=follow, **streams)


def first_error(output: str) -> str | None:
    """The first error in the output of a `finetune` command, with its indented lines (one per problem); None if there
    is none."""
    lines = iter(output.splitlines())
    for line in lines:
        if line.startswith("error: "):
            rest = itertools.takewhile(lambda one: one.startswith("  "), lines)
            return "\n".join([line.removeprefix("error: "), *rest])
    return None


@interrupt.busy()
def stop(process: subprocess.Popen[str]) -> None:
    """Terminate a process, which torch's launcher forwards to its ranks; kill it if it does not end in time."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
