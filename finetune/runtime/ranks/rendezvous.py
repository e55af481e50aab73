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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from finetune.errors import UserError

POLL_SECONDS = 0.1
CONNECT_SECONDS = 5.0
CLIENT_SECONDS = 30.0  # in which the store at an open port answers
WARN_SECONDS = 15.0  # without an answer, before a warning
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


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the ranks meet, as one of them was told.

    address:       MASTER_ADDR
    port:          MASTER_PORT
    rank:          of this process
    world_size:    number of ranks that are to come
    rank_0_here:   whether rank 0 is on this machine
    seconds:       how long to wait there
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
    def seen_from(self) -> str:
        """Such as "rank 1 on node-b"."""
        return f"rank {self.rank} on {socket.gethostname()}"

    @property
    def limit(self) -> str:
        """Such as "600 s (training.join_timeout)"."""
        return f"{self.seconds:.0f} s" + (f" ({self.setting})" if self.setting else "")


def wait_for_port(place: Place, warn: Callable[[str], None]) -> None:
    """Wait until something accepts connections there.

    Raises:
        UserError: nothing does for so long.
    """
    began, warned = time.monotonic(), False
    while True:
        try:
            socket.create_connection((place.address, place.port), CONNECT_SECONDS).close()
            return
        except OSError as error:
            why, waited = _why(place, error), time.monotonic() - began
        if waited > place.seconds:
            raise UserError(
                f"{_capital(place.seen_from)} cannot reach rank 0 at {place}, tried for {place.limit}: "
                f"{why}. {_what_to_check(place)}"
            )
        if waited > WARN_SECONDS and not warned:
            warned = True
            warn(f"{place.seen_from} waits for rank 0 at {place}, up to {place.limit}: {why}")
        threading.Event().wait(POLL_SECONDS)


def _why(place: Place, error: OSError) -> str:
    """What an error of `connect` means."""
    text = error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return (
            f"the name {place.address} cannot be resolved here ({text}). Give the IP address of rank 0's machine "
            "instead (with torchrun's c10d: --local_addr on that machine)"
        )
    if not place.rank_0_here and is_own(place.address):
        return f"{place.address} is this machine itself, and rank 0 is on another one ({text})"
    if isinstance(error, ConnectionRefusedError):
        return (
            f"{text}: that machine is up, but nothing listens on the port. Rank 0 has not started there or has ended, "
            "or the port or the machine is another one"
        )
    return f"{text}: no machine has that address, or a firewall or a missing route is between"


def _what_to_check(place: Place) -> str:
    return (
        f"Start all machines within {place.limit} of each other, give all of them the address of rank 0's machine and "
        "the same port (MASTER_ADDR and MASTER_PORT, --main_process_ip, --master_addr), and open all TCP ports between "
        "them: docs/two-machines.md."
    )


def is_own(address: str) -> bool:
    """Whether an address or name is one of this machine."""
    with contextlib.suppress(OSError):  # of the name
        for family, kind, _, _, place in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(place)
                return True
    return False


def open_store(place: Place, *, hosts_it: bool, timeout: timedelta, warn: Callable[[str], None]) -> Any:
    """A client of the store at `place`, which this process serves if it `hosts_it`.

    Args:
        timeout: of the client's later calls.

    Raises:
        UserError: the port is taken, or cannot be reached, or something else answers there.
    """
    from torch.distributed import DistError, TCPStore

    address = place.address
    if not hosts_it:
        wait_for_port(place, warn)
    elif not is_own(address):  # an address that is forwarded to this machine is fine, as in Kubernetes
        address = "localhost"
    found: list[Any] = []

    def create() -> None:
        try:
            # With several tenants, another client of this process shares this server instead of opening the port again.
            found.append(
                TCPStore(
                    address, place.port, place.world_size, hosts_it, timedelta(seconds=CLIENT_SECONDS),
                    wait_for_workers=False, multi_tenant=True,
                )
            )  # fmt: skip
        except DistError as error:
            found.append(error)

    # torch waits without a limit for a program that accepts the connection and never answers.
    thread = threading.Thread(target=create, daemon=True)
    thread.start()
    thread.join(2 * CLIENT_SECONDS)
    if not found or isinstance(found[0], DistError):
        raise UserError(_not_a_store(place, hosts_it, str(found[0]) if found else "no answer"))
    found[0].set_timeout(timeout)
    return found[0]


def _not_own(place: Place) -> str:
    return (
        f"{place.address}, at which the other ranks look for rank 0 (MASTER_ADDR), is not an address of "
        f"{socket.gethostname()}, on which rank 0 runs. They come only if it is forwarded to this machine."
    )


