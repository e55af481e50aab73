"""The micro-batch size: how a search goes, what it costs a run, and that the run trains the same."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.engine.training.loss import StepStatistics
from finetune.measure import held, micro_batch
from finetune.measure.micro_batch import Attempt, recommend, search, try_size
from tests.helpers import tiny
from tests.helpers.runs import Runs, in_this_process

SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]  # the divisors of a global batch of 48


def attempts(limit: int, start: int) -> tuple[list[Attempt], list[int]]:
    asked: list[int] = []

    def attempt(size: int) -> Attempt:
        asked.append(size)
        return Attempt(per_device=size, fits=size <= limit, peak_bytes=size * 1e9, tokens_per_second=1000.0)

    return search(SIZES, start, attempt), asked


@pytest.mark.parametrize("start", SIZES)
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 7, 8, 11, 12, 20, 47, 48])
def test_it_finds_the_largest_that_fits(limit: int, start: int) -> None:
    found, asked = attempts(limit, start)
    best = max((size for size in SIZES if size <= limit), default=None)
    assert max((one.per_device for one in found if one.fits), default=None) == best
    assert len(asked) == len(set(asked)) <= 8  # each once
    if best is not None and best != 48:  # the next larger one is known not to fit
        assert any(not one.fits and one.per_device == SIZES[SIZES.index(best) + 1] for one in found)


def test_it_doubles_and_then_bisects() -> None:
    assert attempts(12, 2)[1] == [2, 4, 8, 16, 12]
    assert attempts(3, 16)[1] == [16, 8, 4, 2, 3]
    assert attempts(48, 48)[1] == [48]


def test_the_smallest_of_the_fastest_is_recommended() -> None:
    def one(size: int, speed: float, fits: bool = True) -> Attempt:
        return Attempt(per_device=size, fits=fits, peak_bytes=1.0, tokens_per_second=speed)

    assert recommend([one(2, 99.5), one(4, 100), one(8, 500, fits=False)]).per_device == 2  # 1 % is noise
    assert recommend([one(2, 98), one(4, 100)]).per_device == 4
    assert recommend([one(2, 98), one(4, 100)], share={2: 1.0, 4: 0.9}.__getitem__).per_device == 2  # padded rows
    assert recommend([one(2, 1, fits=False)]) is None


class FakeMemory:
    """A device on which each row of a micro-batch takes 1 GB."""

    def __init__(self, limit: float) -> None:
        self.limit_bytes: float | None = limit
        self.rows, self.resets = 0, 0

    def reset(self) -> None:
        self.resets += 1

    def peak_bytes(self) -> float:
        return self.rows * 1e9


class FakeTrainer:
    """As much of a trainer as `try_size` uses; the device is full above `most` rows."""

    def __init__(self, memory: FakeMemory, most: int) -> None:
        self.memory, self.most = memory, most
        self.model = self.model_wrapped = torch.nn.Linear(2, 1)
        self.args = types.SimpleNamespace(device=torch.device("cpu"))
        self.steps, self.statistics = [], StepStatistics()
        self.statistics.add_loss(torch.ones(()), ends_step=True)

    def collate_rows(self, rows: list, pack_length: int | None = None) -> dict[str, Any]:
        self.memory.rows, self.pack_length = len(rows), pack_length
        return {"input_ids": torch.ones(len(rows), 2)}

    def training_step(self, model: Any, inputs: dict[str, Any], count: Any) -> None:
        inputs.pop("input_ids")  # as a trainer may do: the next step needs it again
        if self.memory.rows > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.steps.append(int(count))
        model(torch.ones(1, 2)).sum().backward()


class FakeLayout:
    tokens = np.array([5, 50, 20, 7])
    label_tokens = np.array([1, 9, 4, 2])
    padded_lengths = None
    packs = types.SimpleNamespace(pack_length=64)

    def __len__(self) -> int:
        return 4

    def largest_first(self) -> np.ndarray:
        return np.argsort(-self.tokens)

    def __getitems__(self, rows: list[int]) -> list[int]:
        return rows


def test_a_size_is_tried_on_the_longest_rows_and_leaves_nothing() -> None:
    memory = FakeMemory(limit=3e9)
    trainer = FakeTrainer(memory, most=6)
    layout: Any = FakeLayout()
    found = try_size(trainer, layout, 2, memory)
    assert found.fits and found.peak_bytes == 2e9 and (found.tokens_per_second or 0) > 0
    assert trainer.pack_length == 64  # without it each pack would be as long as its first document
    assert trainer.steps == [13, 13, 13]  # the labels of the two longest rows, three times
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert trainer.statistics.take_losses() == [] and memory.resets == 1
    assert not try_size(trainer, layout, 4, memory).fits  # it runs, above the limit
    full = try_size(trainer, layout, 8, memory)  # and here the device is full: caught
    assert not full.fits and full.peak_bytes is None and full.tokens_per_second is None
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    sizes = search([1, 2, 4, 8], 1, lambda size: try_size(trainer, layout, size, memory))
    assert [one.per_device for one in sizes if one.fits] == [1, 2]


def test_the_search_stops_when_the_time_is_up() -> None:
    tried: list[int] = []

    def attempt(size: int) -> Attempt:
        tried.append(size)
        return Attempt(per_device=size, fits=True, peak_bytes=1.0, tokens_per_second=1.0)

    found = search([1, 2, 4, 8, 16], 2, attempt, lambda: len(tried) == 2)
    assert tried == [2, 4] and [one.per_device for one in found] == [2, 4]
    assert search([1, 2], 1, attempt, lambda: True) == []


# --- in a run -------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Runs of 50 steps of 8 rows."""
    tiny.make_model(tmp_path / "model", hidden=16, layers=1)
    tiny.make_rows(tmp_path / "train.jsonl", 60, longest=8)
    with in_this_process(monkeypatch, tmp_path):
        yield Runs(tmp_path, monkeypatch)


