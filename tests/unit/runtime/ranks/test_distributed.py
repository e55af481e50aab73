"""Reading the launcher, and what one rank does alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from finetune.errors import UserError
from finetune.runtime.ranks import distributed, failures, process_group


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    distributed.ranks.cache_clear()
    yield
    distributed.ranks.cache_clear()


def launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_no_launcher_is_one_rank() -> None:
    me = distributed.ranks()
    assert (me.rank, me.local_rank, me.world_size, me.is_main, me.is_local_main) == (0, 0, 1, True, True)


def test_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, RANK="9", LOCAL_RANK="1", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8")
    me = distributed.ranks()
    assert (me.rank, me.local_rank, me.world_size, me.local_world_size) == (9, 1, 16, 8)
    assert not me.is_main and not me.is_local_main


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "zero", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
    ],
)
def test_variables_that_cannot_be(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    launch(monkeypatch, **variables)
    with pytest.raises(UserError, match="launcher's variables"):
        distributed.ranks()


def test_collectives_of_one_rank_return_what_they_were_given() -> None:
    assert distributed.gather_objects({"a": 1}) == [{"a": 1}]
    assert distributed.sum_over_ranks([1.5, 2.0]) == [1.5, 2.0]
    flag = distributed.DelayedFlag()
    assert [flag.ask(value) for value in (False, True)] == [False, True]


def test_only_nccl_puts_collectives_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two GPUs `tests/gpu/test_gpu.py::test_first_buckets_are_gone_in_the_second_step` shows what it is for."""
    import torch.distributed as dist

    waited: list[str] = []
    group = SimpleNamespace(_wait_for_pending_works=lambda: waited.append("waited"))
    distributed.drain_nccl_work()  # one process, no group
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: group)
    for backend, expected in (("gloo", []), ("nccl", ["waited"])):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        distributed.drain_nccl_work()
        assert waited == expected
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", SimpleNamespace)  # a release without it
    distributed.drain_nccl_work()
    assert callable(dist.ProcessGroup._wait_for_pending_works)  # the installed torch has it


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
    assert as_rank("0", RAISE).stderr == "error: [rank 0] bad input\n"
    event = "types.SimpleNamespace(wait=lambda *a: os.kill(os.getpid(), 15))"
    patch = f"import os, types; failures.threading = types.SimpleNamespace(Event=lambda: {event})"
    ended = as_rank("1", f"{patch}; {RAISE}")
    assert ended.returncode == -15 and ended.stderr == ""
    alone = as_rank("1", f"failures.QUIET_SECONDS = 0.0; {RAISE}")
    assert alone.returncode == 2 and alone.stderr == "error: [rank 1] bad input\n"


# --- several machines -------------------------------------------------------------------------------------------------


def test_ranks_of_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, RANK="9", LOCAL_RANK="1", WORLD_SIZE="12", LOCAL_WORLD_SIZE="4")
    me = distributed.ranks()
    assert me.on_several_machines and me.first_here == 8
    assert [rank for rank in range(12) if me.are_here(rank)] == [8, 9, 10, 11]


def test_ranks_that_accelerate_leaves_out_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 processes on 2 machines become 1 on each."""
    launch(monkeypatch, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    monkeypatch.setattr(distributed, "_launcher_profile", lambda: {"num_processes": 3, "num_machines": 2})
    with pytest.raises(UserError, match=r"asked for 3 processes on 2 machines and started 2.*torchrun"):
        distributed.ranks()
    monkeypatch.setattr(distributed, "_launcher_profile", lambda: {"num_processes": 2, "num_machines": 2})
    assert distributed.ranks().world_size == 2


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """Rank 2, the first of the second of two machines, which has met the others."""
    launch(monkeypatch, RANK="2", LOCAL_RANK="0", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    store = HashStore()
    monkeypatch.setattr(failures, "_met", store)
    for name in ("stopping", "_ending"):
        monkeypatch.setattr(failures, name, threading.Event())
    return store


@pytest.mark.parametrize(("first", "reports"), [(None, True), (0, True), (3, False)])
def test_one_rank_of_each_machine_reports(met: HashStore, first: int | None, reports: bool) -> None:
    """Its own failure if it is the first, or the first failure of its machine."""
    if first is not None:
        met.set(failures.FAILURE, json.dumps({"rank": first, "message": "its own", "host": "other"}))
    assert failures.claim_failure("no such file") is reports
    announced = json.loads(met.get(failures.FAILURE))
    assert announced["message"] == ("no such file" if first is None else "its own")


def test_the_failure_of_another_machine_names_it(met: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    met.set(failures.FAILURE, json.dumps({"rank": 1, "message": "no such file", "host": "node-a"}))
    monkeypatch.setattr(distributed, "_host_group", object())
    assert failures.first_failure("anything") == "rank 1 on node-a: no such file"


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
    met: HashStore, monkeypatch: pytest.MonkeyPatch, text: str, broken: bool
) -> None:
    monkeypatch.setattr(failures, "CAUSE_SECONDS", 0.0)
    found = failures.of_broken_connection(text)
    assert (found is not None) is broken
    if found:
        assert found.startswith("The connection to another rank broke: ") and "resume_from_checkpoint" in found
        assert failures.of_broken_connection(found) is None


def test_gloo_uses_the_network_between_the_machines(met: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(process_group.machines, "route_to", lambda host: ("ib0", "10.0.0.2"))
    process_group._choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")  # the user's
    process_group._choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
