"""Machines of a run: connections between them, and the addresses that they use."""

from __future__ import annotations

import queue
import socket
import types

import pytest

from finetune.runtime.ranks import machines
from finetune.runtime.ranks.machines import Links, Machine

TIMEOUT = 20


class Ends(queue.Queue):
    """What `Links` reports."""

    def lost(self, machine: Machine, why: str) -> None:
        self.put((machine.name, why))


def machine(first: int, port: int, count: int = 1) -> Machine:
    return Machine(name=f"node-{first}", identity=str(first), first=first, count=count, address="127.0.0.1", port=port)


@pytest.fixture
def pair():
    """Two machines that are connected, and what each of them reports."""
    ends = [Ends(), Ends()]
    links = [Links(one.lost, lambda text: None) for one in ends]
    own = [machine(number, one.port) for number, one in enumerate(links)]
    for number in (0, 1):
        links[number].follow(own[number], {1 - number: own[1 - number]}, "token")
    for one in links:
        while not one.connections:
            machines.threading.Event().wait(0.01)
    yield links, ends
    for one in links:
        one.close()


def test_the_end_of_a_process_is_reported(pair) -> None:
    (first, second), (at_first, _) = pair
    second.connections[0].shutdown(socket.SHUT_RDWR)  # as the kernel does, whatever ends the process
    assert at_first.get(timeout=TIMEOUT) == ("node-1", "")


def test_an_orderly_end_is_not(pair) -> None:
    (first, second), (at_first, at_second) = pair
    second.close()
    (connection,) = first.connections
    while _next_byte(connection) != b"":  # the goodbye has been read
        machines.threading.Event().wait(0.01)
    assert at_first.empty() and at_second.empty()


def _next_byte(connection: socket.socket) -> bytes | None:
    """What is to be read next; empty at the end, None if nothing has come."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None


def test_the_kernel_asks_an_idle_machine(pair) -> None:
    """Both sides of a connection: LOST_SECONDS is what the documentation promises."""
    for one in pair[0]:
        (connection,) = one.connections
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        values = [
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
        assert values[0] + values[1] * values[2] == machines.LOST_SECONDS == 45


def test_a_stranger_is_turned_away() -> None:
    ends = Ends()
    links = Links(ends.lost, lambda text: None)
    other = Links(ends.lost, lambda text: None)
    try:
        links.follow(machine(0, links.port), {1: machine(1, 0)}, "token")
        with socket.create_connection(("127.0.0.1", links.port)) as stranger:
            stranger.sendall(b"another 1")
            assert stranger.recv(1) == b""
        assert not links.connections
        other.follow(machine(1, other.port), {0: machine(0, links.port)}, "token")  # the real one still gets in
        while not links.connections:
            machines.threading.Event().wait(0.01)
        assert ends.empty()
    finally:
        other.close()
        links.close()


def test_the_port_is_no_way_in_for_one_that_says_nothing() -> None:
    """A connection that ends without a word leaves the port as it was."""
    links = Links(lambda machine, why: None, lambda text: None)
    try:
        links.follow(machine(0, links.port), {1: machine(1, 0)}, "token")
        for _ in range(3):
            socket.create_connection(("127.0.0.1", links.port)).close()
        with socket.create_connection(("127.0.0.1", links.port)) as real:
            real.sendall(b"token 1")
            while not links.connections:
                machines.threading.Event().wait(0.01)
    finally:
        links.close()


def test_a_port_that_a_firewall_closes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "CONNECT_SECONDS", 0.01)
    monkeypatch.setattr(machines, "WARN_SECONDS", 0.03)
    warnings: queue.Queue[str] = queue.Queue()
    links = Links(lambda machine, why: None, warnings.put)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        links.follow(machine(1, links.port), {0: machine(0, port)}, "token")
        assert f"node-0 (rank 0) cannot be reached at 127.0.0.1:{port}" in warnings.get(timeout=TIMEOUT)
    finally:
        links.close()


def test_what_is_said() -> None:
    gone = machines.explain_loss(machine(8, 1, count=8), "")
    assert gone.startswith("node-8 (ranks 8-15) is gone") and "training.resume_from_checkpoint: true" in gone
    silent = machines.explain_loss(machine(1, 1), "No route to host")
    assert silent.startswith("node-1 (rank 1) has not answered for 45 s") and "127.0.0.1" in silent
    one = machine(2, 7)
    assert Machine.from_json(one.to_json()) == one


def network(monkeypatch: pytest.MonkeyPatch, route: dict[str, str | None], **interfaces: str) -> None:
    """Interfaces with their addresses; `route`: own address on the way to each host."""
    addresses = {
        name: [types.SimpleNamespace(family=socket.AF_INET, address=address)] for name, address in interfaces.items()
    }
    up = {name: types.SimpleNamespace(isup=True) for name in interfaces}
    monkeypatch.setattr(machines.psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(machines.psutil, "net_if_stats", lambda: up)
    monkeypatch.setattr(machines, "own_address_towards", route.get)


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ({"node-a": "10.0.0.2"}, "ib0"),
        ({"node-a": "127.0.1.1", "192.0.2.1": "192.168.1.5"}, "eth0"),  # rank 0's own name, with a default route
        ({"node-a": "127.0.1.1"}, None),  # two networks, and no route: gloo's own choice
    ],
)
def test_the_interface_towards_the_others(
    monkeypatch: pytest.MonkeyPatch, route: dict[str, str | None], expected: str | None
) -> None:
    network(monkeypatch, route, lo="127.0.0.1", eth0="192.168.1.5", ib0="10.0.0.2", docker0="172.17.0.1")
    assert (machines.route_to("node-a") or (None,))[0] == expected


def test_the_only_interface_without_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    network(monkeypatch, {"node-a": "127.0.1.1"}, lo="127.0.0.1", eth0="192.168.1.5", docker0="172.17.0.1")
    assert machines.route_to("node-a") == ("eth0", "192.168.1.5")


def test_containers_of_one_host_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machines.machine_id()
    monkeypatch.setattr(machines.os, "readlink", lambda path: "pid:[1]")
    assert here.startswith(socket.gethostname()) and machines.machine_id() != here
