"""What a run of two ranks writes beside its model: TensorBoard's events, ranks.jsonl and run.json."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetune.runtime.tags import PHASES, tag
from tests import launch

pytestmark = pytest.mark.process


def events_of(out: Path) -> EventAccumulator:
    events = EventAccumulator(str(out / "runs" / out.name), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def arguments(model: Path, data: Path, steps: int) -> list[str]:
    return [
        *("--model.model_name_or_path", str(model), "--data.train_file", str(data / "train.jsonl")),
        *("--data.eval_fraction", "0.2", "--training.eval_steps", "5", "--training.save_steps", "6"),
        *("--training.global_batch_size", "4", "--training.max_steps", str(steps), "--logging.logging_steps", "4"),
        *("--model.backend", "transformers", "--data.packing", "false", "--training.learning_rate", "1e-3"),
    ]


@pytest.fixture(scope="module")
def run(tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("records") / "out"
    return out, launch.train("2 ranks", arguments(tiny_model, tiny_data, 10), out=out, cache=out.parent)


def test_charts_have_a_point_for_each_step(run: tuple[Path, dict]) -> None:
    out, found = run
    events = events_of(out)
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert [event.step for event in events.Scalars(tag(name))] == list(range(1, 11)), name
    assert [event.value for event in events.Scalars(tag("loss"))] == pytest.approx(found["losses"])
    evaluations = events.Scalars(tag("eval_loss"))
    assert [event.step for event in evaluations] == [0, 5, 10]  # once each, though step 10 is evaluated twice
    assert [event.value for event in evaluations] == pytest.approx([one["loss"] for one in found["evaluations"]])
    assert evaluations[-1].value == pytest.approx(found["eval_loss_after"])
    assert 0 <= events.Scalars(tag("eval_token_accuracy"))[-1].value <= 1
    assert {f"{page}/text_summary" for page in ("1 review", "2 data", "3 run", "4 configuration")} <= set(
        events.Tags()["tensors"]
    )
    assert events.Tags()["images"] == ["5 ranks/a typical step"]


def test_phases_sum_to_the_step_in_charts_and_on_each_rank(run: tuple[Path, dict]) -> None:
    out, _ = run
    events = events_of(out)
    sums: Counter[int] = Counter()
    for phase in PHASES:
        for event in events.Scalars(tag(phase)):
            sums[event.step] += event.value
    steps = {event.step: event.value for event in events.Scalars(tag("step_seconds"))}
    assert sums == pytest.approx(steps, rel=0.02) and list(steps) == [4, 8, 10]
    start, *records = [json.loads(line) for line in (out / "runs" / "ranks.jsonl").read_text().splitlines()]
    assert (start["kind"], start["world_size"], start["logging_steps"], start["step"]) == ("start", 2, 4, 0)
    assert all(one["host"] and one["device"] for one in start["ranks"])
    assert [one["step"] for one in records] == [4, 8, 10] and [one["steps"] for one in records] == [3, 4, 2]
    for record in records:
        assert len(record["step_seconds"]) == record["steps"]
        for rank in record["ranks"]:
            assert sum(rank[phase] for phase in PHASES) == pytest.approx(rank["step"])
            assert 0 < rank["own_work"] <= max(record["step_seconds"]) * 1.5 and rank["peak_gib"] > 0.1


def test_evaluation_and_saving_are_in_no_step(run: tuple[Path, dict]) -> None:
    """tokens/s, MFU and the score of the prediction go by the time of steps alone."""
    out, found = run
    records = [json.loads(line) for line in (out / "runs" / "ranks.jsonl").read_text().splitlines()[1:]]
    steps = sum(sum(record["step_seconds"]) for record in records)
    apart = found["evaluation_seconds"] + found["saving_seconds"]
    assert found["evaluation_seconds"] > 0 and found["saving_seconds"] > 0
    assert steps + apart < found["training_seconds"]
    tokens = sum(rank["tokens"] for record in records for rank in record["ranks"])
    first = found["tokens"] - round(found["tokens_per_second_per_gpu"] * 2 * steps)  # of the step that compiles
    assert 0 < first and tokens == found["tokens"]


def test_a_resumed_run_has_no_step_twice(run: tuple[Path, dict], tiny_model: Path, tiny_data: Path) -> None:
    out, _ = run
    words = [*arguments(tiny_model, tiny_data, 12), "--training.resume_from_checkpoint", str(out / "checkpoint-6")]
    words += ["--training.resume_with_changes", "true"]
    launch.train("2 ranks", words, out=out, cache=out.parent)
    events = events_of(out)
    assert [event.step for event in events.Scalars(tag("loss"))] == list(range(1, 13))
    assert [event.step for event in events.Scalars(tag("eval_loss"))] == [0, 5, 10, 12]
