"""The parts of a step, and what a measurement is kept as."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.config import load
from finetune.data.layout import Layout
from finetune.data.packs import one_per_row
from finetune.data.plan import Plan
from finetune.engine.session.out_of_memory import explain_out_of_memory
from finetune.engine.sharding import memory_per_rank
from finetune.engine.training.loss import StepStatistics
from finetune.errors import RunError
from finetune.measure import held, measurements, probe, scoring, trial
from finetune.measure.measurements import Measurement, slowest_rank_seconds
from finetune.measure.predict import MIB
from tests.helpers.advise import configuration, measurement


def trainer_with(optimizer: Any) -> Any:
    """As much of a trainer as `training_state_fits` uses."""
    model = torch.nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    model.weight.grad = torch.ones_like(model.weight)
    return types.SimpleNamespace(model=model, optimizer=optimizer(model.parameters()), statistics=StepStatistics())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_the_optimizers_state_is_held_as_in_training(kind: Any) -> None:
    trainer = trainer_with(lambda parameters: kind(parameters, lr=0.5, weight_decay=0.1))
    before = trainer.model.weight.detach().clone()
    plain = trainer.optimizer
    # Accelerate's does nothing between the micro-batches of a step.
    trainer.optimizer = types.SimpleNamespace(optimizer=plain, param_groups=plain.param_groups, step=lambda: None)
    assert probe.training_state_fits(trainer)
    other = trainer_with(lambda parameters: kind(parameters, lr=0.5, weight_decay=0.1))
    other.optimizer.step()  # an ordinary one
    (state,), (ordinary,) = (list(one.state.values()) or [{}] for one in (plain, other.optimizer))
    assert {name: (value.shape, value.dtype) for name, value in state.items() if torch.is_tensor(value)} == {
        name: (value.shape, value.dtype) for name, value in ordinary.items() if torch.is_tensor(value)
    }
    assert torch.equal(trainer.model.weight, before) and trainer.model.weight.grad is None
    # Whether DDP's first step, with its buckets made twice, stays below the steps that follow.
    state = memory_per_rank.allocated_bytes(trainer.model, plain).optimizer
    holds_more = state is not None and state >= trainer.model.weight.nbytes
    assert holds_more is (kind is torch.optim.AdamW)


def test_a_device_may_be_full_without_any_row() -> None:
    class Full(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainer = trainer_with(Full)
    assert not probe.training_state_fits(trainer)
    assert trainer.model.weight.grad is None


@pytest.mark.parametrize(
    ("given", "rows", "said"),
    [
        (
            [],
            8,
            "batch_size to 4 (same global batch of 8, same result), or use model.load_in_4bit",
        ),
        (["--model.load_in_4bit"], 1, "To use less, lower data.max_length, or use model.tiled_mlp: true. (CUDA"),
        (["--model.load_in_4bit", "--model.tiled_mlp"], 1, "To use less, lower data.max_length. (CUDA"),
        (
            ["--model.load_in_4bit", "--model.backend", "transformers"],
            1,
            "max_length, or use training.gradient_checkpointing: offload or model.tiled_mlp: true. (CUDA",
        ),
        (
            ["--model.load_in_4bit", "--model.backend", "transformers", "--model.tiled_mlp"]
            + ["--training.gradient_checkpointing", "offload", "--training.context_parallel", "2"],
            1,
            "lower data.max_length, or use training.context_parallel: 4 on 4 GPUs. (CUDA",
        ),
        (
            ["--model.full_finetuning"],
            1,
            "max_length, or use model.tiled_mlp: true or training.optim: adamw_8bit or LoRA (model.full_finetuning: fa",
        ),
        (
            ["--model.full_finetuning", "--training.optim", "adafactor"],
            1,
            "max_length, or use model.tiled_mlp: true or LoRA (model.full_finetuning: ",
        ),
        (
            ["--model.full_finetuning", "--training.strategy", "shard", "--training.gradient_checkpointing", "false"],
            1,
            "max_length, or use training.gradient_checkpointing: true or training.optim: adamw_torch_8bit or LoRA (m",
        ),
    ],
    ids=[
        "LoRA",
        "QLoRA",
        "all measures taken",
        "transformers",
        "ranks share rows",
        "full",
        "full with a small optimizer",
        "full and sharded",
    ],
)
def test_what_needs_less_memory_is_said(tmp_path: Path, given: list[str], rows: int, said: str) -> None:
    batch = types.SimpleNamespace(per_device=rows, global_batch_size=8)
    config = load(configuration(tmp_path, *given))
    stack = types.SimpleNamespace(backend="transformers" if config.model.backend == "transformers" else "unsloth")
    hardware = types.SimpleNamespace(count=4)
    job: Any = types.SimpleNamespace(config=config, batch=batch, stack=stack, hardware=hardware)
    with pytest.raises(RunError) as caught, explain_out_of_memory(lambda: job):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert said in str(caught.value)
    text = "or use OTHERS .predicted to hold it.[ .]"
    with pytest.raises(RunError, match=text), explain_out_of_memory(lambda: job, lambda _: "OTHERS"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_cpu_run_has_no_limit_to_search_below() -> None:
    memory = held.Memory("cpu")
    assert memory.limit_bytes is None and memory.peak_bytes() > 0


def test_what_fits_a_device_with_and_without_the_part_that_is_kept_free() -> None:
    limit = held.limit_of(100.0, 10.0)
    assert limit == 70.0 and held.fits(70.0, limit) and not held.fits(70.1, limit)
    assert held.fits(87.5, limit, margin=False) and not held.fits(87.6, limit, margin=False)
    assert held.fits(1e30, None)


def test_the_training_ends_when_its_time_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 9 or later, and not before 30 seconds have passed."""
    now = 100.0
    monkeypatch.setattr(trial.time, "monotonic", lambda: now)
    budget = trial.TimeBudget(at_least=9, seconds=30.0)
    stopped = []
    for step, now in ((1, 140.0), (8, 150.0), (9, 129.0), (9, 131.0), (10, 131.0)):  # noqa: B007  # read by the lambda
        control: Any = types.SimpleNamespace(should_training_stop=False, should_log=False)
        budget.on_step_end(None, types.SimpleNamespace(global_step=step), control)  # type: ignore[arg-type]
        assert control.should_training_stop == control.should_log
        stopped.append(control.should_training_stop)
    assert stopped == [False, False, False, True, True]
    budget.postpone(10)  # which passed before the first step
    control = types.SimpleNamespace(should_training_stop=False, should_log=False)
    budget.on_step_end(None, types.SimpleNamespace(global_step=9), control)  # type: ignore[arg-type]
    assert not control.should_training_stop


