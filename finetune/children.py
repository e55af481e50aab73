"""Programs that this one starts: none of them, and none of their ranks, outlives it."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Mapping, Sequence

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
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=env
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:  # a signal above all
        stop(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def error_of(said: str) -> str | None:
    """The first error that a program of this project told, with its indented lines (one for each problem); None where
    it told none."""
    lines = iter(said.splitlines())
    for line in lines:
        if line.startswith("error: "):
            rest = itertools.takewhile(lambda one: one.startswith("  "), lines)
            return "\n".join([line.removeprefix("error: "), *rest])
    return None


def stop(process: subprocess.Popen[str]) -> None:
    """Ask it to end, which torch's launcher passes on to its ranks; insist where it does not."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
