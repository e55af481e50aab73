"""Ranks of several machines find each other in a store that holds what earlier attempts have left."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from torch.distributed import HashStore, PrefixStore

from finetune.errors import UserError
from finetune.runtime.ranks import distributed, rendezvous

SECONDS = 30
FAILED = json.dumps({"rank": 1, "message": "no such file", "host": "node-b"})


@pytest.fixture(autouse=True)
def three_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 1 of three, on a machine of its own."""
    own = distributed.Ranks(rank=1, local_rank=0, world_size=3, local_world_size=1)
    monkeypatch.setattr(rendezvous.distributed, "ranks", lambda: own)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
    monkeypatch.setenv("MASTER_PORT", "1")


def no(failure: str) -> None:
    raise AssertionError(failure)


def ended(failure: str) -> None:
    raise SystemExit(failure)


def joined(store: HashStore) -> tuple[threading.Thread, list[str]]:
    """A rank that waits in a thread, and the name that it gets."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(rendezvous.join_attempt(store, no)))
    thread.start()
    return thread, found


def test_all_ranks_get_rank_0s_name() -> None:
    store = HashStore()
    thread, found = joined(store)
    name = rendezvous.start_attempt(store)
    thread.join(SECONDS)
    assert found == [name]
    store.set(f"finetune/{name}/hello/2", "another")  # of a rank that comes later
    store.wait([f"finetune/{name}/ack/2/another"])


def test_a_restarted_rank_does_not_join_the_attempt_before() -> None:
    """Its rank 0 has answered already, and does not again; the new one does."""
    store = HashStore()
    thread, earlier = joined(store)
    old = rendezvous.start_attempt(store)
    thread.join(SECONDS)
    thread, later = joined(store)  # restarted sooner than rank 0
    thread.join(5 * rendezvous.POLL_SECONDS)
    assert thread.is_alive() and earlier == [old]
    new = rendezvous.start_attempt(store)
    thread.join(SECONDS)
    assert later == [new] and new != old


def test_rank_0_announces_a_rank_that_fails_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: the attempt after it does not find the same failure."""
    store = HashStore()
    monkeypatch.setattr(rendezvous, "_client", store)
    rendezvous.announce_early(FAILED)
    name = rendezvous.start_attempt(store)
    thread, found = joined(store)
    thread.join(SECONDS)
    assert found == [name] and not store.check(["finetune/early"])
    assert PrefixStore(f"finetune/{name}", store).get(rendezvous.FAILURE).decode() == FAILED


@pytest.mark.parametrize("key", ["finetune/early", "finetune/now/finetune/failure"])
def test_another_rank_learns_that_rank_0_has_failed(key: str) -> None:
    """At once when it comes for the first time: nothing can be left of an earlier attempt."""
    store = HashStore()
    store.set("finetune/attempt", "now")
    store.set(key, FAILED)
    with pytest.raises(SystemExit, match="no such file"):
        rendezvous.join_attempt(store, ended)


def test_a_rank_0_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.0)
    expected = rf"Rank 0 did not reach 127.0.0.2:1 within 0 s of rank 1 on {socket.gethostname()}. Look at"
    with pytest.raises(UserError, match=expected):
        rendezvous.join_attempt(HashStore(), no)


@pytest.mark.parametrize("port", ["1", "", "none"])
def test_an_address_at_which_nothing_listens(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.1)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(UserError, match=rf"Rank 1 on .* cannot reach rank 0 at 127.0.0.2:{port} \(MASTER_ADDR, "):
        rendezvous.announce_early(FAILED)


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    own = distributed.Ranks(rank=0, local_rank=0, world_size=2, local_world_size=1)
    monkeypatch.setattr(rendezvous.distributed, "ranks", lambda: own)
    with socket.create_server(("", 0)) as stranger:
        monkeypatch.setenv("MASTER_PORT", str(stranger.getsockname()[1]))
        with pytest.raises(UserError, match="Rank 0 on .* cannot listen at .*address already in use"):
            rendezvous.announce_early(FAILED)
