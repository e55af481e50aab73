"""Signals, and the end of a launcher, in the process that gets them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.runtime.ranks import interrupt, launcher
from tests.helpers import launch


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, no signal so far, and this process' handlers afterwards."""
    for name in (launcher.PARENT, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(interrupt, "state", interrupt.State())
    monkeypatch.setattr(interrupt, "drop_closed_output", lambda: None)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    launcher.launch_id.cache_clear()
    yield
    launcher.launch_id.cache_clear()
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def send(number: int) -> None:
    interrupt.on_signal(number, None)


def test_the_end_of_the_launcher_after_ctrl_c_is_no_second_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late: a busy launcher takes its time. A third signal is one."""
    interrupt.state.launcher = os.getppid()
    with interrupt.deferred():
        send(signal.SIGINT)
        assert interrupt.requested() and interrupt.reason() == "SIGINT"
        interrupt.state.requested_at = time.monotonic() - 60
        monkeypatch.setattr(launcher, "is_gone", lambda parent: True)
        send(signal.SIGTERM)
        assert interrupt.reason() == "SIGINT"
        with pytest.raises(interrupt.Interrupted):
            send(signal.SIGTERM)


def test_the_reason_is_the_launcher_even_if_its_threads_end_late(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getppid()
    interrupt.state.launcher = parent
    with interrupt.deferred():
        send(signal.SIGTERM)  # the kernel's, when the main thread has ended
        assert interrupt.reason() == "SIGTERM"
        monkeypatch.setattr(launcher, "is_gone", lambda parent: True)
        assert interrupt.reason() == f"the end of its launcher (process {parent})"


def test_what_is_being_written_is_finished_first() -> None:
    done = []
    with pytest.raises(interrupt.Interrupted, match="SIGTERM"), interrupt.finishing():
        send(signal.SIGTERM)
        done.append("written")
    assert done == ["written"]


def test_nohup_is_respected() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt.install()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt.install()
    assert signal.getsignal(signal.SIGHUP) is interrupt.on_signal


def test_output_whose_reader_has_ended_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for closed in (True, False):
        reader, writer = os.pipe()
        if closed:
            os.close(reader)
        interrupt.drop_closed_output((writer,))
        assert os.write(writer, b"step 1") == 6  # BrokenPipeError without it
        if not closed:
            assert os.read(reader, 6) == b"step 1"


def test_steps_and_saving_take_their_time_after_a_request_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(interrupt, "time", SimpleNamespace(monotonic=lambda: now))

    def ends_after() -> int:
        """How many seconds from now a process that was asked to stop now is ended."""
        nonlocal now
        began = now
        while interrupt.idle_beyond_limit(began) is None:
            now += 1
        seconds, now = int(now - began), began
        return seconds

    assert ends_after() == interrupt.STUCK_SECONDS == 25
    with interrupt.deferred():
        assert ends_after() == interrupt.FIRST_STEP_SECONDS == 180
        now += 100
        interrupt.step_ended()
        assert ends_after() == 300
        now += 20
        interrupt.step_ended()
        assert ends_after() == 60  # the first step, which compiled, is no measure
        with interrupt.busy():
            now += 1000
            assert interrupt.idle_beyond_limit(now - 1000) is None
        assert interrupt.idle_beyond_limit(now - 1000) is None  # it has just got on
        now += 3
        interrupt.step_ended()
        assert ends_after() == 60  # saving is no part of a step
    assert ends_after() == 25
    with interrupt.finishing():
        now += 1000
        assert interrupt.idle_beyond_limit(now - 1000) is None


# The main thread never returns to the interpreter, as in a collective that waits for a rank that is stuck.
BLOCKED = """
import ctypes
from finetune.runtime.ranks import interrupt
interrupt.POLL_SECONDS = interrupt.STUCK_SECONDS = 0.05
interrupt.install()
interrupt.on_stuck(lambda message: print("recorded:", message, flush=True))
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
lock(mutex)
with interrupt.deferred():
    interrupt.step_ended()
    {before}
    print("ready", flush=True)
    lock(mutex)
"""


FORKED = """if interrupt.os.fork() == 0:
        interrupt.os.kill(interrupt.os.getpid(), 15)
        interrupt.os._exit(0)
    interrupt.os.wait()"""


@pytest.mark.skipif(sys.platform != "linux", reason="a deadlock in C")
@pytest.mark.parametrize("how", ["signal", "request", "signal to a forked child"])
@pytest.mark.process
def test_a_process_whose_main_thread_is_stuck_in_c_ends(tmp_path: Path, how: str) -> None:
    before = {"signal": "pass", "request": "interrupt.request('a test')", "signal to a forked child": FORKED}[how]
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED.format(before=before)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=launch.environment(tmp_path),
    ) as process:  # fmt: skip
        assert process.stdout and process.stdout.readline() == "ready\n"
        if how != "request":
            process.send_signal(signal.SIGINT)
        try:
            said, error = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 1
    reason = "a test" if how == "request" else "SIGINT"
    assert f"stopped by {reason}, but" in error and "another rank may be stuck" in error
    assert said == error.replace("error: ", "recorded: ")


# A command of this project that starts a rank; the rank says that it is there and computes.
COMMAND = """
import sys
from finetune.runtime import subprocesses
process = subprocesses.start([sys.executable, "-c", sys.argv[1]], stdout=sys.stdout)
process.wait()
"""


RANK = """
import os, signal
from finetune.runtime.ranks import interrupt, launcher
{before}
interrupt.install()
print(os.getpid(), flush=True)
{work}
"""


STOPS = "try:\n    signal.pause()\nexcept interrupt.Interrupted:\n    raise SystemExit(130)"


STUCK = "while True:\n    try:\n        signal.pause()\n    except BaseException:\n        pass"  # as libraries do


POLLED = "launcher.signal_at_end_of = lambda parent: None; import ctypes; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal")
@pytest.mark.parametrize(
    ("before", "work"),
    [("", STOPS), (POLLED, STOPS), ("interrupt.STUCK_SECONDS = 0.0", STUCK)],
    ids=["signal", "polling", "stuck"],
)
@pytest.mark.process
@pytest.mark.campaign
def test_a_rank_ends_with_the_command_that_started_it(tmp_path: Path, before: str, work: str) -> None:
    rank = RANK.format(before=before, work=work)
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, rank], stdout=subprocess.PIPE, text=True, env=launch.environment(tmp_path)
    ) as process:
        assert process.stdout
        number = int(process.stdout.readline())
        process.kill()
        try:
            process.communicate(timeout=60)  # returns when the rank, which holds the other end, has ended
        except subprocess.TimeoutExpired:
            os.kill(number, signal.SIGKILL)
            raise


FORKED_WORKER = """
import os, signal
from finetune.runtime.ranks import interrupt

interrupt.install()
with interrupt.deferred():  # in which a signal only asks this process to stop
    worker = os.fork()
    if worker == 0:
        signal.pause()
        os._exit(0)
    while os.read(os.open(f"/proc/{worker}/stat", os.O_RDONLY), 99).split()[2] != b"S":
        pass
    os.kill(worker, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_forked_worker_ends_at_its_first_signal(tmp_path: Path) -> None:
    """As `Dataset.map(num_proc=2)` expects of its workers, whose end it waits for."""
    command = [sys.executable, "-c", FORKED_WORKER]
    done = subprocess.run(
        command, capture_output=True, text=True, env=launch.environment(tmp_path), timeout=60, check=True
    )
    assert done.stdout == f"{-signal.SIGTERM}\n"
