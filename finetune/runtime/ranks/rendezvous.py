"""The store in which ranks on several machines find each other, at MASTER_ADDR and MASTER_PORT.

torch's launchers keep it when they restart the ranks (`--max-restarts`), and machines do not count restarts alike: c10d
restarts the healthy machines of a run without counting it. So rank 0 names each attempt, and answers the others, which
proves to them that it is the current rank 0.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from finetune.errors import UserError
from finetune.runtime.ranks import distributed
from finetune.runtime.types import RankStore

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

START_SECONDS = 1800  # for each machine to prepare its data before the ranks connect
JOIN_SECONDS = 600.0  # for all machines to start, as torch's launchers wait for each other
POLL_SECONDS = 0.1
ANSWER_SECONDS = 1.0  # rank 0 may take this long
RESTART_SECONDS = 60.0  # within which a restarted rank 0 replaces what an earlier one has left
FAILURE = "finetune/failure"  # key of the first failure of an attempt
_ATTEMPT, _EARLY = "finetune/attempt", "finetune/early"
_HELLO, _ACK = "finetune/{attempt}/hello/{rank}", "finetune/{attempt}/ack/{rank}/{process}"

_client: TCPStore | None = None  # kept: on rank 0, it keeps the store alive
_name: str | None = None  # of this attempt, which all its ranks share and no earlier attempt had


def launcher_hosts_it() -> bool:
    """Whether torch's launcher hosts the store, rather than rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def address() -> str:
    """Such as "10.0.0.1:29500"."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def open_store(failed: Callable[[str], None]) -> RankStore:
    """A client of the store as the ranks of this attempt see it. Each has its own connection, because a call that waits
    holds up all others of a connection.

    Args:
        failed: called with the failure of a rank if rank 0 does not answer as soon as it should: it may be that rank.

    Raises:
        UserError: the store or rank 0 cannot be reached.
    """
    global _client, _name
    if _client is None:
        _client = _connect()
    if _name is None:
        _name = start_attempt(_client) if distributed.ranks().is_main else join_attempt(_client, failed)
    return _of_attempt(_name, _connect())


def attempt() -> str:
    """The name of this attempt, once the store is open."""
    return _name or ""


def announce_early(failure: str) -> None:
    """Announce that this rank fails before it has joined the others."""
    global _client
    if _client is None:
        _client = _connect()
    _client.set(_EARLY, failure)


def _of_attempt(name: str, store: Store) -> RankStore:
    from torch.distributed import PrefixStore

    return PrefixStore(f"finetune/{name}", store)


def _connect() -> TCPStore:
    """A client of the store, which torch's launcher hosts, or else rank 0 as long as it keeps one of its clients."""
    from torch.distributed import DistError, TCPStore

    me = distributed.ranks()
    hosts_it = me.is_main and not launcher_hosts_it()
    try:
        # With several tenants, another client of this process shares this server instead of opening the port again.
        store = TCPStore(
            os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "")), me.world_size, hosts_it,
            timedelta(seconds=JOIN_SECONDS), wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except (DistError, ValueError) as error:
        what = "listen at" if hosts_it else "reach rank 0 at"
        raise UserError(
            f"Rank {me.rank} on {socket.gethostname()} cannot {what} {address()} (MASTER_ADDR, MASTER_PORT): "
            f"{' '.join(str(error).split())[:200]}. {_ADVICE}"
        ) from None
    store.set_timeout(timedelta(seconds=START_SECONDS))
    return store


_ADVICE = (
    "Start all machines with the address of rank 0's machine and a free port of it, and open all TCP ports between "
    "them: docs/two-machines.md."
)


def start_attempt(store: Store) -> str:
    """Rank 0: name this attempt, and answer the other ranks from a thread. Returns the name."""
    attempt = uuid.uuid4().hex
    store.set(_ATTEMPT, attempt)
    threading.Thread(target=_answer_ranks, args=(store, attempt), daemon=True).start()
    return attempt


def _answer_ranks(store: Store, attempt: str) -> None:
    waiting = set(range(1, distributed.ranks().world_size))
    with contextlib.suppress(Exception):  # the store has ended: its own watch notices
        while waiting:
            if store.check([_EARLY]):
                _of_attempt(attempt, store).compare_set(FAILURE, "", store.get(_EARLY).decode())
                store.delete_key(_EARLY)  # no later attempt finds it
            for rank in sorted(waiting):
                if store.check([hello := _HELLO.format(attempt=attempt, rank=rank)]):
                    process = store.get(hello).decode()
                    store.set(_ACK.format(attempt=attempt, rank=rank, process=process), "")
                    waiting.discard(rank)
            threading.Event().wait(POLL_SECONDS)


def join_attempt(store: Store, failed: Callable[[str], None]) -> str:
    """Another rank: wait for rank 0's answer. Returns the name of the attempt.

    Args:
        failed: as for `open_store`.

    Raises:
        UserError: rank 0 has not joined in JOIN_SECONDS.
    """
    rank, me, began = distributed.ranks().rank, uuid.uuid4().hex, time.monotonic()
    # What is in the store when a rank joins for the first time is of this attempt; later, it may be of an earlier one.
    patience = RESTART_SECONDS if store.add(f"finetune/came/{rank}", 1) > 1 else ANSWER_SECONDS
    attempt, since = "", began
    while time.monotonic() - began < JOIN_SECONDS:
        current = store.get(_ATTEMPT).decode() if store.check([_ATTEMPT]) else ""
        if current != attempt:
            attempt, since = current, time.monotonic()
            store.set(_HELLO.format(attempt=attempt, rank=rank), me)
        if attempt and store.check([_ACK.format(attempt=attempt, rank=rank, process=me)]):
            return attempt
        if time.monotonic() - since > patience:
            for place, key in ((store, _EARLY), (_of_attempt(attempt, store), FAILURE)):
                if place.check([key]):
                    failed(place.get(key).decode())
        threading.Event().wait(POLL_SECONDS)
    raise UserError(
        f"Rank 0 did not reach {address()} within {JOIN_SECONDS:.0f} s of rank {rank} on {socket.gethostname()}. Look "
        f"at the output of the machine of rank 0. {_ADVICE}"
    )
