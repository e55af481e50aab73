"""Tests of finetune/runtime/communication.py."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
import torch

from finetune.runtime import communication


def test_ddps_account() -> None:
    def model(**data: int) -> Any:
        return types.SimpleNamespace(_get_ddp_logging_data=lambda: data)

    found = communication.exposed_and_hidden(
        model(backward_comm_time=9_000_000, backward_compute_comm_overlap_time=2_000_000)
    )
    assert found == pytest.approx((0.007, 0.002))
    # The first bucket may be full only when the backward pass is over.
    late = model(backward_comm_time=1_000_000, backward_compute_comm_overlap_time=3_000_000)
    assert communication.exposed_and_hidden(late) == (0.0, 0.001)
    assert communication.exposed_and_hidden(model(rank=0)) is None
    assert communication.exposed_and_hidden(torch.nn.Linear(1, 1)) is None


def test_kernels_of_communication_that_nothing_hides() -> None:
    """Against counting microsecond by microsecond."""
    from torch.autograd import DeviceType

    draw = random.Random(0)
    events, busy = [], {"nccl": set(), "gemm": set()}
    for _ in range(60):
        kind, start, length = draw.choice(["nccl", "gemm"]), draw.randrange(900), draw.randrange(1, 40)
        busy[kind] |= set(range(start, start + length))
        time_range = types.SimpleNamespace(start=start, end=start + length)
        events.append(
            types.SimpleNamespace(name=f"{kind}DevKernel", device_type=DeviceType.CUDA, time_range=time_range)
        )
    whole = types.SimpleNamespace(start=0, end=10_000)
    noise = [
        types.SimpleNamespace(name="ncclAllReduce", device_type=DeviceType.CPU, time_range=whole),
        types.SimpleNamespace(
            name="nccl:all_reduce", device_type=DeviceType.CUDA, time_range=whole, is_user_annotation=True
        ),
    ]
    found = communication.kernel_communication([*events, *noise], steps=2)
    assert found == pytest.approx(
        {
            "communication_seconds": len(busy["nccl"]) / 2e6,
            "exposed_seconds": len(busy["nccl"] - busy["gemm"]) / 2e6,
        }
    )
    assert communication.kernel_communication(noise, steps=2) is None
