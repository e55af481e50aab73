"""What a rank notes of its steps, and how ranks' notes become a record."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import pytest
import torch

from finetune.data.plan import Plan
from finetune.engine.model.expert_load import ExpertLoad
from finetune.engine.monitoring import monitor
from finetune.engine.monitoring.monitor import Monitor, typical_step
from finetune.engine.training.loss import StepStatistics
from finetune.runtime.machine import nvml
from finetune.runtime.ranks import distributed
from finetune.runtime.ranks.context_group import ContextGroup
from finetune.runtime.tags import PHASES


def step(
    data: float, forward: float, backward: float, optimizer: float = 0.5, other: float = 0.25
) -> dict[str, list[float]]:
    return {"data": [data], "forward": [forward / 2] * 2, "backward": [backward / 2] * 2, "optimizer": [optimizer],
            "other": [other]}  # fmt: skip


def totals(steps: list[dict[str, list[float]]]) -> list[float]:
    return [sum(map(sum, one.values())) for one in steps]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_phases_of_a_typical_step_sum_to_it(count: int) -> None:
    draw = np.random.default_rng(count)
    steps = [step(*draw.lognormal(0, 1, 5).tolist()) for _ in range(count)]
    found = typical_step(steps, totals(steps), exposed=0.1)
    assert sum(found[name] for name in PHASES) == pytest.approx(found["step"])
    assert found["step"] == pytest.approx(np.median(totals(steps)))


def test_one_slow_step_does_not_change_the_typical_one() -> None:
    steps = [step(0.0, 1.0, 2.0)] * 7 + [step(100.0, 1.0, 2.0)]
    found = typical_step(steps, totals(steps), exposed=0.5)
    assert found == pytest.approx(
        {"step": 3.75, "data_wait": 0.0, "forward": 1.0, "backward": 1.5, "communication": 0.5, "optimizer": 0.5,
         "other": 0.25}
    )  # fmt: skip


def test_what_is_not_known_is_not_a_number() -> None:
    assert all(math.isnan(value) for value in typical_step([], [], 0.0).values())
    one = step(0.0, 1.0, 2.0)
    found = typical_step([one], totals([one]), exposed=None)
    assert math.isnan(found["communication"]) and found["backward"] == 2.0


class FakeTrainer:
    """Two ranks, two rows each per step; its clock is set by the test."""

    def __init__(self, losses: list[float]) -> None:
        self.model_wrapped = types.SimpleNamespace()
        self.graphs = self.optimizer = None
        self.sharded = False
        self.statistics = StepStatistics()
        for loss in losses:
            self.statistics.add_loss(torch.tensor(loss), ends_step=True)
        self.statistics.add_load_balancing(torch.tensor(0.75))  # this rank's share
        self.accelerator = types.SimpleNamespace(backward=None, clip_grad_norm_=lambda *a: torch.tensor(2.5))
        self.args = types.SimpleNamespace(world_size=2, per_device_train_batch_size=2, gradient_accumulation_steps=1)
        self.context = ContextGroup()
        self.state = types.SimpleNamespace(global_step=0)
        self.get_batch_samples = self.compute_loss = self.average_gradients = lambda: None

    def add_callback(self, callback: Any) -> None: ...


def plan(rows: int) -> Plan:
    return Plan(
        costs=np.ones(rows), label_tokens=np.ones(rows, dtype=np.int64), global_batch_size=4, seed=0, fingerprint="f"
    )


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    me = distributed.Ranks(rank=0, local_rank=0, world_size=2, local_world_size=2)
    monkeypatch.setattr(distributed, "ranks", lambda: me)


def make(monkeypatch: pytest.MonkeyPatch, steps: list[dict[str, list[float]]], trainer: FakeTrainer) -> Monitor:
    timer = types.SimpleNamespace(take=lambda: steps, host_lead=0.0)
    monkeypatch.setattr(monitor, "PhaseTimer", lambda *_: timer)
    return Monitor(trainer, plan(8), np.arange(8) + 1, (np.arange(8) + 1) ** 2, "cpu")


def test_a_record_of_two_ranks(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank's vector is made here from the published order of fields."""
    steps = [step(9.0, 9.0, 9.0), step(0.0, 1.0, 2.0), step(0.0, 1.0, 2.0)]
    trainer = FakeTrainer([2.0, 4.0, 6.0])
    found = make(monkeypatch, steps, trainer)
    reports = iter([(0.5, 0.0), (0.5, 0.0)])
    monkeypatch.setattr(monitor, "exposed_and_hidden", lambda model: next(reports))
    for number in (1, 2):
        found.step_ended(number, logging_steps=1)
    found.step_ended(3, logging_steps=1)  # DDP's report of step 2 appears at the end of step 3
    trainer.accelerator.clip_grad_norm_()

    def gather(own: list[float]) -> list[list[float]]:
        other = {"step": 3.75, "data_wait": 0.0, "forward": 1.5, "backward": 1.4, "communication": 0.1,
                 "optimizer": 0.5, "other": 0.25, "own_work": 3.65, "wait": 0.0, "peak_gib": 9.0,
                 "reserved_gib": math.nan, "allocator_retries": 3.0, "top1": math.nan, "entropy": math.nan,
                 "load_balancing": 1.5, "unchanged": 30.0, "compared": 40.0, "checksum_low": 5.0,
                 "checksum_high": 6.0, "wrong_pass": math.nan}  # fmt: skip
        blocks = [math.nan] * (2 * len(nvml.FIELDS))
        theirs = [4.0, 8.0, 10.0, *(other[name] for name in monitor.FIELDS), *blocks]
        assert len(own) == len(theirs)
        return [own, theirs]

    monkeypatch.setattr(distributed, "gather_floats", gather)
    record = found.record()
    assert record.losses == [3.0, 6.0, 8.0] and record.gradient_norms == [2.5]
    assert record.step_seconds == [3.75, 3.75]  # the first step compiles
    mine, other = record.ranks
    assert (mine.step, mine.communication, mine.own_work) == pytest.approx((3.75, 0.5, 3.25))
    assert (other.rank, other.own_work, other.allocator_retries, other.reserved_gib) == (1, 3.65, 3, None)
    # Two steps are an epoch of all eight rows; a third has four of them. No row is counted twice.
    assert mine.tokens + other.tokens >= 36 and mine.gpu is None and record.top1 is None
    assert record.unchanged == 0.75  # of the rank that knows
    assert record.load_balancing == 2.25  # of both ranks
    assert record.bits[1][:2] == [5.0, 6.0]


