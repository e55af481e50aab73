"""Handles Ctrl-C, SIGTERM and the end of the launcher: during training the process saves a checkpoint and exits,
otherwise it exits at once. If the main thread is blocked by a stuck rank, a watcher thread ends the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from finetune.runtime.ranks import distributed, launcher

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SIGNAL_SECONDS = 2.0  # within this time, a second signal is the same Ctrl-C, forwarded by the launcher
POLL_SECONDS = 1.0
# After a stop request, the process counts as stuck if it finishes no step for this long. When one rank has ended,
# torch's launcher gives the others 30 s; both together stay below a minute.
STUCK_SECONDS = 25.0
FIRST_STEP_SECONDS = 180.0  # the same for the first step, which compiles
STEP_FACTOR = 3  # a step may take this many times as long as the longest step so far
REPORT_SECONDS = 2.0  # for the error message of a stuck process, whose output or disk may be stuck as well


@dataclass(kw_only=True)
class State:
    """Whether this process was asked to stop, and what its main thread has done so far. Of the watcher thread and the
    signal handler, only the latter changes it."""

    deferred: int = 0  # nesting depth of `deferred` and `finishing`
    busy: int = 0  # nesting depth of `busy`
    steps: int = 0  # training steps so far
    longest_step: float = 0.0  # seconds; excludes the first step once there is a second one
    progress_at: float = 0.0  # when the main thread last made progress
    on_stuck: Callable[[str], None] | None = None
    requested_at: float | None = None
    reason: str = ""
    launcher: int | None = None  # process id, once `install` has found one
    launcher_end_handled: bool = False


state = State()
_wakeup: int | None = None  # file descriptor to which the interpreter writes the number of each signal


class Interrupted(BaseException):
    """The run was asked to stop by the user, the cluster or the end of its launcher. Exit code 130."""


def install() -> None:
    """Handle SIGINT, SIGTERM and SIGHUP, and watch for the end of the launcher. Call in the main thread."""
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    # SIGHUP: the terminal was closed. Stays ignored under `nohup`.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, on_signal)
    found = launcher.find() if state.launcher is None else None
    state.launcher = state.launcher or found
    if _wakeup is None:
        _start_watching()
    if found is not None:
        launcher.signal_at_end_of(found)


def _leave_signals_to_worker() -> None:
    """In a forked process, such as a worker of `Dataset.map(num_proc=2)`: signals end it as they would without this
    module. A handler that only notes a stop request would leave the parent waiting for a worker that it has ended."""
    signal.set_wakeup_fd(-1)  # or its signals would reach the parent
    for number in HANDLED:
        if signal.getsignal(number) is on_signal:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install` for the time of a block, in a program whose own handlers come back after it. Does nothing outside the
    main thread, which alone may handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in HANDLED}
    install()
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was not set from Python, and cannot be set back
                signal.signal(number, handler)


def _start_watching() -> None:
    """Start the watcher thread and have the interpreter send it all signals, even while the main thread runs C code."""
    global _wakeup
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    _wakeup = writer.detach()  # open as long as this process
    signal.set_wakeup_fd(_wakeup, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_leave_signals_to_worker)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Context in which a signal only sets a flag, which the training loop checks at every step."""
    state.deferred += 1
    state.progress_at = time.monotonic()
    try:
        yield
    finally:
        state.progress_at = time.monotonic()
        state.deferred -= 1


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Context in which a process that was asked to stop is not considered stuck, such as while writing a checkpoint.

    Not for use inside a training step.
    """
    state.busy += 1
    try:
        yield
    finally:
        state.progress_at = time.monotonic()
        state.busy -= 1


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Context that a signal does not interrupt, for writes that must be complete.

    Raises:
        Interrupted: at the end of the block, if a stop was requested.
    """
    with deferred(), busy():
        yield
    if requested():
        raise Interrupted(reason())


def step_ended() -> None:
    """Record the end of a training step by the host's clock, without a host-device sync."""
    now = time.monotonic()
    seconds = now - state.progress_at
    state.longest_step = seconds if state.steps < 2 else max(state.longest_step, seconds)
    state.steps += 1
    state.progress_at = now


def on_stuck(record: Callable[[str], None]) -> None:
    """Call `record(message)` from the watcher thread before it ends this process as stuck."""
    state.on_stuck = record


