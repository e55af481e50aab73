"""Ctrl-C, SIGTERM and the end of the launcher: outside training they end the program, inside it they end it after a
checkpoint. If the main thread cannot, because it waits for a rank that is stuck, a second thread ends the process.
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
from types import FrameType

from finetune.runtime import launcher

SAME_SIGNAL_SECONDS = 2.0  # a launcher passes on the Ctrl-C that the terminal already sent to every process
POLL_SECONDS = 1.0
# After a request to stop, the main thread may go on for this long without the end of a step. When one rank has ended,
# torch's launcher gives the others 30 s; together that is less than a minute.
STUCK_SECONDS = 25.0
FIRST_STEP_SECONDS = 180.0  # the same for the first step, which compiles
STEPS = 3  # a step may take this many times as long as the longest one so far
REPORT_SECONDS = 2.0  # for the last words of a process that is stuck, on a pipe or a disk that may be stuck, too

_deferred = 0  # how many blocks of `deferred` and `finishing` this process is in
_busy = 0  # the same for `busy`
_steps = 0  # steps of the training so far
_longest_step = 0.0  # seconds; the first step counts until there is a second one
_progress_at = 0.0  # when the main thread was last known to get on
_on_stuck: Callable[[str], None] | None = None
_wakeup: socket.socket | None = None  # the interpreter writes the number of each signal into it
_requested_at: float | None = None
_reason = ""
_launcher: int | None = None  # process id, once `install` has found one
_launcher_is_gone = False  # and this process has taken notice


class Interrupted(BaseException):
    """The user, the cluster or the end of the launcher asked the run to stop. Exit code 130."""


def install() -> None:
    """Take over SIGINT, SIGTERM and SIGHUP, and follow the launcher if there is one. Call in the main thread."""
    global _launcher
    signal.signal(signal.SIGINT, _on_signal)
    signal.signal(signal.SIGTERM, _on_signal)
    # A closed terminal; `nohup` has it ignored, and so it stays.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _on_signal)
    found = launcher.find() if _launcher is None else None
    _launcher = _launcher or found
    if _wakeup is None:
        _start_watching()
    if found is not None:
        launcher.signal_at_end_of(found)


def _start_watching() -> None:
    """Start the second thread, and have the interpreter write signals to it while the main thread is in C."""
    global _wakeup
    reader, _wakeup = socket.socketpair()  # on Windows, only a socket can be waited for
    _wakeup.setblocking(False)
    signal.set_wakeup_fd(_wakeup.fileno(), warn_on_full_buffer=False)
    if hasattr(os, "register_at_fork"):  # a signal to a data worker is none to this process
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, a signal only sets a flag, which the training loop reads at its next step."""
    global _deferred, _progress_at
    _deferred += 1
    _progress_at = time.monotonic()
    try:
        yield
    finally:
        _progress_at = time.monotonic()
        _deferred -= 1


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Inside, a process that was asked to stop may take its time: it writes a checkpoint, say. No part of a step."""
    global _busy, _progress_at
    _busy += 1
    try:
        yield
    finally:
        _progress_at = time.monotonic()
        _busy -= 1


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Inside, a signal waits for the end of the block, which writes something that should be whole.

    Raises:
        Interrupted: at the end, if the run was asked to stop since it began.
    """
    with deferred(), busy():
        yield
    if requested():
        raise Interrupted(reason())


def step_ended() -> None:
    """Note the end of a step of the training: by the host's clock, without waiting for a GPU."""
    global _steps, _longest_step, _progress_at
    now = time.monotonic()
    seconds = now - _progress_at
    _longest_step = seconds if _steps < 2 else max(_longest_step, seconds)
    _steps += 1
    _progress_at = now


def on_stuck(record: Callable[[str], None]) -> None:
    """Have `record(message)` called, from another thread, before this process is ended because it is stuck."""
    global _on_stuck
    _on_stuck = record


def requested() -> bool:
    """Whether a stop was asked for on this rank."""
    return _requested_at is not None


