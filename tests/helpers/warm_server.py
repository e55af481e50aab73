"""A process that has imported the stack once, and forks ranks from itself on request. Started by `tests.helpers.warm`.

python -m tests.helpers.warm_server KIND SOCKET, with what `warm` sets in the environment; ends when its stdin does.

Importing the stack costs seconds of CPU, a short run a fraction of one. Each request (one line of JSON: argv, ranks,
env, cwd, stdout, stderr, timeout) gets a supervisor, which stands in for the launcher: it forks the ranks, ends all of
them when one fails, when the time is up or when whoever asked is gone, and answers with an exit code. A rank runs its
command as a fresh interpreter would. What this cannot show: ranks with different hash seeds, and CUDA, which does not
survive a fork. The server makes no tensor, starts no thread and calls nothing of the project after it is ready.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

# What a rank imports by the time it trains, after its backend.
STACK = (
    *("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tensorboard", "torch.utils.tensorboard"),
    *("bitsandbytes", "psutil", "yaml", "rich.console", "rich.table", "pyarrow", "safetensors.torch"),
    *("torch._dynamo", "torch.distributed.tensor", "transformers.models.auto.modeling_auto", "transformers.trainer"),
    *("transformers.models.llama.modeling_llama", "trl.trainer.sft_trainer", "peft.tuners.lora"),
)
KINDS = {
    "transformers": STACK,
    "unsloth": STACK,
    "unsloth, code for GPUs": (),  # what its patches are tested on: it alone, with UNSLOTH_ALLOW_CPU=1
}
OWN = ("finetune", "patches")
# Of the project, what a rank imports by the time it trains. Imported anew after the start of the backend, so that no
# module has done anything yet; a command's own module, and what tests put others in place of, is left to the rank.
MODULES = (
    *("finetune.engine.session.opening", "finetune.engine.session.building", "finetune.engine.training.trainer"),
    *("finetune.run.story", "finetune.review"),
)
OWN_END_SECONDS = 1.5  # that ranks have to learn that another one has failed, and to end by themselves
END_SECONDS = 30  # that they have in all, as torchrun gives them
POLL_SECONDS = 0.02


def main() -> None:
    """Import, say so, and serve."""
    kind, path = sys.argv[1:]
    changed = warm(kind)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        readable = select.select([listener, sys.stdin], [], [])[0]
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in readable:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            supervise(connection, changed)
        connection.close()


def warm(kind: str) -> dict[str, str | None]:
    """Import the stack in the order of `runtime.bootstrap`; the variables that this set or, with None, removed."""
    from finetune.runtime import bootstrap
    from patches import EARLY

    bootstrap.set_environment()
    before = dict(os.environ)
    if kind != "transformers":
        needed = [patch.__name__ for patch in EARLY if patch.needed()]
        assert not needed, f"{needed} would have to be applied before Unsloth is imported, which a fork cannot do"
        refusal = bootstrap.import_unsloth()
        assert refusal is None, refusal
    for name in KINDS[kind]:
        importlib.import_module(name)
    if mapping := sys.modules.get("transformers.conversion_mapping"):
        mapping.get_checkpoint_conversion_mapping("llama")  # hundreds of patterns of all models, compiled once
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]
    for name in MODULES if KINDS[kind] else ():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    names = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    return {name: os.environ.get(name) for name in names}


# --- a launcher ------------------------------------------------------------------------------------------------------


def supervise(connection: socket.socket, changed: dict[str, str | None]) -> NoReturn:
    """Serve one request, and end."""
    with connection.makefile() as lines:
        request = json.loads(lines.readline())
    port = free_port()
    pids = []
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            connection.close()
            run_rank(request, rank, port, changed)
        pids.append(pid)
    code = follow(set(pids), connection, time.monotonic() + request["timeout"])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps(code).encode())
    os._exit(0)


def follow(running: set[int], connection: socket.socket, deadline: float) -> int | None:
    """Wait for the ranks: 0, the code of the first that failed, or None when the time was up."""
    code, late, failed_at = 0, False, None
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            if not code and (code := os.waitstatus_to_exitcode(status)):
                failed_at = time.monotonic()
                deadline = min(deadline, failed_at + END_SECONDS)
            continue
        if failed_at is not None and time.monotonic() > failed_at + OWN_END_SECONDS:
            failed_at = None
            for other in running:
                os.kill(other, signal.SIGTERM)
        gone = bool(select.select([connection], [], [], POLL_SECONDS)[0])
        if gone or time.monotonic() > deadline:
            late = not code
            for other in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(other, signal.SIGKILL)
            for other in running:
                os.waitpid(other, 0)
            break
    return None if late else code


def free_port() -> int:
    """Of this machine, now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- a rank ----------------------------------------------------------------------------------------------------------


def run_rank(request: dict[str, Any], rank: int, port: int, changed: dict[str, str | None]) -> NoReturn:
    """Become the process that was asked for."""
    os.setpgid(0, 0)  # with whatever it starts itself, it can be ended
    atexit._clear()  # what the server's libraries would tidy up is the server's
    for number, path in enumerate((os.devnull, request["stdout"], request["stderr"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    own_path = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    set_environment(request["env"], changed)
    if request["ranks"] > 1:
        world = str(request["ranks"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(request["cwd"])
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *given, *own_path]
    importlib.invalidate_caches()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the standard library's generator is seeded anew by the fork itself
    code = 0
    try:
        execute(request["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255)


def set_environment(given: dict[str, str], changed: dict[str, str | None]) -> None:
    """What was asked for, with what the import of the libraries did to it."""
    server = dict(os.environ)
    os.environ.clear()
    os.environ.update(given)
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        elif name not in given:
            os.environ[name] = value
    cache = os.environ.get("HF_DATASETS_CACHE")  # read when datasets is imported, and of each test's own choice
    if cache != server.get("HF_DATASETS_CACHE") and cache and "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_DATASETS_CACHE = Path(cache)


def execute(argv: list[str]) -> None:
    """What `python *argv` does."""
    if argv[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        main_module = type(sys)("__main__")
        sys.modules["__main__"] = main_module
        exec(compile(argv[1], "<string>", "exec"), main_module.__dict__)
    else:
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        sys.argv = list(argv)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