def test_the_training_ends_after_any_step_once_the_limit_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(trial.time, "monotonic", lambda: now)
    budget = trial.TimeBudget(at_least=9, limit=300.0)
    control: Any = types.SimpleNamespace(should_training_stop=False, should_log=False)
    now = 399.0
    budget.on_step_end(None, types.SimpleNamespace(global_step=1), control)  # type: ignore[arg-type]
    assert not budget.over and not control.should_training_stop
    now = 401.0
    budget.on_step_end(None, types.SimpleNamespace(global_step=2), control)  # type: ignore[arg-type]
    assert budget.over and control.should_training_stop


# --- shares of ranks, the cache, the score --------------------------------------------------------------------------


def plan_of(lengths: list[int], batch: int) -> tuple[Plan, Layout]:
    rows: Any = types.SimpleNamespace(lengths=np.array(lengths))
    layout = Layout(rows=rows, packs=one_per_row(rows.lengths))
    plan = Plan(
        costs=np.array(lengths, dtype=float),
        label_tokens=np.ones(len(lengths), dtype=int),
        global_batch_size=batch,
        seed=0,
        fingerprint="",
        lengths=np.array(lengths),
    )
    return plan, layout


def test_the_slowest_rank_decides_a_step() -> None:
    plan, layout = plan_of([8, 8, 16, 64], 4)
    line = (1.0, 0.5)
    alone = slowest_rank_seconds(plan, layout, world_size=1, per_device=1, line=line)
    assert alone.tolist() == [4 * 1.0 + 0.5 * (8 + 8 + 16 + 64)]
    # Two ranks, two micro-batches each: the plan gives 64 and 8 to one, 16 and 8 to the other.
    two = slowest_rank_seconds(plan, layout, world_size=2, per_device=1, line=line)
    assert two.tolist() == [2 * 1.0 + 0.5 * (64 + 8)]
    # A micro-batch is padded to its longest row.
    padded = slowest_rank_seconds(plan, layout, world_size=2, per_device=2, line=line)
    assert padded.tolist() == [1.0 + 0.5 * 2 * 64]


