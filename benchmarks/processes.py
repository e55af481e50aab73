"""Commands of which none outlives the benchmark: a rank left on a GPU takes a share of whatever is measured next."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from finetune.runtime.subprocesses import STOP_SECONDS

RUNNING: list[subprocess.Popen[str]] = []  # all that were started

Key, Place, Result = TypeVar("Key"), TypeVar("Place"), TypeVar("Result")


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    output: IO[str],
    timeout: float | None = None,
) -> int | None:
    """Run a command, all that it says into `output`. Its exit code; None where it took too long, and was ended with all
    that it started."""
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words, env=env, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    RUNNING.append(process)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        end([process])
        return None


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Ask launchers to end their ranks, which are in sessions of their own; then insist."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        os.killpg(process.pid, signal.SIGTERM)
    for process in alive:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end_with_this_one() -> None:
    """From here on a signal that ends this process ends all that it started before."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)


def _stop(number: int, frame: Any) -> None:
    end(RUNNING)
    sys.stdout.flush()
    os._exit(128 + number)  # other threads still wait for what has just been ended


def side_by_side(work: Mapping[Key, Callable[[Place], Result]], places: Sequence[Place]) -> dict[Key, Result]:
    """Call each with one of `places` (GPUs, say), as many at a time as there are; the results by key."""
    free: queue.Queue[Place] = queue.Queue()
    for place in places:
        free.put(place)

    def in_a_place(call: Callable[[Place], Result]) -> Result:
        place = free.get()
        try:
            return call(place)
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(places)) as pool:
        return dict(zip(work, pool.map(in_a_place, work.values()), strict=True))


def say(text: str) -> None:
    """Plain lines, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
