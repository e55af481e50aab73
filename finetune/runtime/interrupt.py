"""Ctrl-C, SIGTERM and the end of the launcher: outside training they end the program, inside it they end it after a
checkpoint."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from finetune.runtime import launcher

SAME_SIGNAL_SECONDS = 2.0  # a launcher passes on the Ctrl-C that the terminal already sent to every process
POLL_SECONDS = 1.0
# A rank whose launcher is gone ends within this time, as torch's launcher would see to: it kills after 30 s. A
# checkpoint or a final model that is being written is not cut short.
END_SECONDS = 30.0

_deferred = 0  # how many blocks of `deferred` and `finishing` this process is in
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
    if _launcher is None:
        _launcher = launcher.find()
        if _launcher is not None:
            threading.Thread(target=_watch_launcher, args=(_launcher,), daemon=True).start()
            launcher.signal_at_end_of(_launcher)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, a signal only sets a flag, which the training loop reads at its next step."""
    global _deferred
    _deferred += 1
    try:
        yield
    finally:
        _deferred -= 1


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Inside, a signal waits for the end of the block, which writes something that should be whole.

    Raises:
        Interrupted: at the end, if the run was asked to stop since it began.
    """
    with deferred():
        yield
    if requested():
        raise Interrupted(reason())


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


def _watch_launcher(parent: int) -> None:
    """Notice the end of the launcher where the kernel does not send a signal, and bound the time that is left then."""
    while not launcher.is_gone(parent):
        time.sleep(POLL_SECONDS)
    time.sleep(POLL_SECONDS)  # for the kernel's signal, which the main thread handles
    if not _launcher_is_gone:
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        else:
            signal.raise_signal(signal.SIGTERM)
    idle = 0.0
    while idle < END_SECONDS:
        time.sleep(POLL_SECONDS)
        idle = 0.0 if _deferred else idle + POLL_SECONDS
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: the launcher (process {parent}) is gone and this rank cannot end by itself\n")
        sys.stderr.flush()
    os._exit(1)