def test_of_equal_micro_batches_the_one_that_chance_holds_up_decides() -> None:
    plan, layout = plan_of([8] * 8, 4)
    line, residuals = (1.0, 0.0), [-0.25, 0.25]  # as likely one as the other
    alone = slowest_rank_seconds(plan, layout, world_size=1, per_device=1, line=line, residuals=residuals)
    assert alone.tolist() == [4.0, 4.0]  # nobody to wait for
    four = slowest_rank_seconds(plan, layout, world_size=4, per_device=1, line=line, residuals=residuals)
    assert len(four) == 2
    # All four are quick once in sixteen times: 0.25 * (15 - 1) / 16 is waited for on the average.
    assert four.mean() == pytest.approx(1.0 + 0.25 * 14 / 16, abs=0.25 * 0.1)
    two = slowest_rank_seconds(plan, layout, world_size=2, per_device=1, line=line, residuals=residuals)
    # Of two sums of two draws (-1/2, 0, 0, 1/2) the larger: 1/2 with 7/16, 0 with 8/16, -1/2 with 1/16.
    assert two.mean() == pytest.approx(2.0 + 0.5 * (7 - 1) / 16, abs=0.25 * 0.15)


def test_a_measurement_is_found_by_its_facts_and_a_miss_is_explained(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    facts = {"model.model_name_or_path": "m", "device": "NVIDIA L4", "data": "1"}
    assert "no dry run of this model" in measurements.find(facts)[1]
    kept = Measurement(**{**measurement().__dict__, "facts": facts})
    path = measurements.save(kept)
    assert measurements.find(facts) == (kept, str(path))
    assert measurements.find(facts | {"data": "2"}) == (None, "the nearest dry run differs in: data")
    assert "no dry run of this model" in measurements.find(facts | {"model.model_name_or_path": "other"})[1]
    path.write_text("{}")  # of another version, or damaged
    assert measurements.find(facts)[0] is None


def test_buckets_follow_the_users_cap() -> None:
    assert measurements.bucket_limits({}) == (25 * MIB, MIB)
    assert measurements.bucket_limits({"ddp_bucket_cap_mb": 25}) == (25 * MIB, MIB)
    assert measurements.bucket_limits({"ddp_bucket_cap_mb": 100}) == (100 * MIB, 100 * MIB)


def test_a_prediction_is_scored_against_what_was_measured() -> None:
    from finetune.measure.predict import predict

    one = measurement()
    prediction = predict(one.work(1), 1, None)
    results = {"step_seconds_median": 0.8, "peak_memory_gib": [0.5, 1.0], "tokens_per_second_per_gpu": 1250.0}
    found = scoring.compare(prediction, prediction, results)
    assert found["step_seconds"] == {"predicted": 1.0, "measured": 0.8, "error": pytest.approx(0.25)}
    assert found["peak_memory_gib"]["measured"] == 1.0  # the fullest rank
    assert found["tokens_per_second_per_gpu"]["error"] == pytest.approx(-0.2)
    short = scoring.compare(prediction, prediction, results | {"step_seconds_median": None})
    assert short["step_seconds"]["error"] is None  # one step: nothing but compilation was measured


def test_a_score_in_tensorboard() -> None:
    class Writer:
        scalars = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars[tag] = value

    writer = Writer()
    one = {"predicted": 1.0, "measured": 0.8, "error": 0.25}
    scoring.write(writer, {"source": "a file", "reason": None, **dict.fromkeys(scoring.FIELDS, one)}, 7)
    assert writer.scalars["9 prediction/error of step time [1]"] == 0.25 and len(writer.scalars) == 3
    scoring.write(writer, {"source": None, "reason": "no dry run", **dict.fromkeys(scoring.FIELDS)}, 7)
    assert len(writer.scalars) == 3
    scoring.write(None, {"reason": None}, 7)  # a rank that does not write
    assert scoring.sentence({"reason": "no dry run", **dict.fromkeys(scoring.FIELDS)}) is None
    known = dict.fromkeys(scoring.FIELDS, one) | {"peak_memory_gib": one | {"error": None}}
    assert scoring.sentence({"reason": None, **known}) == (
        f"Predicted by the dry run, against what was measured: step time {one['error']:+.0%}, tokens/s per device "
        f"{one['error']:+.0%}.".replace("%", " %")
    )


@pytest.mark.parametrize(("taken", "counted"), [(40, range(10, 40)), (12, range(6, 12)), (6, range(6)), (3, range(3))])
def test_the_beginning_does_not_count_where_enough_is_left(taken: int, counted: range) -> None:
    assert list(trial.after_warm_up(range(taken))) == list(counted)
