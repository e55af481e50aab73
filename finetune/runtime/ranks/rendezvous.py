"""Rendezvous of ranks on several machines, in a store that may hold what earlier attempts have left.

torch's launchers keep their store when they restart the ranks (`--max-restarts`), and machines do not count restarts
alike: c10d restarts the healthy machines of a run without counting it. So rank 0 names each attempt, and answers the
others, which proves to them that it is the current rank 0.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from finetune.errors import UserError
from finetune.runtime.types import RankStore

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.1
CONNECT_SECONDS = 5.0
CLIENT_SECONDS = 30.0  # in which the store at an open port answers
WARN_SECONDS = 15.0  # without an answer, before a warning
ANSWER_SECONDS = 1.0  # rank 0 may take this long
RESTART_SECONDS = 60.0  # within which a restarted rank 0 replaces what an earlier one has left
_ATTEMPT, _EARLY = "finetune/attempt", "finetune/early"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address of the ranks' store, as one of the ranks was told.

    address:       MASTER_ADDR
    port:          MASTER_PORT
    rank:          of this process
    world_size:    number of ranks that are expected
    rank_0_here:   whether rank 0 is on this machine
    seconds:       how long to wait for the others
    setting:       name of that limit, if the user can set it
    """

    address: str
    port: int
    rank: int
    world_size: int
    rank_0_here: bool
    seconds: float = 600.0  # as torch's launchers wait for each other
    setting: str | None = None

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def rank_label(self) -> str:
        """Such as "rank 1 on node-b"."""
        return f"rank {self.rank} on {socket.gethostname()}"

    @property
    def limit_text(self) -> str:
        """Such as "600 s (training.join_timeout)"."""
        return f"{self.seconds:.0f} s" + (f" ({self.setting})" if self.setting else "")


def wait_for_port(endpoint: Endpoint, warn: Callable[[str], None]) -> None:
    """Wait until something accepts connections at the endpoint.

    Raises:
        UserError: nothing does in `endpoint.seconds`.
    """
    began, warned = time.monotonic(), False
    while True:
        try:
            socket.create_connection((endpoint.address, endpoint.port), CONNECT_SECONDS).close()
            return
        except OSError as error:
            why, waited = _explain_connection_error(endpoint, error), time.monotonic() - began
        if waited > endpoint.seconds:
            raise UserError(
                f"{_capitalize(endpoint.rank_label)} cannot reach rank 0 at {endpoint}, tried for "
                f"{endpoint.limit_text}: {why}. {_advice(endpoint)}"
            )
        if waited > WARN_SECONDS and not warned:
            warned = True
            warn(f"{endpoint.rank_label} waits for rank 0 at {endpoint}, up to {endpoint.limit_text}: {why}")
        threading.Event().wait(POLL_SECONDS)


def _explain_connection_error(endpoint: Endpoint, error: OSError) -> str:
    """What an error of `connect` means."""
    text = error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return (
            f"the name {endpoint.address} cannot be resolved here ({text}). Give the IP address of rank 0's machine "
            "instead (with torchrun's c10d: --local_addr on that machine)"
        )
    if not endpoint.rank_0_here and is_local_address(endpoint.address):
        return f"{endpoint.address} is this machine itself, and rank 0 is on another one ({text})"
    if isinstance(error, ConnectionRefusedError):
        return (
            f"{text}: that machine is up, but nothing listens on the port. Rank 0 has not started there or has ended, "
            "or the port or the machine is another one"
        )
    return f"{text}: no machine has that address, or a firewall or a missing route is between"


def _advice(endpoint: Endpoint) -> str:
    return (
        f"Start all machines within {endpoint.limit_text} of each other, give all of them the address of rank 0's "
        "machine and the same port (MASTER_ADDR and MASTER_PORT, --main_process_ip, --master_addr), and open all TCP "
        "ports between them: docs/two-machines.md."
    )


def is_local_address(address: str) -> bool:
    """Whether an address or name is one of this machine."""
    with contextlib.suppress(OSError):  # of the name
        for family, kind, _, _, where in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(where)
                return True
    return False


