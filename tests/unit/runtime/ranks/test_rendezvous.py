"""Ranks of several machines find each other in a store that holds what earlier attempts have left."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from finetune.errors import UserError
from finetune.runtime.ranks import rendezvous

SECONDS = 30


def endpoint(rank: int = 0, world_size: int = 2, seconds: float = SECONDS, **changed: Any) -> rendezvous.Endpoint:
    given = {"address": "127.0.0.2", "port": 1, "rank_0_here": rank == 0, "setting": "training.join_timeout"} | changed
    return rendezvous.Endpoint(rank=rank, world_size=world_size, seconds=seconds, **given)


def begin(store: HashStore, world_size: int = 2, failed: Any = None, **changed: Any) -> str:
    return rendezvous.start_attempt(store, endpoint(0, world_size, **changed), failed=failed or no, give_up=no, warn=no)


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port at which nothing listens, and which nobody else gets meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.2", 0))
        yield held.getsockname()[1]


def no(*given: str) -> None:
    """Nothing has failed."""


def joined(store: HashStore, rank: int) -> tuple[threading.Thread, list[str]]:
    """A rank that waits in a thread, and the name that it gets."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(rendezvous.join_attempt(store, endpoint(rank, 3), no, no)))
    thread.start()
    return thread, found


def test_all_ranks_get_rank_0s_name() -> None:
    store = HashStore()
    first, at_first = joined(store, 1)  # before rank 0
    name = begin(store, 3)
    second, at_second = joined(store, 2)
    for thread in (first, second):
        thread.join(SECONDS)
    assert at_first == at_second == [name]


def test_a_restarted_rank_does_not_join_the_attempt_before() -> None:
    """Its rank 0 has answered already, and does not again; the new one does."""
    store = HashStore()
    thread, earlier = joined(store, 1)
    old = begin(store)
    thread.join(SECONDS)
    thread, later = joined(store, 1)  # restarted sooner than rank 0
    thread.join(5 * rendezvous.POLL_SECONDS)
    assert thread.is_alive() and earlier == [old]
    new = begin(store)
    thread.join(SECONDS)
    assert later == [new] and new != old


def test_rank_0_learns_of_a_rank_that_fails_early() -> None:
    """Once: the attempt after it does not find the same failure."""
    store, failures, found = HashStore(), [], threading.Event()

    def failed(attempt: str, failure: str) -> None:
        failures.append((attempt, failure))
        found.set()

    rendezvous.announce_early(store, "no such file")
    name = begin(store, failed=failed)
    assert found.wait(SECONDS)
    thread, _ = joined(store, 1)
    thread.join(SECONDS)
    assert failures == [(name, "no such file")] and not store.check(["finetune/early"])


def test_another_rank_learns_that_rank_0_has_failed_early() -> None:
    """At once when it comes for the first time: nothing can be left of an earlier attempt."""
    store = HashStore()
    rendezvous.announce_early(store, "no such file")

    def failed(attempt: str, failure: str) -> None:
        raise SystemExit(failure)

    with pytest.raises(SystemExit, match="no such file"):
        rendezvous.join_attempt(store, endpoint(1), failed, no)


def test_a_rank_0_that_does_not_come_is_named() -> None:
    """With those that have come: ranks 1 and 2 of 4."""
    store = HashStore()
    store.add("finetune/came/1", 1)
    expected = (
        rf"Rank 0 did not reach 127.0.0.2:1 within 0 s \(training.join_timeout\); rank 2 on "
        rf"{socket.gethostname()} waited: 2 of 4 ranks have arrived. .* the same port \(MASTER_ADDR"
    )
    with pytest.raises(UserError, match=expected):
        rendezvous.join_attempt(store, endpoint(2, 4, seconds=0), no, no)