STEPS = ("--training.global_batch_size", "8", "--training.max_steps", "50", "--training.save_steps", "25")


def on_a_device(runs: Runs, speeds: dict[int, float], full: int = 100) -> list[int]:
    """From now on there is a device with these tokens/s by size, that runs out of memory from `full` rows on. Returns
    the sizes that are tried on it."""
    asked: list[int] = []
    real = micro_batch.try_size

    def try_size(trainer: Any, layout: Any, per_device: int, memory: Any) -> Attempt:
        asked.append(per_device)
        real(trainer, layout, per_device, memory)
        if per_device >= full:
            return Attempt(per_device=per_device, fits=False, peak_bytes=None, tokens_per_second=None)
        return Attempt(per_device=per_device, fits=True, peak_bytes=1.0, tokens_per_second=speeds[per_device])

    memory = types.SimpleNamespace(limit_bytes=1e12, reset=lambda: None, peak_bytes=lambda: 1e6)
    runs.monkeypatch.setattr(micro_batch, "try_size", try_size)
    runs.monkeypatch.setattr(held, "Memory", lambda device: memory)
    runs.monkeypatch.setattr("finetune.config.batch.LARGEST_DEFAULT_PER_DEVICE", 1)
    return asked


def test_a_run_takes_the_fastest_size_and_trains_the_same(runs: Runs, tmp_path: Path) -> None:
    runs.monkeypatch.setattr(micro_batch, "WON_BACK_STEPS", 12)
    steps = (*STEPS[:3], "12", "--training.save_steps", "6", "--lora.lora_dropout", "0")
    given = runs(tmp_path / "given", *steps, "--training.per_device_train_batch_size", "2")
    assert given["micro_batch"] == {"per_device": 2, "reason": "as configured", "seconds": 0.0}
    asked = on_a_device(runs, {1: 100, 2: 1000, 4: 700})
    searched = runs(tmp_path / "searched", *steps)
    assert asked == [1, 2, 4]  # 4 is slower: 8 cannot win its trial back
    assert searched["batch"] == {"per_device": 2, "accumulation": 4, "global_batch_size": 8}
    assert searched["micro_batch"]["per_device"] == 2 and searched["micro_batch"]["seconds"] > 0
    assert searched["losses"] == given["losses"]  # no weight, gradient or random number is left of the search
    assert [one["per_device"] for one in searched["micro_batch_search"]["attempts"]] == [1, 2, 4]

    again = runs(tmp_path / "again", *steps)
    assert asked == [1, 2, 4] and again["micro_batch"]["reason"].endswith("from an earlier search of this job")
    assert again["losses"] == given["losses"]


@pytest.mark.campaign
def test_memory_that_runs_out_in_the_search_does_not_end_the_run(runs: Runs, tmp_path: Path) -> None:
    asked = on_a_device(runs, {1: 100, 2: 1000}, full=4)
    assert runs(tmp_path / "out", *STEPS)["batch"]["per_device"] == 2
    assert asked == [1, 2, 4]
    runs.monkeypatch.setattr("finetune.config.batch.LARGEST_DEFAULT_PER_DEVICE", 8)
    (measured,) = (tmp_path / "cache" / "measurements").glob("sizes-*.json")
    measured.unlink()
    asked.clear()
    assert runs(tmp_path / "halved", *STEPS)["batch"]["per_device"] == 2
    assert asked == [8, 4, 2]  # the default itself does not fit


@pytest.mark.campaign
def test_a_search_that_is_not_won_back_is_not_made(runs: Runs, tmp_path: Path) -> None:
    asked = on_a_device(runs, {1: 100, 2: 1000})
    short = runs(tmp_path / "short", *STEPS, "--training.max_steps", "49")
    assert asked == [] and short["micro_batch"]["reason"] == "the default: 49 steps do not win a search back"
    # 2 passes in a step of 8 rows; the first search of two sizes shows no gain.
    flat = on_a_device(runs, {1: 100, 2: 100})
    assert runs(tmp_path / "flat", *STEPS)["batch"]["per_device"] == 1 and flat == [1, 2]


@pytest.mark.campaign
def test_a_resumed_run_keeps_its_size(runs: Runs, tmp_path: Path) -> None:
    asked = on_a_device(runs, {1: 100, 2: 1000, 4: 700})
    whole = runs(tmp_path / "run", *STEPS)
    for file in (tmp_path / "cache" / "measurements").glob("sizes-*.json"):
        file.unlink()
    asked.clear()
    checkpoint = str(tmp_path / "run" / "checkpoint-25")
    resumed = runs(tmp_path / "resumed", *STEPS, "--training.resume_from_checkpoint", checkpoint)
    assert asked == [] and resumed["micro_batch"] == {"per_device": 2, "reason": "as in the checkpoint", "seconds": 0.0}
    assert resumed["losses"] == whole["losses"][25:]


def test_a_search_that_ended_at_its_ranks_share_goes_on_where_the_share_is_larger(runs: Runs, tmp_path: Path) -> None:
    """As on two GPUs first and then on one."""
    runs.monkeypatch.setattr(micro_batch, "WON_BACK_STEPS", 12)
    asked = on_a_device(runs, {1: 100, 2: 300, 4: 900, 8: 2700})
    few = ("--training.max_steps", "12", "--training.save_steps", "0")
    assert runs(tmp_path / "half", *few, "--training.global_batch_size", "4")["batch"]["per_device"] == 4
    asked.clear()
    assert runs(tmp_path / "whole", *few, "--training.global_batch_size", "8")["batch"]["per_device"] == 8
    assert asked == [1, 2, 4, 8]
