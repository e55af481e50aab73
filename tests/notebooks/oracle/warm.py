"""Sides of the oracle in forks of a process that has imported the libraries, each confined as a fresh one is.

For the project's own probes, whose imports would take ten times as long as the rest. Run as a program, it is that
process: `python -s -P warm.py FOLDER KIND` forks once for each job on stdin. All forks have the same folder, because
libraries read its path when they are imported; it is as it was after the imports each time.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.notebooks.oracle.sandbox import Finished


# --- who asks ---------------------------------------------------------------------------------------------------------


def run_libraries(path: str, given: bytes = b"", *, seconds: float, output: int = 2**24) -> Finished:
    """As `sandbox.run_libraries`, in a fork."""
    from tests.notebooks.oracle.sandbox import Finished

    process, folder = _process("unsloth" if json.loads(given)["unsloth"] else "plain")
    job = {name: f"{folder}.{name}" for name in FILES} | {"path": path, "seconds": seconds}
    Path(job["given"]).write_bytes(given)
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    ended = json.loads(process.stdout.readline())
    found, errors = (Path(job[name]).read_bytes() for name in FILES[1:])
    return Finished(ended["code"], found[:output], errors, ended["why"] or "output" * (len(found) > output))


@functools.cache
def _process(kind: str) -> tuple[Any, str]:
    """The process that forks, and the folder of its forks. It ends with this one, whose pipe it reads."""
    from tests.notebooks.oracle import sandbox, stand_ins

    parent = tempfile.mkdtemp(prefix="finetune-oracle-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = os.path.join(parent, kind)
    os.mkdir(folder)
    process = subprocess.Popen(
        [*sandbox.PYTHON, os.path.abspath(__file__), folder, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=sandbox.for_libraries(folder) | stand_ins.environment(folder) | {"PYTHONHASHSEED": "0"},
        cwd=folder,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process, folder


# --- the process that forks -------------------------------------------------------------------------------------------

FILES = ("given", "output", "errors")  # stdin, stdout and stderr of a fork
LIBRARIES = "datasets torch transformers peft.mapping_func trl.trainer.sft_trainer tokenizers pandas accelerate"


def main() -> None:
    """Import the libraries and fork for each job."""
    folder, kind = sys.argv[1:]
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(quiet, number)
    for name in [*(["unsloth"] if kind == "unsloth" else []), *LIBRARIES.split()]:
        importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("confining", Path(__file__).with_name("sandbox.py"))
    assert spec is not None and spec.loader is not None
    sys.modules["confining"] = sandbox = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(sandbox)
    del sys.modules["confining"]
    shutil.copytree(folder, f"{folder}.made", symlinks=True)
    answers.write("ready\n")
    for line in jobs:
        job = json.loads(line)
        sandbox.remove(folder)
        shutil.copytree(f"{folder}.made", folder, symlinks=True)
        process = os.fork()
        if not process:
            _side(sandbox, folder, job)
        answers.write(json.dumps(_end(sandbox, process, time.monotonic() + job["seconds"])) + "\n")


def _side(sandbox: Any, folder: str, job: dict[str, Any]) -> None:
    """One side, in a fork, with the job as its stdin."""
    os.setsid()
    os.chdir(folder)
    for number, name in enumerate(FILES):
        os.dup2(os.open(job[name], os.O_RDWR | os.O_CREAT | (os.O_TRUNC if number else 0)), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.argv = [job["path"]]
    try:
        sandbox.main(folder, job["path"], empty=False)  # the libraries have made files in it
    except BaseException as error:  # whatever it is, the fork ends here
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        os._exit(70)  # a side that answers has left before


def _end(sandbox: Any, process: int, limit: float) -> dict[str, Any]:
    """Wait for a fork, and end it if it exceeds a limit."""
    why = ""
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if why := sandbox.excess(process) or ("seconds" if time.monotonic() > limit else ""):
            os.kill(process, signal.SIGKILL)
            ended = os.waitpid(process, 0)
            break
        time.sleep(0.02)
    return {"code": os.waitstatus_to_exitcode(ended[1]), "why": why}


if __name__ == "__main__":
    main()