@pytest.fixture
def one_has_come(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """The store of an attempt named `now`, in which rank 1 has asked already."""
    monkeypatch.setattr(rendezvous.uuid, "uuid4", lambda: types.SimpleNamespace(hex="now"))
    store = HashStore()
    store.set("finetune/now/hello/1", "me")
    return store


def test_ranks_that_do_not_come_are_named_to_rank_0(one_has_come: HashStore) -> None:
    heard: queue.Queue[tuple[str, str]] = queue.Queue()
    limit = endpoint(0, 4, seconds=0)
    rendezvous.start_attempt(one_has_come, limit, failed=no, give_up=lambda *given: heard.put(given), warn=no)
    attempt, message = heard.get(timeout=SECONDS)
    assert attempt == "now" and message.startswith(
        "Ranks 2-3 did not reach 127.0.0.2:1 within 0 s (training.join_timeout); rank 0 on "
        f"{socket.gethostname()} waited: 2 of 4 ranks have arrived. Look at the output of the other machines."
    )


def test_rank_0_warns_of_ranks_that_come_late(one_has_come: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "WARN_SECONDS", 0.0)
    heard: queue.Queue[str] = queue.Queue()
    rendezvous.start_attempt(one_has_come, endpoint(0, 3), failed=no, give_up=no, warn=heard.put)
    assert heard.get(timeout=SECONDS) == (
        f"rank 0 on {socket.gethostname()} waits for rank 2 at 127.0.0.2:1, up to 30 s (training.join_timeout): "
        "2 of 3 ranks have arrived"
    )
    one_has_come.set("finetune/now/hello/2", "me")
    one_has_come.wait(["finetune/now/ack/2/me"], timedelta(seconds=SECONDS))
    assert heard.empty()


def test_a_limit_that_nobody_can_set_is_not_named() -> None:
    with pytest.raises(UserError, match=r"within 0 s; rank 1 on") as caught:
        rendezvous.join_attempt(HashStore(), endpoint(1, seconds=0, setting=None), no, no)
    assert "join_timeout" not in str(caught.value)


def test_rank_0_warns_of_an_address_that_is_not_its_own() -> None:
    """A name that only others could know, too; an address that is forwarded to this machine would do."""
    for address, own in (("127.0.0.3", True), ("192.0.2.1", False), ("no-such-host.invalid", False)):
        warnings: list[str] = []
        rendezvous.start_attempt(
            HashStore(), endpoint(0, 1, address=address), failed=no, give_up=no, warn=warnings.append
        )
        assert len(warnings) == (0 if own else 1)
        assert own or warnings[0].startswith(
            f"{address}, at which the other ranks look for rank 0 (MASTER_ADDR), is not"
        )


def refusal(where: rendezvous.Endpoint, *, hosts_it: bool = False) -> str:
    """What `open_store` says."""
    with pytest.raises(UserError) as caught:
        rendezvous.open_store(where, hosts_it=hosts_it, timeout=timedelta(seconds=SECONDS), warn=no)
    return str(caught.value)


def test_a_port_at_which_nothing_listens() -> None:
    """On another machine, as far as the rank knows, and on one that it is told is rank 0's but is its own."""
    with free_port() as port:
        where = endpoint(1, seconds=0, port=port, rank_0_here=True)
        assert f"rank 1 on {socket.gethostname()} cannot reach rank 0 at 127.0.0.2:{port}, tried for 0 s" in (
            message := refusal(where).replace("Rank", "rank", 1)
        )
        assert "Connection refused: that machine is up, but nothing listens on the port" in message
        assert "127.0.0.2 is this machine itself" in refusal(endpoint(1, seconds=0, port=port))


def test_a_name_that_cannot_be_resolved() -> None:
    message = refusal(endpoint(1, seconds=0, address="no-such-host.invalid"))
    assert "at no-such-host.invalid:1, tried for 0 s (training.join_timeout): the name no-such-host.invalid" in message
    assert "--local_addr" in message


def test_an_address_that_no_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel reports it: networks differ in what they answer for one."""

    def connect(*given: Any) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)
    for error in (OSError(113, "No route to host"), TimeoutError("timed out")):
        assert f"{error.strerror or error}: no machine has that address, or a firewall" in refusal(
            endpoint(1, seconds=0, rank_0_here=True)
        )


def test_a_wait_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "WARN_SECONDS", 0.0)
    warnings: list[str] = []
    with free_port() as port:
        where = endpoint(1, seconds=3 * rendezvous.POLL_SECONDS, port=port, rank_0_here=True)
        with pytest.raises(UserError):
            rendezvous.wait_for_port(where, warnings.append)
    (warning,) = warnings
    assert warning.startswith(
        f"rank 1 on {socket.gethostname()} waits for rank 0 at {where}, up to {where.limit_text}: Conn"
    )


def test_a_port_that_is_taken() -> None:
    """By a program on rank 0's own machine, which is rank 0's problem, and at what the others take for its port."""
    with socket.create_server(("", 0)) as stranger:
        port = stranger.getsockname()[1]
        message = refusal(endpoint(0, port=port), hosts_it=True)
        assert message.startswith(f"Rank 0 on {socket.gethostname()} cannot listen on port {port} (MASTER_PORT): ")
        assert "address already in use" in message and f"`ss -ltnp 'sport = :{port}'`" in message


@pytest.mark.process
def test_a_program_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would wait for it for good."""
    monkeypatch.setattr(rendezvous, "CLIENT_SECONDS", 0.2)
    code = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout and stranger.stdin
        port = int(stranger.stdout.readline())
        message = refusal(endpoint(1, port=port))
        stranger.stdin.close()
    assert f"reaches a program at 127.0.0.2:{port} that is not the store of this run: no answer" in message
