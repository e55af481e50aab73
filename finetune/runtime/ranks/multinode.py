"""Multi-node start-up: rendezvous of ranks and liveness connections between hosts."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from typing import TYPE_CHECKING

from finetune.runtime.ranks import distributed, failures, launcher, machines, rendezvous, tcp_store
from finetune.runtime.ranks.machines import Machine
from finetune.runtime.ranks.tcp_store import JoinLimit
from finetune.runtime.types import JsonObject, RankStore

if TYPE_CHECKING:
    from torch.distributed import Store

_MACHINE = "machine"  # key of a machine's description in the store


class Node:
    """This process among the ranks of its run, before there is a process group and alongside it.

    The main thread calls, in this order: `connect`, as early as it can; `open_store`, for the process group;
    `hand_over`, when the watch of the process group takes over; `leave`, at the end of the run. With one machine only
    `open_store` does anything. From `connect` on, threads follow the other machines and the failures of their ranks.
    """

    def __init__(self, limit: JoinLimit) -> None:
        self._limit = limit
        self._watched: RankStore | None = None  # once it is connected
        self._handed_over = threading.Event()
        self._links: machines.Links | None = None  # on the first rank of each machine

    def connect(self) -> None:
        """On several machines, join their store and follow them from here on: one that fails while it prepares its
        data, or ends, ends the run everywhere. Further calls do nothing.

        Raises:
            UserError: the machine that hosts the store cannot be reached.
        """
        me = distributed.ranks()
        if self._watched is not None or not me.on_several_machines:
            return
        self._watched = store = self.open_store()
        failures.announce_through(store)
        if me.is_local_main:
            self._links = links = machines.Links(failures.exit_on_lost_machine, tcp_store.warn)
            _, address = machines.route_to(os.environ.get("MASTER_ADDR")) or (None, None)
            own = _this_machine(address=address, port=links.port)
            store.set(f"{_MACHINE}/{own.first}", own.to_json())
            threading.Thread(target=self._follow_machines, args=(links, own, store), daemon=True).start()
        threading.Thread(target=self._watch_until_handed_over, args=(store,), daemon=True).start()

    def open_store(self) -> RankStore:
        """A client of the store of this attempt, whose ranks have found each other.

        Raises:
            UserError: rank 0 or its machine cannot be reached, or a rank has failed already.
        """
        return tcp_store.store_for_attempt(self._attempt, tcp_store.open_store(self._limit))

    def hand_over(self) -> None:
        """The watch of the process group takes over."""
        self._handed_over.set()

    def leave(self) -> None:
        """Leave the other machines in order: the run is over."""
        if self._links is not None:
            self._links.close()

    @functools.cached_property
    def _client(self) -> Store:
        """This process's client for the rendezvous. Kept: on rank 0, it keeps the store alive."""
        return tcp_store.open_store(self._limit)

    @functools.cached_property
    def _attempt(self) -> str:
        """The name of this attempt, which all its ranks share and no earlier attempt had."""
        client, endpoint, warn = self._client, tcp_store.endpoint(self._limit), tcp_store.warn
        if distributed.ranks().is_main:
            return rendezvous.start_attempt(
                client, endpoint, failed=self._announce_for_another, give_up=self._end_without_ranks, warn=warn
            )
        return rendezvous.join_attempt(client, endpoint, self._end_if_one_has_failed, warn)

    def _end_without_ranks(self, attempt: str, message: str) -> None:
        """Rank 0, from a thread: end this process and all ranks that have arrived, because others have not."""
        if failures.stopping.is_set():  # this rank ends, or has ended, anyway
            return
        store = tcp_store.store_for_attempt(attempt, self._client)
        own = failures.own_failure(message).to_json()
        first = failures.Failure.from_json(store.compare_set(failures.FAILURE, "", own))
        if first.is_own:
            failures.write_error(message)
            # This rank may host the store: the others read it first.
            threading.Event().wait(2 * failures.FAILURE_POLL_SECONDS)
            os._exit(1)
        failures.exit_after(first, None)

    def _announce_for_another(self, attempt: str, failure: str) -> None:
        """Rank 0 announces what a rank has left in the store."""
        tcp_store.store_for_attempt(attempt, self._client).compare_set(failures.FAILURE, "", failure)

    def _end_if_one_has_failed(self, attempt: str, early: str) -> None:
        """End this process if a rank has failed and rank 0 does not answer: it may be that rank."""
        store = tcp_store.store_for_attempt(attempt, self._client)
        found = early or (store.get(failures.FAILURE) if attempt and store.check([failures.FAILURE]) else None)
        if found:
            failures.exit_after(failures.Failure.from_json(found), None)

    def _follow_machines(self, links: machines.Links, own: Machine, store: RankStore) -> None:
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
            links.follow(own, others, self._attempt)

    def _watch_until_handed_over(self, store: RankStore) -> None:
        """End this process soon after a rank of another machine has failed, while it prepares its data or waits."""
        while not self._handed_over.wait(failures.FAILURE_POLL_SECONDS):
            if failures.stopping.is_set():
                return
            try:
                if not store.check([failures.FAILURE]):
                    continue
                failure = failures.Failure.from_json(store.get(failures.FAILURE))
            except Exception:
                if self._handed_over.is_set() or failures.stopping.is_set():
                    return
                host = os.environ.get("MASTER_ADDR", "")
                message = "the machine that hosts the ranks' store has ended"
                failure = failures.Failure(rank=0, message=message, host=host)
            failures.exit_after(failure, None)


_node: Node | None = None


def node() -> Node:
    """The node of this process."""
    global _node
    if _node is None:
        _node = Node(JoinLimit())
    return _node


def start(join_seconds: int) -> None:
    """Connect this process's node. Every rank calls it as early as it can, before `process_group.start`.

    Only for programs that end with the run: one machine may not end before the others.

    Args:
        join_seconds: training.join_timeout.

    Raises:
        UserError: the machine that hosts the store cannot be reached.
    """
    global _node
    if _node is None:
        _node = Node(JoinLimit(seconds=join_seconds, setting="training.join_timeout"))
    _node.connect()


def _this_machine(*, address: str | None = None, port: int = 0) -> Machine:
    me = distributed.ranks()
    return Machine(
        name=socket.gethostname(),
        identity=machines.machine_id(),
        first=me.first_local,
        count=me.local_world_size,
        address=address,
        port=port,
        launch=launcher.launch_id(),
    )


def hosts() -> list[JsonObject]:
    """The machines of the run for run.json: {host, ranks, launch} of each, in rank order. Every rank calls it once the
    ranks can communicate."""
    found = {one.first: one for one in distributed.gather_objects(_this_machine())}
    return [{"host": one.name, "ranks": list(one.ranks), "launch": one.launch} for _, one in sorted(found.items())]
