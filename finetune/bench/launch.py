"""Start the ranks of a benchmark in separate processes, show their progress, and return the result of rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import RunError, UserError
from finetune.runtime import launch_lines, subprocesses
from finetune.runtime.command import console, print_line
from finetune.text import counted

REQUEST, RESULT = "request.json", "result.json"
MARK = "finetune-bench-progress "  # a line of rank 0: MARK, steps done, total steps
TIMEOUT_SECONDS = 300  # of a collective
# NVLink multicast stays off (see finetune.runtime.machine.nccl.NO_MULTICAST) unless the user has set the variable.
DEFAULT_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}


def ranks(
    module: str,
    world_size: int,
    request: Mapping[str, object],
    *,
    title: str,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run `python -m module FOLDER` on `world_size` ranks of this machine. Returns the result of rank 0.

    Args:
        request: input of the ranks; must be serializable as JSON.
        title: shown with the progress.
        environment: environment variables of the ranks, in addition to those of this process.

    Raises:
        UserError: a rank reported invalid input.
        RunError: a rank failed or died; the others were stopped.
    """
    env = {**DEFAULT_ENVIRONMENT, **os.environ, **(environment or {})}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        Path(folder, REQUEST).write_text(json.dumps({"timeout_seconds": TIMEOUT_SECONDS, **request}))
        command = [*launch_lines.launch_command(world_size), "-m", module, folder]
        code, output = _follow(command, env, title)
        if code:
            raise failure_error(code, output, world_size)
        return json.loads(Path(folder, RESULT).read_text())


def _follow(command: list[str], env: Mapping[str, str], title: str) -> tuple[int, str]:
    """Run a command and show its progress. Returns its exit code and all other output."""
    output: list[str] = []
    with tempfile.TemporaryFile("w+", errors="replace") as errors, _progress(title) as show:
        process = subprocesses.start(command, stdout=subprocess.PIPE, stderr=errors, env=env)
        try:
            for line in process.stdout or ():
                if line.startswith(MARK):
                    show(*map(int, line.removeprefix(MARK).split()))
                else:
                    output.append(line)
            code = process.wait()
        except BaseException:  # a signal, for example: no rank may outlive this process
            subprocesses.stop(process)
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
        errors.seek(0)
        return code, errors.read() + "".join(output)


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, otherwise one line at the start. Call the result with the steps done and all."""
    if not console().is_terminal:
        print_line(title)
        yield lambda done, total: None
        return
    from rich.progress import Progress

    with Progress(console=console(), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def failure_error(code: int, output: str, world_size: int) -> UserError:
    """The error of a launch, with the message of the rank that failed first if it printed one."""
    message = subprocesses.first_error(output)
    if message is not None:
        # The launcher always exits with 1; the exit codes of the ranks are in its report.
        own = {int(found) for found in re.findall(r"exitcode\s*:\s*(-?\d+)", output)} | {code}
        return (UserError if 2 in own else RunError)(message)
    ended = [
        (rank, int(number))
        for rank, number in re.findall(r"rank\s*:\s*(\d+) \([^()\n]*\)\n\s*exitcode\s*:\s*(-?\d+)", output)
    ]
    # A rank that died comes first, because the errors of others may only be about the lost peer. Ranks ended by the
    # launcher, with SIGTERM, come last.
    rank, number = min(ended, key=lambda one: (one[1] == -signal.SIGTERM, one[1] >= 0), default=("", 0))
    if number < 0:
        name = signal.Signals(-number).name
        return RunError(f"rank {rank} of {world_size} died ({name}); the others were stopped")
    own = re.split(r"^[EIW]\d{4} [^\n]*torch/distributed/elastic", output, maxsplit=1, flags=re.MULTILINE)[0]
    return RunError(f"the benchmark on {counted(world_size, 'rank')} failed with exit code {code}: {own[-3000:]}")


def default_world_sizes(gpus: int) -> list[int]:
    """World sizes to measure: 2, 4 and 8, up to the number of GPUs; 2 on a CPU, and on one GPU, which is refused."""
    return [world for world in (2, 4, 8) if world <= gpus] or [2]
