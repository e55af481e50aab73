"""Runs of a command on ranks that are forked from a warm process (`warm_server`), one for each kind of stack.

A server starts when a test of the session, in whatever worker, first asks for its kind, and ends with the session. CPU
only.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers import ROOT

SOCKET = "FINETUNE_TESTS_WARM"  # where the server of a rank listens: a command that starts ranks itself asks there
SESSION = "FINETUNE_TESTS_SESSION"  # the folder of its servers, which the workers of pytest-xdist share
FOR_GPUS = "unsloth, code for GPUs"  # that it has for them, imported on a CPU
# Read when the stack is imported: a run that needs other values than its server's needs a process of its own.
READ_ON_IMPORT = ("UNSLOTH_", "HF_", "TRANSFORMERS_", "OMP_", "TORCH", "PYTHONHASHSEED")
OF_EACH_RUN = ("UNSLOTH_COMPILE_LOCATION", "HF_DATASETS_CACHE")  # of these prefixes, and allowed to differ


class Server:
    """A warm process, and how it is asked."""

    def __init__(self, kind: str) -> None:
        self._folder = session() / kind
        self._folder.mkdir(exist_ok=True)
        self.socket = self._folder / "socket"
        self._environment = environment(kind, self._folder)
        self.process: subprocess.Popen[str] | None = None  # if it was started here
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.socket.exists():
                self._start(kind)

    def _start(self, kind: str) -> None:
        with (self._folder / "log").open("w") as log, (session() / OPEN).open() as ends_with_the_session:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.warm_server", kind, str(self.socket)],
                stdin=ends_with_the_session,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                cwd=ROOT,
            )
        said = self.process.stdout
        assert said is not None
        with said:
            lines = iter(said.readline, "")  # libraries may speak first
            if not any(line == "ready\n" for line in lines):
                self.process.wait()  # what is left open is an error in some later test
                raise AssertionError((self._folder / "log").read_text()[-4000:])

    def run(
        self,
        argv: Sequence[str],
        *,
        ranks: int,
        env: Mapping[str, str],
        cwd: Path,
        timeout: float,
        merged: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """`python *argv` on so many ranks, to its end. Of several ranks the code is that of the first that failed.

        With `merged`, stderr comes with stdout.
        """
        for name in env.keys() | self._environment.keys():
            if name.startswith(READ_ON_IMPORT) and name not in OF_EACH_RUN:
                wanted, has = env.get(name), self._environment.get(name)
                assert wanted == has, f"{name} is {has} in the warm process and {wanted} here: start a fresh process"
        return ask(self.socket, argv, ranks=ranks, env=env, cwd=cwd, timeout=timeout, merged=merged)


OPEN = "open"  # a pipe that the session's first process holds open: servers end when it ends, however that happens


@functools.cache
def session() -> Path:
    """The folder of this session's servers. The process that asks first, pytest's own, makes it for its workers."""
    if SESSION not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="warm-"))
        os.mkfifo(folder / OPEN)
        _held.append(os.open(folder / OPEN, os.O_RDWR))
        os.environ[SESSION] = str(folder)
    return Path(os.environ[SESSION])


_held: list[int] = []


def environment(kind: str, folder: Path) -> dict[str, str]:
    """Of a server: as `launch.environment` has it for the ranks."""
    from tests.helpers import launch

    env = launch.environment(folder, UNSLOTH_COMPILE_LOCATION=str(folder / "made"))
    env["CUDA_VISIBLE_DEVICES"] = ""
    return env | (launch.CODE_FOR_GPUS if kind == FOR_GPUS else {})


@functools.cache
def server(kind: str) -> Server:
    """The one of this session."""
    found = Server(kind)
    if found.process:
        _started.append(found.process)
    return found


_started: list[subprocess.Popen[str]] = []


def close() -> None:
    """End all servers of this session, if it is this process's."""
    if not _held:
        for process in _started:
            process.returncode = 0  # it goes on, for other workers, and `subprocess` would warn of that
        return
    os.close(_held.pop())
    while _started:
        _started.pop().wait()
    shutil.rmtree(session(), ignore_errors=True)
    del os.environ[SESSION]
    session.cache_clear()
    server.cache_clear()


def kind_of(arguments: Sequence[str]) -> str:
    """The stack that a configuration asks for."""
    words = list(arguments)
    backend = words[words.index("--model.backend") + 1] if "--model.backend" in words else "auto"
    return "unsloth" if backend != "transformers" and importlib.util.find_spec("unsloth") else "transformers"


def ask(
    path: Path,
    argv: Sequence[str],
    *,
    ranks: int,
    env: Mapping[str, str],
    cwd: Path,
    timeout: float,
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Ask the server that listens there.

    Raises:
        subprocess.TimeoutExpired: the ranks were ended after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="warm-run-") as folder, socket.socket(socket.AF_UNIX) as connection:
        streams = {"stdout": Path(folder, "stdout"), "stderr": Path(folder, "stdout" if merged else "stderr")}
        own = {"CUDA_VISIBLE_DEVICES": "", SOCKET: str(path)}
        request = {"argv": list(argv), "ranks": ranks, "env": {**env, **own}, "cwd": str(cwd), "timeout": timeout}
        connection.connect(str(path))
        request |= {name: str(file) for name, file in streams.items()}
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = connection.makefile().read()
        said = {file.name: file.read_text(errors="replace") for file in streams.values() if file.exists()}
    code = json.loads(answer) if answer else None
    if code is None:
        raise subprocess.TimeoutExpired(list(argv), timeout, output=said.get("stdout"), stderr=said.get("stderr"))
    return subprocess.CompletedProcess(list(argv), code, said.get("stdout", ""), said.get("stderr", ""))


# --- in place of what starts ranks in the project ---------------------------------------------------------------------


def run_command(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """In place of `finetune.runtime.subprocesses.run`: the same command, its ranks forked."""
    ranks, argv = parse(command)
    env = dict(os.environ if env is None else env)
    return ask(_socket_for(argv), argv, ranks=ranks, env=env, cwd=Path.cwd(), timeout=timeout or 540)


def follow(command: list[str], env: Mapping[str, str], about: str) -> tuple[int, str]:
    """In place of `finetune.bench.launch._follow`, without a bar."""
    from finetune.bench.launch import MARK

    done = run_command(command, env=env)
    said = [line for line in done.stdout.splitlines(keepends=True) if not line.startswith(MARK)]
    return done.returncode, done.stderr + "".join(said)


def parse(command: Sequence[str]) -> tuple[int, list[str]]:
    """Number of ranks, and what each runs, of a command that the project starts."""
    program, *words = command
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    assert program == sys.executable and words[0] == "-m", command
    return (int(words[4]), words[5:]) if words[:4] == launcher else (1, words)


def _socket_for(argv: Sequence[str]) -> Path:
    if SOCKET in os.environ:
        return Path(os.environ[SOCKET])
    return server("transformers").socket
