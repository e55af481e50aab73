"""Multi-node start-up: rendezvous of ranks and liveness connections between hosts."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from finetune.runtime.ranks import distributed, failures, launcher, machines, rendezvous
from finetune.runtime.ranks.machines import Machine
from finetune.runtime.types import JsonObject, RankStore

_MACHINE = "machine"  # key of a machine's description in the store


class Node:
    """This process among the ranks of several machines, before there is a process group and alongside it.

    The main thread calls, in this order: `connect`, as early as it can; `hand_over`, when the watch of the process
    group takes over; `leave`, at the end of the run. From `connect` on, threads follow the other machines and the
    failures of their ranks. With one machine, nothing does anything.
    """

    def __init__(self) -> None:
        self._connected = False
        self._handed_over = threading.Event()
        self._links: machines.Links | None = None  # on the first rank of each machine

    def connect(self) -> None:
        """On several machines, join their store and follow them from here on: one that fails while it prepares its
        data, or ends, ends the run everywhere. Further calls do nothing.

        Only for programs that end with the run: one machine may not end before the others.

        Raises:
            UserError: the machine that hosts the store cannot be reached.
        """
        me = distributed.ranks()
        if self._connected or not me.on_several_machines:
            return
        self._connected = True
        store = open_store()
        failures.announce_through(store)
        if me.is_local_main:
            self._links = links = machines.Links(failures.exit_on_lost_machine, _warn)
            _, address = machines.route_to(os.environ.get("MASTER_ADDR")) or (None, None)
            own = _this_machine(address=address, port=links.port)
            store.set(f"{_MACHINE}/{own.first}", own.to_json())
            threading.Thread(target=self._follow_machines, args=(links, own, store), daemon=True).start()
        threading.Thread(target=self._watch_until_handed_over, args=(store,), daemon=True).start()

    def hand_over(self) -> None:
        """The watch of the process group takes over."""
        self._handed_over.set()

    def leave(self) -> None:
        """Leave the other machines in order: the run is over."""
        if self._links is not None:
            self._links.close()

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
            links.follow(own, others, rendezvous.attempt())

    def _watch_until_handed_over(self, store: RankStore) -> None:
        """End this process soon after a rank of another machine has failed, while it prepares its data or waits."""
        while not self._handed_over.wait(failures.FAILURE_POLL_SECONDS):
            if failures.stopping.is_set():
                return
            try:
                failure = store.get(rendezvous.FAILURE).decode() if store.check([rendezvous.FAILURE]) else None
            except Exception:
                if self._handed_over.is_set() or failures.stopping.is_set():
                    return
                message, host = "the machine that hosts the ranks' store has ended", os.environ.get("MASTER_ADDR", "")
                failure = failures.Failure(rank=0, message=message, host=host).to_json()
            if failure is not None:
                _exit_after(failure)


node = Node()  # of this process


def open_store() -> RankStore:
    """`rendezvous.open_store`, which ends this process if rank 0 has failed already."""
    return rendezvous.open_store(_exit_after)


def _exit_after(failure: str) -> None:
    failures.exit_after(failures.Failure.from_json(failure), None)


def _warn(text: str) -> None:
    """Print a warning, from any thread."""
    with contextlib.suppress(OSError):
        os.write(2, f"warning: {text}\n".encode())


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
