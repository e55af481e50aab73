"""Gradients in DDP's buckets, with real DDP, against the same layers without it."""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from finetune.engine.training.ddp_buckets import DdpBuckets


@contextlib.contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """A process group of this process alone.

    It is never freed: torch would join gloo's threads in the destructor of the last DDP that used it, while it holds
    the interpreter's lock, which one of these threads may wait for. That test would not end.
    """
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kept", [True, False])
def test_accumulated_gradients_live_in_ddps_buckets_alone(tmp_path: Path, kept: bool) -> None:
    """Real DDP, several buckets, against the same layers without it. torch by itself holds them twice (D9)."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    alone = copy.deepcopy(layers)
    rows = torch.randn(4, 3, 5, 64)  # steps, micro-batches
    buckets = DdpBuckets()
    with one_rank(tmp_path):
        model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.03, gradient_as_bucket_view=True)
        model.zero_grad = model.zero_grad  # Unsloth gives DDP one of its own on a GPU (unsloth_zoo fast_grad_params)
        storages: list[set[int]] = []
        for step in rows:
            for place, batch in enumerate(step):
                last = place == len(step) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    if kept:
                        buckets.before_micro_batch(model, reduces=last)
                    model(batch).square().sum().backward()
                alone(batch).square().sum().backward()
                storages.append({p.grad.untyped_storage().data_ptr() for p in layers.parameters()})
            for own, reference in zip(layers.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(own.grad, reference.grad)
            model.zero_grad()
            alone.zero_grad()
    first, *others = storages[2:]  # the buckets, which the first step makes anew
    assert len(first) < 8  # of weights and biases of four layers
    assert all(one == first for one in others) is kept


@pytest.mark.parametrize("views, expected", [(True, [0]), (False, [2])], ids=["all weights", "adapters"])
def test_first_buckets_are_freed_after_the_first_micro_batch_that_reduces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: bool, expected: list[int]
) -> None:
    """Before the next one that does, in whose forward DDP makes others: once in a run (D8)."""
    freed: list[int] = []
    monkeypatch.setattr("finetune.runtime.ranks.distributed.drain_nccl_work", lambda: freed.append(place))
    buckets = DdpBuckets()
    with one_rank(tmp_path):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), gradient_as_bucket_view=views)
        for place in range(6):  # two steps of three micro-batches
            last = place % 3 == 2
            with contextlib.nullcontext() if last else model.no_sync():
                buckets.before_micro_batch(model, reduces=last)
                model(torch.ones(2, 4)).sum().backward()
                buckets.after_micro_batch(model)
        buckets.after_micro_batch(torch.nn.Linear(4, 4))  # one GPU: there is no DDP
    assert freed == expected
