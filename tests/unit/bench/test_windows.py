"""Tests of finetune/bench/windows.py."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
import torch

from finetune.bench import windows
from finetune.runtime import clock, communication


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


class FakeTrainer:
    """As much of a trainer as the windows use: one rank, whose steps take as long as their number says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.callbacks = 0.0, []
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)
        self.args = types.SimpleNamespace(world_size=1)
        self.state = types.SimpleNamespace(global_step=0)
        self.accelerator = types.SimpleNamespace(backward=lambda: self.spend(2))

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def spend(self, share: float) -> None:
        self.now += share * (self.state.global_step + 1)

    def get_batch_samples(self) -> None:
        self.spend(0.5)

    def compute_loss(self) -> None:
        self.spend(1)

    def step(self) -> None:
        self.get_batch_samples()
        for _ in range(2):  # micro-batches
            self.compute_loss()
            self.accelerator.backward()
        self.spend(0.25)
        for event in ("on_optimizer_step", "on_step_end"):
            self.state.global_step += event == "on_step_end"
            for callback in self.callbacks:
                getattr(callback, event)(None, self.state, types.SimpleNamespace())


def test_only_the_steps_inside_a_window_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = FakeTrainer(monkeypatch)
    found = windows.Windows(trainer, runs=2, warm_up=1, steps=2)
    assert found.total == 6
    for _ in range(6):
        trainer.step()
    phases = {"data": 0.5, "forward": 2.0, "backward": 4.0, "optimizer": 0.25, "other": 0.0}
    expected = [[{name: step * share for name, share in phases.items()} for step in run] for run in ((2, 3), (5, 6))]
    assert found.seconds == expected and len(found.states) == 2
