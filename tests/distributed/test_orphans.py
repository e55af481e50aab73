"""No rank outlives its launcher, a signal reaches a run in a container, and a restarted run goes on."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune.engine.checkpoint import checkpoints
from tests.helpers import launch

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, adopts orphans"),
]
PATIENCE = 240  # seconds; what has not happened by then does not happen
PR_SET_CHILD_SUBREAPER = 36


def settings(model: Path, data: Path, out: Path, *extra: str) -> list[str]:
    return [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(data / "train.jsonl")),
        *("--model.backend", "transformers", "--training.global_batch_size", "4", "--training.output_dir", str(out)),
        *("--logging.logging_steps", "1", "--logging.generate_samples", "0", *extra),
    ]


@pytest.fixture
def adopted() -> Iterator[None]:
    """Orphans become children of this process, which can then wait for them."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def start(command: list[str], log: Path, cache: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=launch.environment(cache), cwd=cache
        )


def wait_until(happened: Callable[[], Any], log: Path) -> Any:
    """What `happened` returns once it is true."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if found := happened():
            return found
        time.sleep(0.05)
    raise AssertionError(log.read_text()[-5000:])


def in_training(log: Path) -> bool:
    return "step 3/" in log.read_text()


def end_of(pid: int) -> int | None:
    """The exit code of an adopted process, once it has one."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def saved(out: Path) -> dict[str, Any]:
    """The record of an interrupted run, every step of which is in a complete checkpoint."""
    record = launch.read(out)
    assert record["status"] == "interrupted" and len(record["losses"]) == record["steps"] >= 3
    assert checkpoints.damage(out / f"checkpoint-{record['steps']}") is None
    return record


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["accelerate", "torchrun"])
def test_ranks_save_and_end_when_their_launcher_is_killed(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, adopted: None, how: str
) -> None:
    """One process of `accelerate launch`, which forwards no signal, and two ranks of torchrun."""
    out, log = tmp_path / "out", tmp_path / "log"
    arguments = settings(tiny_model, tiny_data, out, "--training.max_steps", "100000", "--training.save_steps", "0")
    process = start([*launch.command(how), "-m", "finetune.train", *arguments], log, tmp_path)
    ranks: list[int] = []
    try:
        wait_until(lambda: in_training(log), log)
        ranks = [child.pid for child in psutil.Process(process.pid).children()]
        process.kill()
        process.wait()
        codes = [wait_until(lambda rank=rank: {"code": code} if (code := end_of(rank)) is not None else None, log)
                 for rank in ranks]  # fmt: skip
    finally:
        process.kill()
        for rank in ranks:
            if psutil.pid_exists(rank):
                os.kill(rank, signal.SIGKILL)
    assert codes == [{"code": 130}] * (2 if how == "torchrun" else 1), log.read_text()[-5000:]
    record = saved(out)
    reason = f"the end of its launcher (process {process.pid})"
    assert record["interrupted_by"] == reason
    assert log.read_text().count(f"Stopped by {reason}; ") == 1
    assert not (out / ".finetune.lock").exists()


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["python", "torchrun"])
def test_sigterm_saves_in_a_container(tiny_model: Path, tiny_data: Path, tmp_path: Path, how: str) -> None:
    """As process 1, to which the kernel passes no signal that it has no handler for. The launcher of a rank may be
    process 1, which is also where orphans go."""
    container = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a process namespace")
    out, log = tmp_path / "out", tmp_path / "log"
    arguments = settings(tiny_model, tiny_data, out, "--training.max_steps", "100000", "--training.save_steps", "0")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    command = command if how == "torchrun" else [sys.executable]
    process = start([*container, *command, "-m", "finetune.train", *arguments], log, tmp_path)
    try:
        wait_until(lambda: in_training(log), log)
        (first,) = psutil.Process(process.pid).children()
        first.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE)
    finally:
        for child in psutil.Process(process.pid).children() if process.poll() is None else ():
            child.kill()  # and with it its whole namespace
        process.kill()
    assert code == (130 if how == "python" else 1), log.read_text()[-5000:]
    assert saved(out)["interrupted_by"] == "SIGTERM"


