"""Start the ranks of a benchmark in processes of their own, follow them, and return what the first one found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import RunError, UserError
from finetune.runtime import subprocesses
from finetune.runtime.command import console, print_line

REQUEST, RESULT = "request.json", "result.json"
MARK = "finetune-bench-progress "  # a line of rank 0: MARK, steps done, steps in all
PATIENCE_SECONDS = 300  # that a rank waits for another in a collective
# NVLink's multicast stays off (see finetune.runtime.nccl.NO_MULTICAST); who has set it keeps the own value.
ALWAYS = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}


def ranks(
    module: str,
    world_size: int,
    request: Mapping[str, Any],
    *,
    about: str,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run `python -m module FOLDER` on `world_size` ranks of this machine; what rank 0 wrote (see `rank.serve`).

    Args:
        request: for the ranks, as JSON has it.
        about: what is shown while it runs.
        environment: variables of the ranks, over those of this process.

    Raises:
        UserError: what a rank said, when its input was wrong.
        RunError: a rank failed or died; the others have been stopped.
    """
    env = {**ALWAYS, **os.environ, **(environment or {})}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        Path(folder, REQUEST).write_text(json.dumps({"timeout_seconds": PATIENCE_SECONDS, **request}))
        command = [sys.executable, *(launcher if world_size > 1 else []), "-m", module, folder]
        code, said = _follow(command, env, about)
        if code:
            raise _failure(code, said, world_size)
        return json.loads(Path(folder, RESULT).read_text())


def _follow(command: list[str], env: Mapping[str, str], about: str) -> tuple[int, str]:
    """Run a command to its end, showing its progress: its exit code, and all else that it said."""
    said: list[str] = []
    with tempfile.TemporaryFile("w+", errors="replace") as errors, _progress(about) as show:
        process = subprocesses.start(command, stdout=subprocess.PIPE, stderr=errors, env=env)
        try:
            for line in process.stdout or ():
                if line.startswith(MARK):
                    show(*map(int, line.removeprefix(MARK).split()))
                else:
                    said.append(line)
            code = process.wait()
        except BaseException:  # a signal above all: no rank outlives this process
            subprocesses.stop(process)
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
        errors.seek(0)
        return code, errors.read() + "".join(said)


class _progress:
    """A bar on a terminal; one line at the start elsewhere."""

    def __init__(self, about: str) -> None:
        self._about = about
        self._bar: Any = None

    def __enter__(self) -> Any:
        if not console().is_terminal:
            print_line(self._about)
            return lambda done, total: None
        from rich.progress import Progress

        self._bar = Progress(console=console(), transient=True)
        self._bar.start()
        task = self._bar.add_task(self._about, total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _failure(code: int, said: str, world_size: int) -> UserError:
    """The error of a launch, in the words of the rank that failed first where it had any."""
    told = subprocesses.error_of(said)
    if told is not None:
        # The launcher ends with 1 whatever its ranks end with; each one's own code is in its report.
        own = {int(found) for found in re.findall(r"exitcode\s*:\s*(-?\d+)", said)} | {code}
        return (UserError if 2 in own else RunError)(told)
    ended = [
        (rank, int(number)) for rank, number in re.findall(r"rank\s*:\s*(\d+) [^\n]*\n\s*exitcode\s*:\s*(-?\d+)", said)
    ]
    # A rank that died comes first: an error of another one may only say that it lost its peer. Those that the launcher
    # itself ended, with SIGTERM, are not the reason.
    rank, number = min(ended, key=lambda one: (one[1] == -signal.SIGTERM, one[1] >= 0), default=("", 0))
    if number < 0:
        name = signal.Signals(-number).name
        return RunError(f"rank {rank} of {world_size} died ({name}); the others were stopped")
    own = re.split(r"^[EIW]\d{4} [^\n]*torch/distributed/elastic", said, maxsplit=1, flags=re.MULTILINE)[0]
    return RunError(f"the benchmark on {world_size} rank(s) failed with exit code {code}: {own[-3000:]}")


def world_sizes(given: list[int] | None, gpus: int, *, least: int = 1) -> list[int]:
    """The world sizes to measure: those given, or `least` and its doubles up to the number of GPUs (two on a CPU)."""
    most = gpus or 2
    return given or [world for world in (1, 2, 4, 8) if least <= world <= most] or [least]