def open_store(endpoint: Endpoint, *, hosts_it: bool, timeout: timedelta, warn: Callable[[str], None]) -> TCPStore:
    """A client of the store at `endpoint`, which this process serves if it `hosts_it`.

    Args:
        timeout: of the client's later calls.

    Raises:
        UserError: the port is taken, or cannot be reached, or something else answers there.
    """
    from torch.distributed import DistError, TCPStore

    address = endpoint.address
    if not hosts_it:
        wait_for_port(endpoint, warn)
    elif not is_local_address(address):  # an address that is forwarded to this machine is fine, as in Kubernetes
        address = "localhost"
    found: list[TCPStore | DistError] = []

    def create() -> None:
        try:
            # With several tenants, another client of this process shares this server instead of opening the port again.
            found.append(
                TCPStore(
                    address, endpoint.port, endpoint.world_size, hosts_it, timedelta(seconds=CLIENT_SECONDS),
                    wait_for_workers=False, multi_tenant=True,
                )
            )  # fmt: skip
        except DistError as error:
            found.append(error)

    # torch waits without a limit for a program that accepts the connection and never answers.
    thread = threading.Thread(target=create, daemon=True)
    thread.start()
    thread.join(2 * CLIENT_SECONDS)
    store = found[0] if found else "no answer"
    if isinstance(store, str | DistError):
        raise UserError(_not_a_store(endpoint, hosts_it, str(store)))
    store.set_timeout(timeout)
    return store


def _foreign_address(endpoint: Endpoint) -> str:
    return (
        f"{endpoint.address}, at which the other ranks look for rank 0 (MASTER_ADDR), is not an address of "
        f"{socket.gethostname()}, on which rank 0 runs. They reach it only if that address is forwarded to this "
        "machine."
    )


def _not_a_store(endpoint: Endpoint, hosts_it: bool, text: str) -> str:
    """The message for a port that torch cannot use."""
    short = " ".join(text.split())[:200]
    if hosts_it:
        return (
            f"Rank 0 on {socket.gethostname()} cannot listen on port {endpoint.port} (MASTER_PORT): {short}. Another "
            f"program uses it, such as an earlier run that has not ended (`ss -ltnp 'sport = :{endpoint.port}'` lists "
            "it). End that program, or give all machines another port."
        )
    return (
        f"{_capitalize(endpoint.rank_label)} reaches a program at {endpoint} that is not the store of this run: "
        f"{short}. Check that {endpoint.address} is the machine of rank 0, and on that machine which program uses the "
        f"port (`ss -ltnp 'sport = :{endpoint.port}'`)."
    )


def start_attempt(
    store: RankStore,
    endpoint: Endpoint,
    *,
    failed: Callable[[str, str], None],
    give_up: Callable[[str, str], None],
    warn: Callable[[str], None],
) -> str:
    """Rank 0: name this attempt, and answer the other ranks from a thread. Returns the name.

    Args:
        failed: called with the name and what `announce_early` was given, if a rank fails before it joins.
        give_up: called with the name and a message if ranks have not joined in time.
    """
    attempt = uuid.uuid4().hex
    store.set(_ATTEMPT, attempt)
    if not is_local_address(endpoint.address):
        warn(_foreign_address(endpoint))

    def answer() -> None:
        with contextlib.suppress(Exception):  # the store has ended: its own watch notices
            missing = _answer_ranks(store, attempt, endpoint, failed, warn)
            if missing:
                give_up(attempt, _missing_ranks(endpoint, missing))

    threading.Thread(target=answer, daemon=True).start()
    return attempt


def _answer_ranks(
    store: RankStore,
    attempt: str,
    endpoint: Endpoint,
    failed: Callable[[str, str], None],
    warn: Callable[[str], None],
) -> set[int]:
    """Answer the other ranks. Returns those that have not joined in time."""
    waiting, began, warned = set(range(1, endpoint.world_size)), time.monotonic(), False
    while waiting:
        if store.check([_EARLY]):
            failed(attempt, store.get(_EARLY).decode())
            store.delete_key(_EARLY)  # no later attempt finds it
        for rank in sorted(waiting):
            if store.check([_hello_key(attempt, rank)]):
                store.set(_ack_key(attempt, rank, store.get(_hello_key(attempt, rank)).decode()), "")
                waiting.discard(rank)
        waited = time.monotonic() - began
        if waited > endpoint.seconds:
            return waiting
        if waiting and waited > WARN_SECONDS and not warned:
            warned = True
            arrived = _arrived(endpoint.world_size - len(waiting), endpoint)
            waits = f"{endpoint.rank_label} waits for {_name_ranks(waiting)} at {endpoint}"
            warn(f"{waits}, up to {endpoint.limit_text}: {arrived}")
        threading.Event().wait(POLL_SECONDS)
    return waiting


