"""Reading the launcher, and what one rank does alone."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from finetune.errors import UserError
from finetune.runtime.ranks import distributed, launcher

pytestmark = pytest.mark.usefixtures("no_launcher")


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


def test_ranks_of_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, RANK="9", LOCAL_RANK="1", WORLD_SIZE="12", LOCAL_WORLD_SIZE="4")
    me = distributed.ranks()
    assert me.on_several_machines and me.first_local == 8
    assert [rank for rank in range(12) if me.is_local(rank)] == [8, 9, 10, 11]


def asked_for(monkeypatch: pytest.MonkeyPatch, processes: int, machines: int) -> None:
    """As if `accelerate launch` had started this process."""
    arguments = ["--num_processes", str(processes), "--num_machines", str(machines), "--config_file", os.devnull]
    monkeypatch.setattr(launcher, "accelerate_arguments", lambda: arguments)
    distributed.launcher_profile.cache_clear()


def test_ranks_that_accelerate_leaves_out_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 processes on 2 machines become 1 on each."""
    launch(monkeypatch, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    asked_for(monkeypatch, processes=3, machines=2)
    with pytest.raises(UserError, match=r"asked for 3 processes on 2 machines and started 2.*torchrun"):
        distributed.ranks()
    asked_for(monkeypatch, processes=2, machines=2)
    assert distributed.ranks().world_size == 2


@pytest.mark.parametrize("state", ["alive", "zombie", "gone"])
def test_a_rank_that_has_ended_is_named(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    def child(rank: int, status: str) -> SimpleNamespace:
        return SimpleNamespace(environ=lambda: {"LOCAL_RANK": str(rank)}, status=lambda: status)

    children = [child(0, psutil.STATUS_RUNNING), child(2, psutil.STATUS_SLEEPING)]
    children += {"alive": [child(1, psutil.STATUS_RUNNING)], "zombie": [child(1, psutil.STATUS_ZOMBIE)]}.get(state, [])
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(children=lambda: children))
    launch(monkeypatch, RANK="0", LOCAL_RANK="0", WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
    found = distributed.ended_ranks()
    assert found is None if state == "alive" else found is not None and found.startswith("the end of local rank 1, ")
