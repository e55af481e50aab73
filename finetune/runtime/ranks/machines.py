"""The machines of a run: which ranks are on which, and whether each is still there.

The first rank of each machine keeps a TCP connection to that of every other one, over which nothing is sent. The kernel
closes it when the process ends, whatever ends it, and its keep-alive probes notice a machine or a network that is gone.
Neither needs the other process to be responsive, so a long phase is never mistaken for an end.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from finetune.runtime.types import Stored

# Keep-alive: without an answer, the first probe follows after IDLE seconds, COUNT in all are INTERVAL seconds apart.
IDLE_SECONDS, INTERVAL_SECONDS, COUNT = 15, 5, 6
LOST_SECONDS = IDLE_SECONDS + COUNT * INTERVAL_SECONDS  # until a silent machine counts as gone
CONNECT_SECONDS = 5.0
WARN_SECONDS = 60.0  # without a connection, before a warning
_GOODBYE = b"."
INTERFACES_OF_CONTAINERS = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali")


@dataclass(frozen=True, kw_only=True)
class Machine(Stored):
    """A machine of the run, as its first rank describes it.

    name:      host name
    identity:  unlike that of any other machine or container, even one of the same name
    first:     its first rank; the others follow
    count:     number of its ranks
    address:   where its first rank listens, with `port`; None if it has no network
    launch:    id of its launcher, see `launcher.launch_id`
    """

    name: str
    identity: str
    first: int
    count: int
    address: str | None = None
    port: int = 0
    launch: str | None = None

    @property
    def ranks(self) -> range:
        """Its ranks."""
        return range(self.first, self.first + self.count)

    def label(self) -> str:
        """Such as "node-b (rank 1)" or "node-b (ranks 8-15)"."""
        last = self.first + self.count - 1
        return f"{self.name} ({f'ranks {self.first}-{last}' if self.count > 1 else f'rank {self.first}'})"


def machine_id() -> str:
    """Unique machine ID. Containers can share a host name and have separate PID namespaces."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(found)


def route_to(host: str | None) -> tuple[str, str] | None:
    """(interface, own address on it) by which this machine reaches `host`, for the ranks' own connections.

    On the machine that is `host` itself, or if the name of the machine stands for its loopback address (127.0.1.1 in
    Debian's /etc/hosts), the only interface that is up, or that of the default route. None if that is not known.
    """
    addresses = {
        one.address: name
        for name, every in psutil.net_if_addrs().items()
        for one in every
        if one.family in (socket.AF_INET, socket.AF_INET6)
    }
    for target in (host, "192.0.2.1"):  # the latter, of TEST-NET-1, has the default route; nothing is sent
        own = own_address_towards(target) if target else None
        if own is not None and own in addresses and not _is_loopback(own):
            return addresses[own], own
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    outside = [
        (name, address)
        for address, name in addresses.items()
        if name in up and "." in address and not _is_loopback(address) and not name.startswith(INTERFACES_OF_CONTAINERS)
    ]
    return outside[0] if len(outside) == 1 else None


def own_address_towards(host: str) -> str | None:
    """The address of this machine on the way to `host`; None if there is no route."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)  # chooses a route; sends nothing
                return probe.getsockname()[0]
    return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


class Links:
    """This machine's connections to the others, each followed by a thread that waits for its end.

    port:        on which later machines connect
    connections: the open ones
    """

    def __init__(self, lost: Callable[[Machine, str], None], warn: Callable[[str], None]) -> None:
        """Open the port on which later machines connect.

        Args:
            lost: called with a machine and what happened, from a thread, when a connection has ended.
            warn: called with a sentence if a machine cannot be connected to.
        """
        self._lost, self._warn = lost, warn
        self._closed = threading.Event()
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]

    def follow(self, own: Machine, others: Mapping[int, Machine], token: str) -> None:
        """Connect to the machines with lower ranks, and accept those with higher ones.

        Args:
            others: by first rank.
            token: the same on all machines of this run and on no others.
        """
        above = {first: one for first, one in others.items() if first > own.first}
        threading.Thread(target=self._accept, args=(above, token), daemon=True).start()
        for first, machine in others.items():
            if first < own.first:
                threading.Thread(target=self._connect, args=(own, machine, token), daemon=True).start()

    def close(self) -> None:
        """Leave the other machines in order: the run is over."""
        self._closed.set()
        for one in self.connections:
            with contextlib.suppress(OSError):
                one.sendall(_GOODBYE)
        for one in (self._listener, *self.connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, expected: dict[int, Machine], token: str) -> None:
        while expected and not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(CONNECT_SECONDS)
                given, _, first = connection.recv(256).decode(errors="replace").partition(" ")
            except OSError:  # closed, or a stranger that says nothing
                self._closed.wait(0.1)
                continue
            if hmac.compare_digest(given.encode(), token.encode()) and first.isdecimal() and int(first) in expected:
                machine = expected.pop(int(first))
                threading.Thread(target=self._wait_for_end, args=(connection, machine), daemon=True).start()
            else:
                connection.close()

    def _connect(self, own: Machine, machine: Machine, token: str) -> None:
        for tries in itertools.count(1):
            try:
                connection = socket.create_connection((machine.address or "", machine.port), CONNECT_SECONDS)
                connection.sendall(f"{token} {own.first}".encode())
            except OSError as error:
                if tries == WARN_SECONDS // CONNECT_SECONDS:
                    self._warn(
                        f"{machine.label()} cannot be reached at {machine.address}:{machine.port} "
                        f"({error.strerror or error}): if that machine fails, it is noticed after training.ddp_timeout "
                        "only. Allow all ports between the machines."
                    )
            else:
                return self._wait_for_end(connection, machine)
            if self._closed.wait(CONNECT_SECONDS):
                return None

    def _wait_for_end(self, connection: socket.socket, machine: Machine) -> None:
        why = ""
        try:
            enable_keep_alive(connection)
            self.connections.append(connection)
            connection.settimeout(None)
            if connection.recv(len(_GOODBYE)) == _GOODBYE:
                return
        except ConnectionResetError:  # as the end of the stream, with something unread
            pass
        except OSError as error:
            why = error.strerror or str(error)
        if not self._closed.is_set():
            self._lost(machine, why)


def enable_keep_alive(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other side has not answered for LOST_SECONDS."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": IDLE_SECONDS, "TCP_KEEPINTVL": INTERVAL_SECONDS, "TCP_KEEPCNT": COUNT}
    for name, value in options.items():
        if hasattr(socket, name):  # Linux, Windows; macOS names the first one otherwise, and waits two hours
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def explain_loss(machine: Machine, why: str) -> str:
    """The message of a run that has lost a machine.

    Args:
        why: the kernel's reason; empty if the connection was closed.
    """
    again = (
        "The newest complete checkpoint is unchanged. Start the run again on all machines with "
        "training.resume_from_checkpoint: true."
    )
    if not why:
        return (
            f"{machine.label()} is gone: its processes ended without a message, as when they are killed (kill -9, out "
            f"of memory, preemption) or the machine restarts. See the end of its output and its system log. {again}"
        )
    return (
        f"{machine.label()} has not answered for {LOST_SECONDS} s: the machine, or the network to {machine.address}, "
        f"is down ({why}). Check both. {again}"
    )