def _not_a_store(place: Place, hosts_it: bool, text: str) -> str:
    """The message for what torch says of a port that cannot be used."""
    short = " ".join(text.split())[:200]
    if hosts_it:
        return (
            f"Rank 0 on {socket.gethostname()} cannot listen on port {place.port} (MASTER_PORT): {short}. Another "
            f"program uses it, such as an earlier run that has not ended (`ss -ltnp 'sport = :{place.port}'` lists "
            "it). End that program, or give all machines another port."
        )
    return (
        f"{_capital(place.seen_from)} reaches a program at {place} that is not the store of this run: {short}. Check "
        f"that {place.address} is the machine of rank 0, and on that machine which program uses the port "
        f"(`ss -ltnp 'sport = :{place.port}'`)."
    )


def begin(
    store: Store,
    place: Place,
    *,
    failed: Callable[[str, str], None],
    give_up: Callable[[str, str], None],
    warn: Callable[[str], None],
) -> str:
    """Rank 0: name this attempt, and answer the other ranks from a thread. Returns the name.

    Args:
        failed: called with the name and what `announce_early` was given, if a rank does not get as far as to ask.
        give_up: called with the name and a message if ranks have not come in time.
    """
    attempt = uuid.uuid4().hex
    store.set(_ATTEMPT, attempt)
    if not is_own(place.address):
        warn(_not_own(place))

    def answer() -> None:
        with contextlib.suppress(Exception):  # the store has ended: its own watch notices
            missing = _answer(store, attempt, place, failed, warn)
            if missing:
                give_up(attempt, _missing(place, missing))

    threading.Thread(target=answer, daemon=True).start()
    return attempt


def _answer(
    store: Store,
    attempt: str,
    place: Place,
    failed: Callable[[str, str], None],
    warn: Callable[[str], None],
) -> set[int]:
    """Answer the other ranks. Returns those that have not come in time."""
    waiting, began, warned = set(range(1, place.world_size)), time.monotonic(), False
    while waiting:
        if store.check([_EARLY]):
            failed(attempt, store.get(_EARLY).decode())
            store.delete_key(_EARLY)  # no later attempt finds it
        for rank in sorted(waiting):
            if store.check([_hello(attempt, rank)]):
                store.set(_ack(attempt, rank, store.get(_hello(attempt, rank)).decode()), "")
                waiting.discard(rank)
        waited = time.monotonic() - began
        if waited > place.seconds:
            return waiting
        if waiting and waited > WARN_SECONDS and not warned:
            warned = True
            came = _came(place.world_size - len(waiting), place)
            warn(f"{place.seen_from} waits for {_listed(waiting)} at {place}, up to {place.limit}: {came}")
        threading.Event().wait(POLL_SECONDS)
    return waiting


def _missing(place: Place, missing: set[int]) -> str:
    came = _came(place.world_size - len(missing), place)
    elsewhere = "" if is_own(place.address) else f" {_not_own(place)}"
    return (
        f"{_capital(_listed(missing))} {'have' if len(missing) > 1 else 'has'} not come to {place} within "
        f"{place.limit} of {place.seen_from}: {came}.{elsewhere} Look at the output of the "
        f"other machines. {_what_to_check(place)}"
    )


def _came(count: int, place: Place) -> str:
    return f"{count} of {place.world_size} ranks {'has' if count == 1 else 'have'} come"


def _listed(ranks: Iterable[int]) -> str:
    """Such as "rank 1", "ranks 8-15" or "ranks 1, 3"."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    whole = found == list(range(found[0], found[-1] + 1))
    return "ranks " + (f"{found[0]}-{found[-1]}" if whole else ", ".join(map(str, found)))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def join(store: Store, place: Place, failed: Callable[[str, str], None], warn: Callable[[str], None]) -> str:
    """Another rank: wait for rank 0's answer. Returns the name of the attempt.

    Args:
        failed: called with the newest name and what `announce_early` was given, or an empty string, if rank 0 does not
            answer as soon as it should. It ends this process if a failure has been announced.

    Raises:
        UserError: rank 0 has not come for so long.
    """
    rank, me, began, warned = place.rank, uuid.uuid4().hex, time.monotonic(), False
    # What is there when a rank comes for the first time is of this attempt; later, it may be of an earlier one.
    patience = RESTART_SECONDS if store.add(_present(rank), 1) > 1 else ANSWER_SECONDS
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
        if waited > place.seconds:
            came = _came(sum(store.check([_present(one)]) for one in range(1, place.world_size)), place)
            raise UserError(
                f"Rank 0 has not come to {place} within {place.limit} of {place.seen_from}: "
                f"{came}. Look at the output of the machine of rank 0. {_what_to_check(place)}"
            )
        if waited > WARN_SECONDS and not warned:
            warned = True
            warn(f"{place.seen_from} waits for rank 0 to come to {place}, up to {place.limit}")
        threading.Event().wait(POLL_SECONDS)


def _present(rank: int) -> str:
    return f"finetune/came/{rank}"


def _hello(attempt: str, rank: int) -> str:
    return f"finetune/{attempt}/hello/{rank}"


def _ack(attempt: str, rank: int, process: str) -> str:
    return f"finetune/{attempt}/ack/{rank}/{process}"


def announce_early(store: Store, failure: str) -> None:
    """Leave word of a rank that fails before it has met the others."""
    store.set(_EARLY, failure)
