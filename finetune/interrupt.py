"""Ctrl-C and SIGTERM: outside training they end the program, inside it they end it after a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

SAME_SIGNAL_SECONDS = 2.0  # a launcher passes on the Ctrl-C that the terminal already sent to every process

_training = False
_requested_at: float | None = None


class Interrupted(BaseException):
    """The user or the cluster asked the run to stop. Exit code 130."""


def install() -> None:
    """Take over SIGINT and SIGTERM. Call once, in the main thread."""
    signal.signal(signal.SIGINT, _on_signal)
    signal.signal(signal.SIGTERM, _on_signal)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, a signal only sets a flag, which the training loop reads at its next step."""
    global _training
    _training = True
    try:
        yield
    finally:
        _training = False


def requested() -> bool:
    """Whether a stop was asked for on this rank."""
    return _requested_at is not None


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _requested_at
    now = time.monotonic()
    repeated = _requested_at is not None and now - _requested_at > SAME_SIGNAL_SECONDS
    if _requested_at is None:
        _requested_at = now
    if not _training or repeated:
        raise Interrupted(signal.Signals(number).name)
