"""Ranks of several machines find each other in a store that holds what earlier attempts have left."""

from __future__ import annotations

import socket
import threading

import pytest
from torch.distributed import HashStore

from finetune.errors import UserError
from finetune.runtime import rendezvous

SECONDS = 30


def no(*given: str) -> None:
    """Nothing has failed."""


def joined(store: HashStore, rank: int) -> tuple[threading.Thread, list[str]]:
    """A rank that waits in a thread, and the name that it gets."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(rendezvous.join(store, rank, SECONDS, no, no)))
    thread.start()
    return thread, found


def test_all_ranks_get_rank_0s_name() -> None:
    store = HashStore()
    first, at_first = joined(store, 1)  # before rank 0
    name = rendezvous.begin(store, 3, no)
    second, at_second = joined(store, 2)
    for thread in (first, second):
        thread.join(SECONDS)
    assert at_first == at_second == [name]


def test_a_restarted_rank_does_not_join_the_attempt_before() -> None:
    """Its rank 0 has answered already, and does not again; the new one does."""
    store = HashStore()
    thread, earlier = joined(store, 1)
    old = rendezvous.begin(store, 2, no)
    thread.join(SECONDS)
    thread, later = joined(store, 1)  # restarted sooner than rank 0
    thread.join(5 * rendezvous.POLL_SECONDS)
    assert thread.is_alive() and earlier == [old]
    new = rendezvous.begin(store, 2, no)
    thread.join(SECONDS)
    assert later == [new] and new != old


def test_rank_0_learns_of_a_rank_that_fails_early() -> None:
    """Once: the attempt after it does not find the same failure."""
    store, failures, found = HashStore(), [], threading.Event()

    def failed(attempt: str, failure: str) -> None:
        failures.append((attempt, failure))
        found.set()

    rendezvous.announce_early(store, "no such file")
    name = rendezvous.begin(store, 2, failed)
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
        rendezvous.join(store, 1, SECONDS, failed, no)


def test_a_rank_0_that_does_not_come_is_named() -> None:
    with pytest.raises(UserError, match=r"Rank 0 has not started within 0 s after rank 1 on .*first machine"):
        rendezvous.join(HashStore(), 1, 0.0, no, no)


def test_a_wrong_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "WARN_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        rendezvous.wait_for_port("127.0.0.1", port, SECONDS, no)
    warnings: list[str] = []
    with pytest.raises(
        UserError, match=rf"address is 127.0.0.1, port {port} \(Connection refused\). Check that it runs"
    ):
        rendezvous.wait_for_port("127.0.0.1", port, 0.3, warnings.append)
    assert warnings == [
        f"waiting for the first machine at 127.0.0.1:{port}, which does not answer (Connection refused)"
    ]
