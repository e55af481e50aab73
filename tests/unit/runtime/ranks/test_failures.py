"""Which rank reports a failure, and what it reports."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore

from finetune.errors import UserError
from finetune.runtime import command
from finetune.runtime.ranks import distributed, failures, rendezvous

pytestmark = pytest.mark.usefixtures("no_launcher")


def launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


FAILS = """import sys
from finetune.errors import UserError
from finetune.runtime import command
from finetune.runtime.ranks import failures
{}"""


RAISE = "sys.exit(command.run_guarded(lambda: (_ for _ in ()).throw(UserError('bad input'))))"


def as_rank(rank: str, code: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    return subprocess.run(
        [sys.executable, "-c", FAILS.format(code)], capture_output=True, text=True, env=env, check=False
    )


@pytest.mark.process
def test_a_rank_with_nothing_to_say_does_not_end_before_the_one_that_speaks() -> None:
    """A launcher ends all ranks with the first that fails: rank 1 may not be it. It is ended by it, or speaks."""
    assert as_rank("0", RAISE).stderr == "error: bad input\n"  # of all ranks, as far as it can know
    event = "types.SimpleNamespace(wait=lambda *a: os.kill(os.getpid(), 15))"
    patch = f"import os, types; failures.threading = types.SimpleNamespace(Event=lambda: {event})"
    ended = as_rank("1", f"{patch}; {RAISE}")
    assert ended.returncode == -15 and ended.stderr == ""
    alone = as_rank("1", f"failures.QUIET_SECONDS = 0.0; {RAISE}")
    assert alone.returncode == 2 and alone.stderr == "error: [rank 1] bad input\n"


@pytest.mark.parametrize(("others", "alike"), [("bad input", True), ("another error", False), (None, False)])
def test_a_rank_is_named_only_if_the_others_do_not_fail_alike(
    monkeypatch: pytest.MonkeyPatch, others: str | None, alike: bool
) -> None:
    store = HashStore()
    monkeypatch.setattr(failures, "default_store", lambda: store)
    monkeypatch.setattr(failures, "ALIKE_SECONDS", 0.05)
    monkeypatch.setattr(distributed, "_host_group", object())
    monkeypatch.setattr(failures, "stopping", threading.Event())
    for rank, message in (("1", others), ("0", "bad input")):
        launch(monkeypatch, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        distributed.ranks.cache_clear()
        if message is not None:
            failures.first_failure(message)
    assert failures.all_ranks_fail_with("bad input") is alike


def test_torchs_launcher_ends_with_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And names as its cause the rank that reports it, not one that was ended for it."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr("sys.stderr", io.StringIO())
    launch(monkeypatch, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    monkeypatch.setattr(failures, "claim_failure", lambda message: True)
    command.report(UserError("bad input\n  - a: is no key"))
    ended = ProcessFailure(local_rank=0, pid=10, exitcode=-15, error_file="<N/A>")
    failed = ProcessFailure(local_rank=1, pid=11, exitcode=2, error_file=str(file))
    *_, last, problem, _ = str(ChildFailedError("finetune.train", {0: ended, 1: failed})).splitlines()
    assert last == "  traceback : error: [rank 1] bad input"
    assert problem == "    - a: is no key"


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[HashStore]:
    """The store of rank 2, the first of the second of two machines, which has joined the others."""
    launch(monkeypatch, RANK="2", LOCAL_RANK="0", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    store = HashStore()
    monkeypatch.setattr(failures, "stopping", threading.Event())
    failures.announce_through(store)
    yield store
    failures.announce_through(None)


@pytest.mark.parametrize(("first", "reports"), [(None, True), (0, True), (3, False)])
def test_one_rank_of_each_machine_reports(joined: HashStore, first: int | None, reports: bool) -> None:
    """Its own failure if it is the first, or the first failure of its machine."""
    if first is not None:
        joined.set(rendezvous.FAILURE, json.dumps({"rank": first, "message": "its own", "host": "other"}))
    assert failures.claim_failure("no such file") is reports
    announced = json.loads(joined.get(rendezvous.FAILURE))
    assert announced["message"] == ("no such file" if first is None else "its own")


def test_the_failure_of_another_machine_names_it(joined: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    joined.set(rendezvous.FAILURE, json.dumps({"rank": 1, "message": "no such file", "host": "node-a"}))
    distributed.use_host_group(object())
    assert failures.first_failure("anything") == "rank 1 on node-a: no such file"
    distributed.use_host_group(None)


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:51: Connection reset by peer.", True),
        ("DistBackendError: NCCL error: remote process exited or there was a network error", True),
        ("RuntimeError: shapes do not match", False),
        ("ConnectionError: Connection reset by peer, at https://huggingface.co", False),
    ],
)
def test_a_broken_connection_is_one_sentence(
    joined: HashStore, monkeypatch: pytest.MonkeyPatch, text: str, broken: bool
) -> None:
    monkeypatch.setattr(failures, "CAUSE_SECONDS", 0.0)
    found = failures.explain_broken_connection(text)
    assert (found is not None) is broken
    if found:
        assert found.startswith("The connection to another rank broke: ") and "resume_from_checkpoint" in found
        assert failures.explain_broken_connection(found) is None
