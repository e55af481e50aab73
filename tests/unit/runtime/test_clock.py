"""Marks and the seconds between them, on a CPU and on a fake GPU, and the phases of a fake trainer's steps."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from finetune.engine.monitoring.phases import PHASES, PhaseTimer, split_steps
from finetune.runtime import clock as clocks
from finetune.runtime.clock import Clock


class HandClock:
    """A time that only `spend` moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(clocks.time, "perf_counter", lambda: self.now)

    def spend(self, seconds: float) -> None:
        self.now += seconds


class Event:
    """A CUDA event on a hand-moved timeline; synchronizing is counted."""

    def __init__(self, gpu: FakeGpu, enable_timing: bool) -> None:
        assert enable_timing
        self._gpu, self._at = gpu, -1.0

    def record(self) -> None:
        self._at = self._gpu.milliseconds

    def synchronize(self) -> None:
        self._gpu.synchronized.append(self._at)

    def elapsed_time(self, later: Event) -> float:
        assert max(self._gpu.synchronized) >= later._at  # or the device may not have reached it
        return later._at - self._at


class FakeGpu:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.milliseconds, self.synchronized = 0.0, []
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(self, enable_timing))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: pytest.fail("the whole device was synchronized"))


def test_a_label_names_the_interval_before_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    time, clock = HandClock(monkeypatch), Clock("cpu")
    assert clock.drain() == [] and clock.seconds() == []
    clock.mark("unused")
    time.spend(2.0)
    clock.mark("first")
    time.spend(0.5)
    clock.mark("second")
    assert clock.drain() == [("first", 2.0), ("second", 0.5)]
    assert clock.drain() == []
    time.spend(4.0)
    clock.mark()
    assert clock.seconds() == [4.0]  # from the last mark that was read
    clock.reset()
    time.spend(8.0)
    clock.mark("start")
    assert clock.drain() == []


def test_on_a_gpu_only_reading_synchronizes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, clock = FakeGpu(monkeypatch), Clock("cuda")
    assert clock.drain() == []
    for label in ("start", "forward", "backward"):
        clock.mark(label)
        gpu.milliseconds += 250
    assert gpu.synchronized == []
    assert clock.drain() == [("forward", 0.25), ("backward", 0.25)]
    assert gpu.synchronized == [500]  # once, with the last event


class Accelerator:
    def __init__(self, spend: Any) -> None:
        self._spend = spend

    def backward(self, loss: Any) -> None:
        self._spend(2.0)


class FakeTrainer:
    """Calls what transformers' trainer calls, in its order: two micro-batches per step."""

    def __init__(self, spend: Any) -> None:
        self.spend, self.accelerator, self.callbacks = spend, Accelerator(spend), []
        self.state = types.SimpleNamespace(global_step=0)

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def call(self, event: str) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(None, self.state, types.SimpleNamespace())

    def get_batch_samples(self) -> str:
        self.spend(0.25)
        return "batches"

    def compute_loss(self) -> str:
        self.spend(1.0)
        return "loss"

    def average_gradients(self) -> None: ...

    def train(self, steps: int) -> None:
        self.call("on_train_begin")
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.spend(0.5)  # between steps: in none
        assert self.get_batch_samples() == "batches"
        for _ in range(2):
            self.spend(0.0625)  # preparing a micro-batch: in its forward
            assert self.compute_loss() == "loss"
            self.accelerator.backward("loss")
        self.spend(0.125)  # clipping
        self.call("on_pre_optimizer_step")
        self.spend(8.0)  # the update
        self.call("on_optimizer_step")
        self.spend(0.03125)  # zeroing gradients
        self.state.global_step += 1
        self.call("on_step_end")

    def evaluate(self) -> None:
        with torch.no_grad():
            self.compute_loss()


STEP = {"data": [0.25], "forward": [1.0625] * 2, "backward": [2.0] * 2, "optimizer": [8.125], "other": [0.03125]}
STEP_SECONDS = 0.25 + 2 * (0.0625 + 1.0 + 2.0) + 0.125 + 8.0 + 0.03125


def test_phases_sum_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    time = HandClock(monkeypatch)
    trainer = FakeTrainer(time.spend)
    timer = PhaseTimer(trainer, "cpu")
    time.spend(64.0)  # before the training
    trainer.train(2)
    trainer.spend(0.5)  # the beginning of a step that never ends
    trainer.get_batch_samples()
    steps = timer.take()
    assert steps == [STEP, STEP] and tuple(steps[0]) == PHASES
    assert sum(sum(intervals) for intervals in steps[0].values()) == STEP_SECONDS
    assert timer.take() == []


def test_phases_are_marked_without_synchronizing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)

    def spend(seconds: float) -> None:
        gpu.milliseconds += 1e3 * seconds

    trainer = FakeTrainer(spend)
    timer = PhaseTimer(trainer, "cuda")
    trainer.train(2)
    assert gpu.synchronized == []
    assert timer.take() == [STEP, STEP] and len(gpu.synchronized) == 1


def test_evaluation_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    time = HandClock(monkeypatch)
    trainer = FakeTrainer(time.spend)
    timer = PhaseTimer(trainer, "cpu")
    trainer.train(1)
    trainer.evaluate()
    trainer.step()
    assert timer.take() == [STEP, STEP]  # its time is in no step


def test_the_end_closes_a_step_and_belongs_to_other() -> None:
    labels = [
        "between",
        "data",
        "forward",
        "backward",
        "forward",
        "backward",
        "optimizer",
        "end",
        "data",
        "end",
        "data",
    ]
    first, second = split_steps(zip(labels, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], strict=True))
    assert first == {"data": [2], "forward": [4, 16], "backward": [8, 32], "optimizer": [64], "other": [128]}
    assert second == {"data": [256], "forward": [], "backward": [], "optimizer": [], "other": [512]}


def test_the_lead_of_the_host_is_taken_at_steps_that_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before transformers synchronizes to log its loss; afterwards there is nothing left to wait for."""
    gpu = FakeGpu(monkeypatch)
    time = HandClock(monkeypatch)
    monkeypatch.setattr(Event, "synchronize", lambda event: (time.spend(0.25), gpu.synchronized.append(event._at)))
    trainer = FakeTrainer(lambda seconds: None)
    timer = PhaseTimer(trainer, "cuda")
    trainer.train(1)
    assert timer.host_lead == 0.0 and gpu.synchronized == []
    timer.on_step_end(None, trainer.state, types.SimpleNamespace(should_log=True))
    assert timer.host_lead == 0.25 and len(gpu.synchronized) == 1
