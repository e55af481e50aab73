"""The meeting of ranks on several machines at the start of a run, and the links between their machines."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any

from finetune.runtime.ranks import distributed, failures, launcher, machines, rendezvous, tcp_store
from finetune.runtime.ranks.machines import Machine

_MACHINE = "machine"


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    """What ranks on several machines share before there is a process group, and beside it."""

    store: Any  # a client of the store that the process group will use
    links: machines.Links | None  # on the first rank of each machine
    group_begun: threading.Event  # set when the watch of the process group takes over


_meeting: _Meeting | None = None


def meet(join_seconds: int | None = None) -> None:
    """If the run has several machines, join their store and follow them from here on: one that fails while it prepares
    its data, or ends, ends the run everywhere. Every rank calls it as early as it can; further calls do nothing.

    Only for programs that end with the run: one machine may not end before the others.

    Args:
        join_seconds: training.join_timeout; without a configuration 600.

    Raises:
        UserError: the machine that hosts the store cannot be reached.
    """
    global _meeting
    me = distributed.ranks()
    if _meeting is not None:
        return
    if join_seconds is not None:
        tcp_store.limit_waiting(join_seconds, "training.join_timeout")
    if not me.on_several_machines:
        return
    store = open_store()
    links = machines.Links(failures.end_without, tcp_store.warn) if me.is_local_main else None
    failures.announce_in(store)
    _meeting = _Meeting(store=store, links=links, group_begun=threading.Event())
    if links is not None:
        _, address = machines.route_to(os.environ.get("MASTER_ADDR")) or (None, None)
        own = _this_machine(address=address, port=links.port)
        store.set(f"{_MACHINE}/{own.first}", own.to_json())
        threading.Thread(target=_follow_machines, args=(links, own, store), daemon=True).start()
    threading.Thread(target=_watch_until_the_group_has_begun, daemon=True).start()


def _this_machine(*, address: str | None = None, port: int = 0) -> Machine:
    me = distributed.ranks()
    return Machine(
        name=socket.gethostname(),
        identity=machines.identity(),
        first=me.first_here,
        count=me.local_world_size,
        address=address,
        port=port,
        launch=launcher.launch_id(),
    )


def hosts() -> list[dict[str, Any]]:
    """The machines of the run for run.json: {host, ranks, launch} of each, in rank order. Every rank calls it once the
    ranks can communicate."""
    found = {one.first: one for one in distributed.gather_objects(_this_machine())}
    return [{"host": one.name, "ranks": list(one.ranks), "launch": one.launch} for _, one in sorted(found.items())]


def open_store() -> Any:
    """A client of the store of this attempt, whose ranks have found each other."""
    return tcp_store.of_attempt(_attempt(), tcp_store.open_store())


@functools.cache
def _attempt() -> str:
    """The name of this attempt, which all its ranks share and no earlier attempt had.

    Raises:
        UserError: rank 0 or its machine cannot be reached, or a rank has failed already.
    """
    store, place = tcp_store.store(), tcp_store.place()
    if distributed.ranks().is_main:
        return rendezvous.begin(
            store, place, failed=_announce_for_another, give_up=_end_without_ranks, warn=tcp_store.warn
        )
    return rendezvous.join(store, place, _end_if_one_has_failed, tcp_store.warn)


def _end_without_ranks(attempt: str, message: str) -> None:
    """Rank 0, from a thread: end this process and all ranks that have come, because others have not."""
    if failures.stopping.is_set():  # this rank ends, or has ended, anyway
        return
    store = tcp_store.of_attempt(attempt, tcp_store.store())
    first = failures.Failure.from_json(store.compare_set(failures.FAILURE, "", failures.own_failure(message).to_json()))
    if first.is_own:
        failures.write_error(message)
        # This rank may host the store: the others read it first.
        threading.Event().wait(2 * failures.FAILURE_POLL_SECONDS)
        os._exit(1)
    failures.end_after(first, None)


def _announce_for_another(attempt: str, failure: str) -> None:
    """Rank 0 announces what a rank has left word of."""
    tcp_store.of_attempt(attempt, tcp_store.store()).compare_set(failures.FAILURE, "", failure)


def _end_if_one_has_failed(attempt: str, early: str) -> None:
    """End this process if a rank has failed and rank 0 does not answer: it may be that rank."""
    store = tcp_store.of_attempt(attempt, tcp_store.store())
    found = early or (store.get(failures.FAILURE) if attempt and store.check([failures.FAILURE]) else None)
    if found:
        failures.end_after(failures.Failure.from_json(found), None)


def _follow_machines(links: machines.Links, own: Machine, store: Any) -> None:
    """Wait until every machine has described itself, each beginning with the rank after the last one of another."""
    others, first = {}, 0
    with contextlib.suppress(Exception):  # the store has ended: its own watch notices
        while first < distributed.ranks().world_size:
            while not store.check([f"{_MACHINE}/{first}"]):
                if failures.stopping.wait(failures.FAILURE_POLL_SECONDS):
                    return
            machine = Machine.from_json(store.get(f"{_MACHINE}/{first}"))
            others[first] = machine
            first += machine.count
        del others[own.first]
        links.follow(own, others, _attempt())


def _watch_until_the_group_has_begun() -> None:
    """End this process soon after a rank of another machine has failed, while it prepares its data or waits."""
    assert _meeting is not None
    while not _meeting.group_begun.wait(failures.FAILURE_POLL_SECONDS):
        if failures.stopping.is_set():
            return
        try:
            if not _meeting.store.check([failures.FAILURE]):
                continue
            failure = failures.Failure.from_json(_meeting.store.get(failures.FAILURE))
        except Exception:
            if _meeting.group_begun.is_set() or failures.stopping.is_set():
                return
            host = os.environ.get("MASTER_ADDR", "")
            failure = failures.Failure(rank=0, message="the machine that hosts the ranks' store has ended", host=host)
        failures.end_after(failure, None)


def has_begun() -> None:
    """The watch of the process group takes over."""
    if _meeting is not None:
        _meeting.group_begun.set()


def leave() -> None:
    """Leave the other machines in order: the run is over."""
    if _meeting is not None and _meeting.links is not None:
        _meeting.links.close()