def requested() -> bool:
    """Whether this rank was asked to stop."""
    return state.requested_at is not None


def reason() -> str:
    """Why this rank stops, for messages: "stopped by ..."."""
    # The kernel sends SIGTERM when the launcher's main thread has ended; its other threads may end later.
    if state.reason == "SIGTERM" and state.launcher is not None and launcher.is_gone(state.launcher):
        return _launcher_ended(state.launcher)
    return state.reason or "a signal to another rank"


def _launcher_ended(process: int) -> str:
    return f"the end of its launcher (process {process})"


def request(why: str) -> None:
    """Ask this rank to stop at its next step. May be called from any thread."""
    if state.requested_at is None:
        state.requested_at, state.reason = time.monotonic(), why


def drop_closed_output(streams: tuple[int, ...] = (1, 2)) -> None:
    """Redirect stdout and stderr to the null device if their reader has ended: a write would end the run unsaved.

    Args:
        streams: file descriptors.
    """
    for stream in streams:
        with contextlib.suppress(OSError):
            poll = select.poll()
            poll.register(stream, 0)  # errors are always reported
            if any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0)):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream)
                os.close(null)


def on_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal: ask this rank to stop, and stop at once if nothing defers it or it is a second one."""
    drop_closed_output()
    now = time.monotonic()
    repeated = state.requested_at is not None and now - state.requested_at > SAME_SIGNAL_SECONDS
    if state.launcher is not None and not state.launcher_end_handled and launcher.is_gone(state.launcher):
        # Ctrl-C reaches the launcher and this rank: the end of the launcher must not count as a second Ctrl-C.
        state.launcher_end_handled = True
        if requested():
            return
        request(_launcher_ended(state.launcher))
    ended = distributed.ended_ranks() if number == signal.SIGTERM and launcher.is_library() else None
    request(ended or signal.Signals(number).name)
    if not state.deferred or repeated:
        raise Interrupted(reason())


def _watch(signals: socket.socket) -> None:
    """Detect the end of the launcher if the kernel sends no signal, and end this process if it does not stop in time.

    Args:
        signals: receives the numbers of all signals, even before their handler has run.
    """
    launcher_gone, arrived = False, ""
    since: float | None = None
    while True:
        latest = _next_signal(signals)
        arrived = arrived or latest
        gone = state.launcher is not None and launcher.is_gone(state.launcher)
        # One poll late, so that the kernel's own signal is handled first.
        if gone and launcher_gone and not state.launcher_end_handled and not arrived:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        launcher_gone = gone
        if not (arrived or requested()):
            since = None
            continue
        since = time.monotonic() if since is None else since
        if (idle := idle_beyond_limit(since)) is not None:
            request(arrived)  # in case no handler has run
            _end(idle)


def _next_signal(signals: socket.socket) -> str:
    """Wait for POLL_SECONDS, or until a signal asks this process to stop. Returns its name, or an empty string."""
    if not select.select([signals], [], [], POLL_SECONDS)[0]:
        return ""
    ours = (number for number in signals.recv(4096) if signal.getsignal(number) is on_signal)
    return next((signal.Signals(number).name for number in ours), "")


def _limit() -> float:
    """Seconds without progress after which the main thread counts as stuck."""
    if not state.deferred:
        return STUCK_SECONDS
    return max(STUCK_SECONDS, STEP_FACTOR * state.longest_step) if state.steps else FIRST_STEP_SECONDS


def idle_beyond_limit(since: float) -> float | None:
    """Seconds without progress since the stop request at `since`, if they exceed the limit; else None."""
    idle = time.monotonic() - max(since, state.progress_at)
    return idle if not state.busy and idle >= _limit() else None


def _end(idle: float) -> None:
    """End this process, whatever its main thread is blocked in."""
    message = (
        f"process {os.getpid()} was stopped by {reason()}, but finished no step for {idle:.0f} s and did not exit: "
        "a call of a library or another rank may be stuck. The newest complete checkpoint is unchanged."
    )

    def report() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"error: {message}\n".encode())  # the main thread may hold the lock of sys.stderr
        if state.on_stuck is not None:
            state.on_stuck(message)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    thread.join(REPORT_SECONDS)
    os._exit(1)
