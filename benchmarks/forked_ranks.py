"""A process that has imported the stack and forks the ranks of one run after another; started by `faults.py`.

Reads one JSON job per line from standard input and writes one JSON line per event to standard output. A job with "how"
is a launcher with its ranks, killed from outside or by a rank at a place in its work ("strike"); any other job
is ranks alone, run to their end, of which the one with "at" is killed at that file operation below "out" (0: none is
killed, and the operations are listed). A job runs `finetune.train`, its "script", or with "export" `finetune.export`.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import datasets  # noqa: F401  (imported before any fork, as the next: they take the seconds)
import peft  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401
from torch.utils.tensorboard import SummaryWriter  # noqa: F401
from trl import SFTTrainer  # noqa: F401

from finetune import train

OPERATIONS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.truncate", "os.chmod")
TIMEOUT = 240  # seconds that ranks alone may take
METHODS = {"first step": "training_step", "evaluation": "evaluate", "save": "_save_checkpoint"}  # of our SFTTrainer


def watch(out: str, at: int, facts: str) -> list[str]:
    """Record each operation that changes files below `out`, and SIGKILL this process at number `at`."""
    names: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = (*args, None, None)[:3]
            if not flags or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in OPERATIONS:
            path = args[0]
        else:
            return
        known = isinstance(path, str | os.PathLike)
        touched = os.fspath(path) + (str(args[1]) if len(args) > 1 else "") if known else ""
        # rmtree removes by names relative to an open folder: those count wherever they are.
        if out not in touched and not (event == "os.remove" and isinstance(path, str)):
            return
        names.append(f"{event} {path}".replace(out, "OUT"))
        if len(names) == at:
            with open(facts, "w") as file:
                json.dump({"at": names[-1], "before": names[-6:-1]}, file)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return names


def strike(job: dict[str, Any]) -> None:
    """Carry out the action, on this rank, its launcher or all of them; or fill the disk that the run writes to."""
    verb, target = job["action"].split()
    with open(job["file"], "w") as file:
        file.write(str(time.time()))
    if verb == "fill":
        with open(os.path.join(job["disk"], "filler"), "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"0" * 4096)
            except OSError:
                return
    number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}[verb]
    if target == "tree":
        os.killpg(0, number)  # the launcher began a session
    os.kill(os.getpid() if target == "rank" or job["how"] == "python" else os.getppid(), number)


def arm(job: dict[str, Any]) -> None:
    """Strike `after` seconds after this rank comes to `place` for the `nth` time; "start" is now. At "rename" a
    checkpoint gets its name."""
    times = 0

    def reached() -> None:
        nonlocal times
        times += 1
        if times == job["nth"]:
            timer = threading.Timer(job["after"], strike, [job])
            timer.daemon = True
            timer.start() if job["after"] else strike(job)

    if job["place"] == "start":
        reached()
    elif job["place"] == "rename":

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event == "os.rename" and os.path.basename(str(args[1])).startswith("checkpoint-"):
                reached()

        sys.addaudithook(hook)
    else:
        from finetune.engine.training.trainer import SFTTrainer

        name = METHODS[job["place"]]
        own = getattr(SFTTrainer, name)

        def announced(*args: Any, **named: Any) -> Any:
            reached()
            return own(*args, **named)

        setattr(SFTTrainer, name, announced)


def run_command(job: dict[str, Any]) -> int:
    """The job's command in this process; its exit code."""
    if job.get("export"):
        from finetune.export import command

        return command.main(job["arguments"])
    if not job.get("script"):
        return train.main(job["arguments"])
    os.environ["FINETUNE_BACKEND"] = "transformers"
    sys.argv = [job["script"], *job["arguments"]]
    try:
        runpy.run_path(job["script"], run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def print_into(log: str) -> None:
    """Send standard output and error to the end of a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def rank_of_launcher(job: dict[str, Any]) -> None:
    """One rank below torch's agent, or the only process of a run without launcher."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    with open(os.path.join(job["pids"], os.environ.get("RANK", "0")), "w") as file:
        file.write(str(os.getpid()))
    if (found := job.get("strike")) and int(os.environ.get("RANK", "0")) == found["rank"]:
        arm(found)
    code = run_command(job)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        sys.exit(code)


def launcher(job: dict[str, Any]) -> NoReturn:
    """What `torchrun` does, with ranks that are forks."""
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    os.setsid()
    print_into(job["log"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: Any = 1
    try:
        if job["how"] == "python":
            rank_of_launcher(job)
        else:
            args = run.parse_args(["--standalone", "--nproc_per_node", str(job["world"]), "script"])
            args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", job["log"]
            config, _, _ = run.config_from_args(args)
            config.start_method = "fork"
            elastic_launch(config, rank_of_launcher)(job)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    leave(code)


def rank_alone(job: dict[str, Any], rank: int) -> NoReturn:
    """One rank with a launcher's variables and no launcher."""
    print_into(job["log"])
    if job["world"] > 1:
        names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=job["world"], LOCAL_WORLD_SIZE=job["world"])
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    names = watch(job["out"], job["at"], job["facts"]) if job.get("at") is not None else []
    code = 99
    try:
        code = run_command(job)
    finally:
        if job.get("at") == 0:
            with open(job["facts"], "w") as file:
                json.dump(names, file)
        leave(code)


def run_ranks(job: dict[str, Any]) -> int:
    """Fork all ranks of a job and wait for them; the exit code furthest from 0."""
    pids = []
    for rank in range(job["world"]):
        pid = os.fork()
        if pid == 0:
            rank_alone(job, rank)
        pids.append(pid)
    until, codes = time.monotonic() + TIMEOUT, {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return max(codes.values(), key=abs)


def run_launcher(job: dict[str, Any]) -> int:
    """Fork a launcher, say which process it is, and wait for it."""
    pid = os.fork()
    if pid == 0:
        launcher(job)
    answer({"launcher": pid})
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def answer(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        answer({"done": run_launcher(job) if "how" in job else run_ranks(job)})
        if "ended" in job:
            open(job["ended"], "w").close()


if __name__ == "__main__":
    main()