def reason() -> str:
    """Why this rank stops, for the user; after "stopped by"."""
    # The kernel's SIGTERM comes when the launcher's main thread has ended, and other threads of it may still be there.
    if _reason == "SIGTERM" and _launcher is not None and launcher.is_gone(_launcher):
        return _end_of_launcher(_launcher)
    return _reason or "a signal to another rank"


def _end_of_launcher(process: int) -> str:
    return f"the end of its launcher (process {process})"


def request(why: str) -> None:
    """Ask this rank to stop at its next step, from any thread."""
    global _requested_at, _reason
    if _requested_at is None:
        _requested_at, _reason = time.monotonic(), why


def drop_closed_output(streams: tuple[int, ...] = (1, 2)) -> None:
    """Send stdout and stderr nowhere if their reader has ended: writing to it would end this run before it has saved.

    Args:
        streams: their file descriptors.
    """
    if not hasattr(select, "poll"):
        return
    for stream in streams:
        with contextlib.suppress(OSError):
            poll = select.poll()
            poll.register(stream, 0)  # errors are reported without being asked for
            if any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0)):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _launcher_is_gone
    drop_closed_output()
    now = time.monotonic()
    repeated = _requested_at is not None and now - _requested_at > SAME_SIGNAL_SECONDS
    if _launcher is not None and not _launcher_is_gone and launcher.is_gone(_launcher):
        # Ctrl-C ends the launcher and this rank; that the launcher has gone is then no second, impatient Ctrl-C.
        _launcher_is_gone = True
        if requested():
            return
        request(_end_of_launcher(_launcher))
    request(signal.Signals(number).name)
    if not _deferred or repeated:
        raise Interrupted(reason())


def _watch(signals: socket.socket) -> None:
    """Notice the end of the launcher where the kernel does not send a signal, and bound what a request to stop takes.

    Args:
        signals: gets the numbers of signals, also of those whose handler has not run yet.
    """
    launcher_gone, arrived = False, ""
    since: float | None = None
    while True:
        latest = _next_signal(signals)
        arrived = arrived or latest
        # At the second look: the kernel's signal, which the main thread handles, comes first.
        if launcher_gone and not _launcher_is_gone and not arrived:
            _signal_main_thread()
        launcher_gone = _launcher is not None and launcher.is_gone(_launcher)
        if not (arrived or requested()):
            since = None
            continue
        since = time.monotonic() if since is None else since
        idle = _idle_beyond_limit(since)
        if idle is not None:
            request(arrived)  # in case that no handler has run; the process ends now
            _end(idle)


def _next_signal(signals: socket.socket) -> str:
    """Wait for POLL_SECONDS, or until a signal asks this process to stop. Returns its name, or an empty string."""
    if not select.select([signals], [], [], POLL_SECONDS)[0]:
        return ""
    ours = (number for number in signals.recv(4096) if signal.getsignal(number) is _on_signal)
    return next((signal.Signals(number).name for number in ours), "")


def _signal_main_thread() -> None:
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    else:
        signal.raise_signal(signal.SIGTERM)


def _limit() -> float:
    """Seconds that the main thread may now take to its next step, or to its end."""
    if not _deferred:
        return STUCK_SECONDS
    return max(STUCK_SECONDS, STEPS * _longest_step) if _steps else FIRST_STEP_SECONDS


def _idle_beyond_limit(since: float) -> float | None:
    """Seconds without progress since the request at `since`, if they are too many; else None."""
    idle = time.monotonic() - max(since, _progress_at)
    return idle if not _busy and idle >= _limit() else None


def _end(idle: float) -> None:
    """End this process, whatever its main thread waits for."""
    message = (
        f"process {os.getpid()} was stopped by {reason()}, but it did not end and finished no step for {idle:.0f} s: "
        "another rank may be stuck. The newest complete checkpoint remains."
    )

    def report() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"error: {message}\n".encode())  # sys.stderr may be locked by the main thread
        if _on_stuck is not None:
            _on_stuck(message)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    thread.join(REPORT_SECONDS)
    os._exit(1)
