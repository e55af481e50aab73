"""Start the shipped commands: through a launcher as a user does, or on ranks of a warm process (`warm`)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers import ROOT, warm

PROFILES = ROOT / "accelerate_configs"
SPIES = ROOT / "tests" / "spies"
TIMEOUT = 540  # seconds; a hang is a failure
WARM = {"1 rank": 1, "2 ranks": 2, "4 ranks": 4}
# Unsloth's code for GPUs, imported on a CPU.
CODE_FOR_GPUS = {"UNSLOTH_ALLOW_CPU": "1", "CUDA_VISIBLE_DEVICES": "", "UNSLOTH_DISABLE_STATISTICS": "1"}


_AT_START = dict(os.environ)  # before a test, or a library that it imports, has set a variable


def environment(cache: Path, **extra: str) -> dict[str, str]:
    """One thread a process (tests share few cores), a cache of its own, no hub."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in _AT_START.items() if name not in launcher}
    path = os.pathsep.join([str(ROOT), *filter(None, [_AT_START.get("PYTHONPATH")])])
    own = {"OMP_NUM_THREADS": "1", "FINETUNE_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return env | own | extra


@contextlib.contextmanager
def dashboard(folder: Path, *, cache: Path) -> Iterator[str]:
    """`finetune dashboard` on the runs below a folder, in a process. Its address, without a slash at the end."""
    start = [*command("python"), "-m", "finetune", "dashboard", str(folder), "--port", "0"]
    process = subprocess.Popen(start, stdout=subprocess.PIPE, text=True, env=environment(cache))
    assert process.stdout is not None
    try:
        yield next(found.group(1) for line in process.stdout if (found := re.search(r"(http://\S+?)/?#finetune", line)))
    finally:
        process.kill()
        process.communicate()


def command(how: str) -> list[str]:
    """ "python", "torchrun", or the name of a file in accelerate_configs/; what follows is a module or script."""
    if how == "python":
        return [sys.executable]
    if how == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    if how == "accelerate":
        return [sys.executable, "-m", "accelerate.commands.launch"]
    # Port 0 takes a free one: tests run side by side. The file itself is used as it is shipped.
    port = ["--main_process_port", "0"] if how in ("cpu_2.yaml", "ddp_2.yaml") else []
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(PROFILES / how), *port]


def run(
    how: str, arguments: list[str], *, cache: Path, script: Path | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run `finetune.train` (or `script`) to its end; stdout and stderr come back together as stdout.

    `how` is "1 rank", "2 ranks" or "4 ranks" of a warm process, or a launcher (see `command`) with fresh processes:
    for tests whose subject the launcher is.
    """
    target = [str(script)] if script else ["-m", "finetune.train"]
    env = environment(cache, **extra)
    if how in WARM:
        server = warm.server(warm.FOR_GPUS if "UNSLOTH_ALLOW_CPU" in extra else warm.kind_of(arguments))
        argv = [*target, *arguments]
        return server.run(argv, ranks=WARM[how], env=env, cwd=cache, timeout=TIMEOUT, merged=True)
    return subprocess.run(
        [*command(how), *target, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        env=env,
        cwd=cache,
        check=False,
    )


def command_with_ranks(
    module: str, arguments: list[str], *, cache: Path, kind: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that starts ranks itself: it and they are forked from one warm process."""
    server = warm.server(kind or warm.kind_of(arguments))
    argv = ["-m", "tests.helpers.warm_command", module, *arguments]
    return server.run(argv, ranks=1, env=environment(cache), cwd=cache, timeout=TIMEOUT)


def train(how: str, arguments: list[str], *, out: Path, cache: Path, code: int = 0, **extra: Any) -> dict[str, Any]:
    """Train into `out` and return its run.json; the output is shown where the exit code is another than `code`."""
    done = run(how, [*arguments, "--training.output_dir", str(out)], cache=cache, **extra)
    assert done.returncode == code, done.stdout[-8000:]
    return read(out)


def read(out: Path) -> dict[str, Any]:
    """The run.json of an output folder."""
    return json.loads((out / "run.json").read_text())


def on_the_installed_unsloth(code: str, cache: Path, **switches: str) -> subprocess.CompletedProcess[str]:
    """Run Python code that imports Unsloth's code for GPUs on this CPU. `switches` are read on its import, which
    asks for a fresh process."""
    env = environment(cache, **CODE_FOR_GPUS, UNSLOTH_COMPILE_LOCATION=str(cache / "made"), **switches)
    if not switches:
        server = warm.server(warm.FOR_GPUS)
        return server.run(["-c", code], ranks=1, env=env, cwd=cache, timeout=TIMEOUT)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False)


def packed_against_alone(
    model: Path, backend: str, documents: list[int], *extra: str, cache: Path, how: str = "1 rank"
) -> list[dict[str, Any]]:
    """What `tests.helpers.packed_against_alone` found, for packs of so many documents, with `extra` settings."""
    argv = [str(model), backend, ",".join(map(str, documents)), "--model.backend", backend, *extra]
    done = run(how, argv, cache=cache, script=ROOT / "tests" / "helpers" / "packed_against_alone.py")
    assert done.returncode == 0, done.stdout[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["documents"] for one in found] == documents
    return found


def python(argv: list[str], *, cache: Path, kind: str = "transformers") -> subprocess.CompletedProcess[str]:
    """`python *argv` on a warm process."""
    return warm.server(kind).run(argv, ranks=1, env=environment(cache), cwd=cache, timeout=TIMEOUT)