STUCK = """
import os, signal, sys
from pathlib import Path
from finetune import train
from finetune.runtime.ranks import interrupt

interrupt.POLL_SECONDS, interrupt.STUCK_SECONDS, interrupt.STEP_FACTOR = 0.1, 1.0, 0
from finetune.engine.session import building
build = building.build_trainer


def build_stuck(*arguments, **named):
    built = build(*arguments, **named)
    trainer = built.trainer
    trained, saved = trainer.training_step, trainer.save_model

    def training_step(*arguments, **keywords):
        if os.environ["RANK"] == "1" and trainer.state.global_step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return trained(*arguments, **keywords)

    def save_model(*arguments, **keywords):
        Path("busy.txt").write_text(str(interrupt.state.busy))
        return saved(*arguments, **keywords)

    trainer.training_step, trainer.save_model = training_step, save_model
    return built


building.build_trainer = build_stuck
sys.exit(train.main())
"""


@pytest.mark.campaign
def test_a_rank_that_waits_for_a_stopped_one_ends_after_sigterm(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Rank 1 never gets on. Without a launcher, which would then kill it, as torch's does after 30 s."""
    (tmp_path / "stuck.py").write_text(STUCK)
    out, logs = tmp_path / "out", [tmp_path / "log0", tmp_path / "log1"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = settings(tiny_model, tiny_data, out, "--training.max_steps", "100000", "--training.save_steps", "2")
    ranks = []
    for rank in ("0", "1"):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with logs[int(rank)].open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(tmp_path / "stuck.py"), *words],
                    stdout=log, stderr=subprocess.STDOUT, env=launch.environment(tmp_path, **own), cwd=tmp_path,
                )
            )  # fmt: skip
    try:
        wait_until(lambda: in_training(logs[0]), logs[0])
        wait_until(lambda: psutil.Process(ranks[1].pid).status() == psutil.STATUS_STOPPED, logs[1])
        ranks[0].send_signal(signal.SIGTERM)
        code = ranks[0].wait(60)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = logs[0].read_text()
    assert code == 1 and "stopped by SIGTERM, but" in said, said[-5000:]
    record = launch.read(out)
    assert record["status"] == "failed" and "another rank may be stuck" in record["error"]
    assert checkpoints.damage(out / "checkpoint-2") is None
    assert (tmp_path / "busy.txt").read_text() == "1"


FAILS_ONCE = """
import os, sys
from finetune import train
from finetune.engine.session import building

build = building.build_trainer


def build_faulty(*arguments, **named):
    built = build(*arguments, **named)
    trainer = built.trainer
    healthy = type(trainer).training_step

    def training_step(self, *arguments, **keywords):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and self.state.global_step == 3:
            raise ValueError("the fault of this test")
        return healthy(self, *arguments, **keywords)

    type(trainer).training_step = training_step
    return built


building.build_trainer = build_faulty
sys.exit(train.main())
"""


@pytest.mark.campaign
def test_a_restarted_launch_goes_on(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """From its own newest checkpoint, in a folder that held another run, which it was to overwrite."""
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE)
    out = tmp_path / "out"
    (out / "checkpoint-50").mkdir(parents=True)
    checkpoints.seal(out / "checkpoint-50", {"step": 50, "plan": "another"})
    (out / "run.json").write_text(json.dumps({"status": "done"}))
    words = settings(tiny_model, tiny_data, out, "--training.max_steps", "5", "--training.save_steps", "2")
    restarts = ["--max_restarts", "1", str(tmp_path / "fails_once.py")]
    done = subprocess.run(
        [*launch.command("cpu_2.yaml"), *restarts, *words, "--training.overwrite_output_dir", "true"],
        capture_output=True,
        text=True,
        env=launch.environment(tmp_path),
        cwd=tmp_path,
        timeout=launch.TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    record = launch.read(out)
    assert record["status"] == "done" and record["steps"] == 5 and len(record["losses"]) == 3
    assert record["resumed_from"] == str(out / "checkpoint-2")
    assert "Restart by the launcher: resuming from" in done.stdout
    assert [path.name for path in checkpoints.checkpoints(out)] == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