def test_tokens_of_experts_are_those_of_all_ranks(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the one collective of a record. A layer whose experts were not counted is left out."""
    trainer = FakeTrainer([2.0])
    load = trainer.statistics.expert_load = ExpertLoad([3, 2, 2])
    with load.forward(torch.tensor([2, 2, -2]), 6):
        load.count(torch.tensor([[0], [0], [1], [2], [2], [2]]), 0)
        load.count(torch.tensor([[0], [1], [1], [1], [0], [0]]), 2)
    found = make(monkeypatch, [step(0.0, 1.0, 2.0)], trainer)

    def gather(own: list[float]) -> list[list[float]]:
        assert own[:8] == [2.0, 2.0, 1.0, 1.0, 0.0, 0.0, 1.0, 3.0]
        return [own, [4.0, 0.0, 5.0, 0.0, 0.0, 0.0, 7.0, 0.0, *own[8:]]]

    monkeypatch.setattr(distributed, "gather_floats", gather)
    record = found.record()
    assert [one.tolist() for one in record.expert_tokens] == [[2.0, 6.0, 1.0], [8.0, 3.0]]
    assert record.losses == [3.0] and record.load_balancing == 1.5  # what follows is in its place
    assert load.take() == [0.0] * 7


def test_tokens_of_each_rank_are_those_of_its_rows(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = make(monkeypatch, [], FakeTrainer([]))
    monkeypatch.setattr(monitor, "exposed_and_hidden", lambda model: None)
    found.step_ended(1, logging_steps=10)
    dealt = plan(8).deal(0, 0, world_size=2, per_device=2, accumulation=1)
    assert found._shares[0].tolist() == [(dealt[0, rank] + 1).sum() for rank in (0, 1)]
    assert found._shares[1].tolist() == [((dealt[0, rank] + 1) ** 2).sum() for rank in (0, 1)]


def test_ranks_that_share_rows_have_parts_of_their_tokens(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token counts once, whatever the number of ranks that have its row."""
    trainer = FakeTrainer([])
    trainer.context, trainer.args.per_device_train_batch_size = ContextGroup(size=2), 4
    found = make(monkeypatch, [], trainer)
    monkeypatch.setattr(monitor, "exposed_and_hidden", lambda model: None)
    found.step_ended(1, logging_steps=10)
    rows = plan(8).step_rows(0, 0)
    for shares, values in zip(found._shares, (rows + 1, (rows + 1) ** 2), strict=True):
        assert shares.sum() == values.sum() and 0 <= shares[0] - shares[1] <= 1


def test_the_exchange_of_shared_rows_is_communication(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed in the first steps but the first, which compiles, and in the last of each record; a rank that waits in it
    for another has less work of its own."""
    timer = types.SimpleNamespace(on=False, take=lambda: (0.2, 0.6))  # of two steps
    trainer = FakeTrainer([])
    trainer.context, trainer.args.per_device_train_batch_size = ContextGroup(size=2, timer=timer), 4  # type: ignore[arg-type]
    found = make(monkeypatch, [step(0.1, 0.4, 0.8)] * 3, trainer)
    monkeypatch.setattr(monitor, "exposed_and_hidden", lambda model: (0.05 * (1 + found._steps), 0.0))
    timed = []
    for number in range(1, 4):
        timed.append(timer.on)
        found.step_ended(number, logging_steps=3)
    assert timed == [False, True, True]
    monkeypatch.setattr(distributed, "gather_floats", lambda values: [values, values])
    first = found.record().ranks[0]
    assert first.step == pytest.approx(2.05) and first.communication == pytest.approx(0.1 + 0.3 + 0.2)
    assert (first.forward, first.backward) == pytest.approx((0.4 - 0.1, 0.8 - 0.3 - 0.2))
    assert first.own_work == pytest.approx(2.05 - 0.6)
    assert found.exposed == pytest.approx([0.2 + 0.4])
    for number in range(4, 15):
        found.step_ended(number, logging_steps=3)
    assert timer.on  # the next is the last of a record
    found.step_ended(15, logging_steps=3)
    assert not timer.on


def test_ddp_is_read_when_it_has_measured(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP measures its first ten steps and one per record, and reports one step later; the first step compiles."""
    asked: list[int] = []
    found = make(monkeypatch, [], FakeTrainer([]))
    number = 0

    def report(model: Any) -> tuple[float, float]:
        asked.append(number)
        return (0.01, min(number, 10) / 1e3)

    monkeypatch.setattr(monitor, "exposed_and_hidden", report)
    for number in range(1, 303):
        found.step_ended(number, logging_steps=100)
    assert asked == [3, 4, 5, 6, 7, 8, 9, 10, 11, 100, 101, 200, 201, 300, 301]
    assert len(found.exposed) == 8  # a report that has not changed is of the same step


def test_one_gpu_reports_for_all_of_its_machine() -> None:
    width = len(nvml.FIELDS)
    sample = [0.5, 1500.0, 400.0, 60.0, 0.0, 0.25, 4.0, float(0x04 | 0x40)]
    unknown = [math.nan] * width
    blocks = [[*sample, *unknown], [*unknown, *unknown], [*unknown, *sample], [*unknown, *unknown]]
    found = monitor.gpus_by_rank(blocks)
    assert sorted(found) == [0, 3]  # machine 0's first GPU, machine 1's second
    assert found[0]["reasons"] == ["power cap", "thermal limit (hardware)"] and found[0]["samples"] == 4


def test_samples_become_means_and_all_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([(1.0, 0x04), (0.0, 0x24), None, (0.5, 0x20)])  # the power cap alone is not throttling

    def read(handle: str) -> nvml.Sample:
        found = next(looks)
        if found is None:
            raise RuntimeError("the GPU is lost")
        known = {"sm_clock_mhz": 1000.0, "power_w": math.nan, "temperature_c": 50.0, "other_processes": 0.0}
        return known | {"utilization": found[0], "reasons": found[1]}

    sampler = nvml.GpuSampler(["gpu"], read)
    sampler.close()
    for _ in range(4):
        sampler.sample()
    (found,) = sampler.take()
    means = dict(zip(nvml.FIELDS, found, strict=True))
    assert (means["utilization"], means["throttled"], means["samples"], means["reasons"]) == (0.5, 2 / 3, 3, 0x24)
    assert math.isnan(means["power_w"]) and sampler.take() == [[]]


def test_ddps_account() -> None:
    def model(**data: int) -> Any:
        return types.SimpleNamespace(_get_ddp_logging_data=lambda: data)

    found = monitor.exposed_and_hidden(
        model(backward_comm_time=9_000_000, backward_compute_comm_overlap_time=2_000_000)
    )
    assert found == pytest.approx((0.007, 0.002))
    # The first bucket may be full only when the backward pass is over.
    late = model(backward_comm_time=1_000_000, backward_compute_comm_overlap_time=3_000_000)
    assert monitor.exposed_and_hidden(late) == (0.0, 0.001)
    assert monitor.exposed_and_hidden(model(rank=0)) is None
    assert monitor.exposed_and_hidden(torch.nn.Linear(1, 1)) is None
