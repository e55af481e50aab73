"""How ranks on several machines find each other in a store that may hold what earlier attempts have left.

torch's launchers keep their store when they restart the ranks (`--max-restarts`), and machines do not count restarts
alike: c10d restarts the healthy machines of a run without counting it. So rank 0 names each attempt, and answers the
others, which proves to them that it is the rank 0 of now.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Protocol

from finetune.errors import UserError

POLL_SECONDS = 0.1
CONNECT_SECONDS = 5.0
WARN_SECONDS = 30.0  # without an answer, before a warning
ANSWER_SECONDS = 1.0  # that rank 0 may take
RESTART_SECONDS = 60.0  # within which a restarted rank 0 replaces what an earlier one has left
_ATTEMPT, _EARLY = "finetune/attempt", "finetune/early"


class Store(Protocol):
    """What is used of torch's store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, value: int) -> int: ...
    def delete_key(self, key: str) -> bool: ...


def wait_for_port(address: str, port: int, seconds: float, warn: Callable[[str], None]) -> None:
    """Wait until something accepts connections there.

    Raises:
        UserError: nothing does for so long.
    """
    began, warned = time.monotonic(), False
    while True:
        try:
            socket.create_connection((address, port), CONNECT_SECONDS).close()
            return
        except OSError as error:
            why, waited = error.strerror or str(error), time.monotonic() - began
        if waited > seconds:
            raise UserError(
                f"The first machine cannot be reached from {socket.gethostname()} for {seconds:.0f} s: its address is "
                f"{address}, port {port} ({why}). Check that it runs, that all machines were given its address and the "
                "same port, and that no firewall is between them."
            )
        if waited > WARN_SECONDS and not warned:
            warned = True
            warn(f"waiting for the first machine at {address}:{port}, which does not answer ({why})")
        threading.Event().wait(POLL_SECONDS)


def begin(store: Store, world_size: int, failed: Callable[[str, str], None]) -> str:
    """Rank 0: name this attempt, and answer the other ranks from a thread. Returns the name.

    Args:
        failed: called with the name and what `announce_early` was given, if a rank does not get as far as to ask.
    """
    attempt = uuid.uuid4().hex
    store.set(_ATTEMPT, attempt)
    waiting = set(range(1, world_size))
    threading.Thread(target=_answer, args=(store, attempt, waiting, failed), daemon=True).start()
    return attempt


def _answer(store: Store, attempt: str, waiting: set[int], failed: Callable[[str, str], None]) -> None:
    with contextlib.suppress(Exception):  # the store has ended: its own watch notices
        while waiting:
            if store.check([_EARLY]):
                failed(attempt, store.get(_EARLY).decode())
                store.delete_key(_EARLY)  # no later attempt finds it
            for rank in sorted(waiting):
                if store.check([_hello(attempt, rank)]):
                    store.set(_ack(attempt, rank, store.get(_hello(attempt, rank)).decode()), "")
                    waiting.discard(rank)
            threading.Event().wait(POLL_SECONDS)


def join(
    store: Store, rank: int, seconds: float, failed: Callable[[str, str], None], warn: Callable[[str], None]
) -> str:
    """Another rank: wait for rank 0's answer. Returns the name of the attempt.

    Args:
        failed: called with the newest name and what `announce_early` was given, or an empty string, if rank 0 does not
            answer as soon as it should. It ends this process if a failure has been announced.

    Raises:
        UserError: rank 0 has not come for so long.
    """
    me, began, warned = uuid.uuid4().hex, time.monotonic(), False
    # What is there when a rank comes for the first time is of this attempt; later, it may be of an earlier one.
    patience = RESTART_SECONDS if store.add(f"finetune/came/{rank}", 1) > 1 else ANSWER_SECONDS
    attempt, since = "", time.monotonic()
    while True:
        current = store.get(_ATTEMPT).decode() if store.check([_ATTEMPT]) else ""
        if current != attempt:
            attempt, since = current, time.monotonic()
            store.set(_hello(attempt, rank), me)
        if attempt and store.check([_ack(attempt, rank, me)]):
            return attempt
        if time.monotonic() - since > patience:
            failed(attempt, store.get(_EARLY).decode() if store.check([_EARLY]) else "")
        waited = time.monotonic() - began
        if waited > seconds:
            raise UserError(
                f"Rank 0 has not started within {seconds:.0f} s after rank {rank} on {socket.gethostname()}. Look at "
                "the output of the first machine, and start all machines within that time."
            )
        if waited > WARN_SECONDS and not warned:
            warned = True
            warn("waiting for rank 0 to start")
        threading.Event().wait(POLL_SECONDS)


def _hello(attempt: str, rank: int) -> str:
    return f"finetune/{attempt}/hello/{rank}"


def _ack(attempt: str, rank: int, process: str) -> str:
    return f"finetune/{attempt}/ack/{rank}/{process}"


def announce_early(store: Store, failure: str) -> None:
    """Leave word of a rank that fails before it has met the others."""
    store.set(_EARLY, failure)