def _missing_ranks(endpoint: Endpoint, missing: set[int]) -> str:
    arrived = _arrived(endpoint.world_size - len(missing), endpoint)
    elsewhere = "" if is_local_address(endpoint.address) else f" {_foreign_address(endpoint)}"
    return (
        f"{_capitalize(_name_ranks(missing))} did not reach {endpoint} within {endpoint.limit_text}; "
        f"{endpoint.rank_label} waited: {arrived}.{elsewhere} Look at the output of the other machines. "
        f"{_advice(endpoint)}"
    )


def _arrived(count: int, endpoint: Endpoint) -> str:
    return f"{count} of {endpoint.world_size} ranks {'has' if count == 1 else 'have'} arrived"


def _name_ranks(ranks: Iterable[int]) -> str:
    """Such as "rank 1", "ranks 8-15" or "ranks 1, 3"."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    whole = found == list(range(found[0], found[-1] + 1))
    return "ranks " + (f"{found[0]}-{found[-1]}" if whole else ", ".join(map(str, found)))


def _capitalize(text: str) -> str:
    return text[0].upper() + text[1:]


def join_attempt(
    store: RankStore, endpoint: Endpoint, failed: Callable[[str, str], None], warn: Callable[[str], None]
) -> str:
    """Another rank: wait for rank 0's answer. Returns the name of the attempt.

    Args:
        failed: called with the newest name and what `announce_early` was given, or an empty string, if rank 0 does not
            answer as soon as it should. It ends this process if a failure has been announced.

    Raises:
        UserError: rank 0 has not joined in `endpoint.seconds`.
    """
    rank, me, began, warned = endpoint.rank, uuid.uuid4().hex, time.monotonic(), False
    # What is in the store when a rank joins for the first time is of this attempt; later, it may be of an earlier one.
    patience = RESTART_SECONDS if store.add(_present_key(rank), 1) > 1 else ANSWER_SECONDS
    attempt, since = "", time.monotonic()
    while True:
        current = store.get(_ATTEMPT).decode() if store.check([_ATTEMPT]) else ""
        if current != attempt:
            attempt, since = current, time.monotonic()
            store.set(_hello_key(attempt, rank), me)
        if attempt and store.check([_ack_key(attempt, rank, me)]):
            return attempt
        if time.monotonic() - since > patience:
            failed(attempt, store.get(_EARLY).decode() if store.check([_EARLY]) else "")
        waited = time.monotonic() - began
        if waited > endpoint.seconds:
            arrived = _arrived(sum(store.check([_present_key(one)]) for one in range(1, endpoint.world_size)), endpoint)
            raise UserError(
                f"Rank 0 did not reach {endpoint} within {endpoint.limit_text}; {endpoint.rank_label} waited: "
                f"{arrived}. Look at the output of the machine of rank 0. {_advice(endpoint)}"
            )
        if waited > WARN_SECONDS and not warned:
            warned = True
            warn(f"{endpoint.rank_label} waits for rank 0 to reach {endpoint}, up to {endpoint.limit_text}")
        threading.Event().wait(POLL_SECONDS)


def _present_key(rank: int) -> str:
    return f"finetune/came/{rank}"


def _hello_key(attempt: str, rank: int) -> str:
    return f"finetune/{attempt}/hello/{rank}"


def _ack_key(attempt: str, rank: int, process: str) -> str:
    return f"finetune/{attempt}/ack/{rank}/{process}"


def announce_early(store: RankStore, failure: str) -> None:
    """Announce a rank that fails before it has joined the others."""
    store.set(_EARLY, failure)
