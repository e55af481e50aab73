"""Tests of finetune/drop_in/script_run.py."""

from __future__ import annotations

import dataclasses
import errno
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import UserError
from finetune.runtime.files import checksum_of_json
from tests.helpers.drop_in import TEXTS, WARNINGS, dataset, losses

pytestmark = WARNINGS


def test_a_run_resumes_on_another_number_of_ranks_with_its_batch(make: Callable[..., Any], tmp_path: Path) -> None:
    """A checkpoint as 2 ranks with 4 rows each write it, resumed on one rank by the same script."""
    out = tmp_path / "out"
    whole = make(gradient_accumulation_steps=2, save_strategy="steps", save_steps=2)
    whole.train()
    manifest = out / "checkpoint-2" / "checkpoint.json"
    content = json.loads(manifest.read_text())
    del content["checksum"]
    assert content["batch"] == {"per_device": 4, "global_batch_size": 8, "world_size": 1}
    content["batch"]["world_size"] = 2
    manifest.write_text(json.dumps(content | {"checksum": checksum_of_json(content)}))
    resumed = make()
    assert resumed.plan.global_batch_size == 4
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert losses(resumed)[-2:] == losses(whole)[-2:]
    record = json.loads((out / "run.json").read_text())
    assert record["batch"] == {"per_device": 4, "accumulation": 2, "global_batch_size": 8}
    assert record["config"]["training"]["global_batch_size"] == 8
    text = (out / "run.yaml").read_text()
    assert text.startswith("# The rows came from a script") and "global_batch_size: 8" in text


def test_a_finished_run_without_a_checkpoint_is_not_trained_again(make: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = make(max_steps=1)
    first.train(resume_from_checkpoint=True)  # nothing to resume: as the first line of a script that is restarted
    make(max_steps=1).train(resume_from_checkpoint=True)  # its weights are nowhere
    assert (out / "earlier-run-1" / "run.json").is_file()
    first.save_model()
    before = (out / "run.json").read_bytes()
    with pytest.raises(UserError, match="holds a finished run, and no checkpoint. Load its model"):
        make(max_steps=1).train(resume_from_checkpoint=True)
    assert (out / "run.json").read_bytes() == before
    make(max_steps=1).train()
    assert (out / "earlier-run-2" / "model.safetensors").is_file()


def test_a_run_resumes_and_a_new_run_moves_the_old_one_aside(make: Callable[..., Any], tmp_path: Path) -> None:
    whole = make(save_strategy="steps", save_steps=2)
    whole.train()
    out = tmp_path / "out"
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}

    resumed = make(save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert losses(resumed)[-2:] == losses(whole)[-2:]
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name

    with pytest.raises(UserError, match="learning_rate"):
        make(learning_rate=1e-3).train(resume_from_checkpoint=str(out / "checkpoint-2"))
    make(learning_rate=1e-3).train(resume_from_checkpoint=str(out / "checkpoint-2"), resume_with_changes=True)

    assert not list(out.glob("earlier-run-*"))
    again = make()
    callbacks = list(again.callback_handler.callbacks)
    again.train()
    # Nothing of the run's own stays, which a second call would find.
    assert again.callback_handler.callbacks == callbacks
    assert not {"evaluate", "compute_loss", "get_batch_samples", "_save_checkpoint"} & set(vars(again))
    assert not {"backward", "clip_grad_norm_"} & set(vars(again.accelerator))
    assert (out / "earlier-run-1" / "checkpoint-4").is_dir() and not list(out.glob("checkpoint-*"))
    assert losses(again) == losses(whole)
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "done" and record["losses"] == pytest.approx(losses(whole), rel=1e-6)
    assert record["config"]["training"]["global_batch_size"] == 4 and record["backend"] == "transformers"


def test_both_front_doors_record_the_same(
    make: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same job, as a script and as a configuration: the same fields of run.json, losses, evaluations and weights.
    A step is the whole epoch, because the two order their rows by different names of the data."""
    from finetune import train
    from tests.helpers.runs import in_this_process

    tokenized = make(TEXTS).train_dataset["input_ids"]
    rows = [{"input_ids": list(ids), "labels": list(ids)} for ids in tokenized]
    both = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": "adamw_torch", "max_steps": 3}
    both |= {"eval_steps": 2, "gradient_checkpointing": False}
    script = make(rows[:8], eval_dataset=dataset(rows[8:12]), eval_strategy="steps", **both, global_batch_size=8)
    script.train()
    script.save_model()

    for name, some in (("train", rows[:8]), ("eval", rows[8:12])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    settings = {f"training.{name}": value for name, value in both.items()} | {
        "model.model_name_or_path": model,
        "model.backend": "transformers",
        "model.full_finetuning": True,
        "model.dtype": "float32",
        "data.train_file": tmp_path / "train.jsonl",
        "data.eval_file": tmp_path / "eval.jsonl",
        "data.packing": False,
        "data.num_proc": 1,
        "training.output_dir": tmp_path / "configured",
        "training.global_batch_size": 8,
        "training.per_device_train_batch_size": 4,
        "logging.logging_steps": 1,
        "logging.generate_samples": 0,
    }
    with in_this_process(monkeypatch, tmp_path):
        assert train.main([word for key, value in settings.items() for word in (f"--{key}", str(value))]) == 0

    code, configured = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("out", "configured"))
    assert code.keys() == configured.keys()
    assert code["batch"] == configured["batch"]
    for field in ("losses", "eval_loss_before", "eval_loss_after"):
        assert code[field] == pytest.approx(configured[field], rel=1e-5), field
    steps = [[one["step"] for one in record["evaluations"]] for record in (code, configured)]
    assert steps == [[0, 2, 3]] * 2
    for field in ("status", "steps", "tokens", "total_steps", "attention", "loss_normalized_by", "best", "sharding"):
        assert code[field] == configured[field], field
    assert code["final_files"].keys() == {"model.safetensors"} <= configured["final_files"].keys()


def test_an_evaluation_that_the_script_does_not_ask_for_is_not_made(make: Callable[..., Any], tmp_path: Path) -> None:
    """One that it does, before and after training, is none that its callbacks and its log know of."""
    from transformers import TrainerCallback

    class Seen(TrainerCallback):
        def __init__(self) -> None:
            self.evaluated: list[int] = []

        def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self.evaluated.append(state.global_step)

    def record(**given: Any) -> dict[str, Any]:
        trainer = make(eval_dataset=held_out, callbacks=[seen], **given)
        trainer.train()
        logged = [
            entry["step"] for entry in trainer.state.log_history if {"eval_short_loss", "eval_long_loss"} & entry.keys()
        ]
        assert logged == seen.evaluated
        return json.loads((tmp_path / "out" / "run.json").read_text())

    seen, held_out = Seen(), {"short": dataset(TEXTS[:3]), "long": dataset(TEXTS[3:10])}
    without = record()
    assert seen.evaluated == [] and without["evaluations"] == []
    assert without["eval_loss_before"] is None and without["eval_loss_after"] is None

    found = record(eval_strategy="steps", eval_steps=3)
    assert seen.evaluated == [3, 3, 4, 4]  # transformers evaluates after the last step
    assert found["eval_loss_before"].keys() == found["eval_loss_after"].keys() == held_out.keys()
    assert all(found["eval_loss_after"][name] < found["eval_loss_before"][name] for name in held_out)
    assert [one["step"] for one in found["evaluations"]] == [0, 0, 3, 3, 4, 4]


def test_the_scores_after_training_are_those_of_the_best_weights(make: Callable[..., Any], tmp_path: Path) -> None:
    """Which `load_best_model_at_end` has loaded; here the highest loss is the best."""
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "greater_is_better": True}
    trainer = make(eval_dataset=dataset(TEXTS[:6]), **best, **often)
    trainer.train()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    by_step = {one["step"]: one["loss"] for one in record["evaluations"]}
    assert record["best"] == {"step": 1, "metric": "loss", "value": by_step[1], "loaded": True}
    assert record["eval_loss_after"] == by_step[1] > by_step[4]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(record["eval_loss_after"], rel=1e-5)


def test_final_files_are_those_that_the_script_saves(make: Callable[..., Any], tmp_path: Path) -> None:
    """In run.json until the next run of the folder; a finished run that is resumed stays as it is."""
    from finetune.runtime.files import checksum

    def recorded() -> dict[str, Any]:
        return json.loads((tmp_path / "out" / "run.json").read_text())

    trainer = make(save_strategy="steps", save_steps=4)
    trainer.train()
    trainer.save_model(str(tmp_path / "elsewhere"))
    assert recorded()["status"] == "done" and recorded()["final_files"] is None
    trainer.save_model()
    done = recorded()
    assert done["final_files"] == {"model.safetensors": checksum(tmp_path / "out" / "model.safetensors")}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "all weights trained" in card and str(tmp_path) not in card

    again = make(save_strategy="steps", save_steps=4)
    assert again.train(resume_from_checkpoint=True).global_step == 4
    assert recorded() == done
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, again.model.get_parameter(name)), name


def test_a_full_disk_is_a_sentence_and_does_not_cost_the_model(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.engine import record
    from finetune.errors import RunError

    write, full = record.write_json, {"done"}

    def write_until(path: Path, content: dict[str, Any]) -> None:
        if content.get("status") in full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(record, "write_json", write_until)
    trainer = make()
    trainer.train()
    assert "No space left on the disk" in capsys.readouterr().err
    trainer.save_model()
    assert (tmp_path / "out" / "model.safetensors").is_file()

    full.add("running")
    with pytest.raises(RunError, match="No space left on the disk"):
        make().train()


def test_a_signal_after_the_last_step_does_not_cost_the_model(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run of a configuration saves its model, then ends with 130; a script has yet to save it."""
    from transformers import TrainerCallback

    from finetune.runtime.ranks import interrupt

    class Signal(TrainerCallback):
        def on_train_end(self, *given: Any, **named: Any) -> None:
            monkeypatch.setattr(interrupt, "requested", lambda: True)

    trainer = make(callbacks=[Signal()])
    assert trainer.train().global_step == 4
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "done"


@pytest.mark.parametrize("fault", ["memory", "divergence"])
def test_a_script_ends_as_a_configured_run_does(
    fault: str, make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence with the remedy, and a record that says that the run failed."""
    from transformers import TrainerCallback

    from finetune import review
    from finetune.errors import RunError

    class Full(TrainerCallback):
        def on_step_end(self, *given: Any, **named: Any) -> None:
            if fault == "memory":
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    trainer = make(callbacks=[Full()])
    training = dataclasses.replace(trainer.job.config.training, stop_on_divergence=True)
    config = dataclasses.replace(trainer.job.config, training=training)
    trainer.job = dataclasses.replace(trainer.job, config=config)
    monkeypatch.setattr(review, "divergence", lambda losses, evaluations: "loss 9" if len(losses) > 1 else None)
    expected = {"memory": "per_device_train_batch_size to 2", "divergence": "The run diverges at step 2: loss 9"}[fault]
    with pytest.raises(RunError, match=expected):
        trainer.train()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["status"] == "failed" and expected in record["error"]
    assert (tmp_path / "out" / "checkpoint-2").is_dir() == (fault == "divergence")


def test_a_script_that_leaves_the_micro_batch_open_gets_the_fastest(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a configuration does: searched before the first step and known in the next run; a size that is set is kept."""
    from finetune.measure import held, micro_batch

    asked: list[int] = []

    def try_size(trainer: Any, layout: Any, per_device: int, memory: Any) -> micro_batch.Attempt:
        asked.append(per_device)
        speed = {1: 100, 2: 1000, 4: 700, 8: 600}[per_device]
        return micro_batch.Attempt(per_device=per_device, fits=True, peak_bytes=1.0, tokens_per_second=speed)

    memory = types.SimpleNamespace(limit_bytes=1e12, reset=lambda: None, peak_bytes=lambda: 1e6)
    monkeypatch.setattr(micro_batch, "try_size", try_size)
    monkeypatch.setattr(held, "Memory", lambda device: memory)
    monkeypatch.setattr(micro_batch, "WON_BACK_STEPS", 3)
    monkeypatch.setattr("finetune.config.batch.LARGEST_DEFAULT_PER_DEVICE", 1)

    def trained(per_device: int | None, **given: Any) -> tuple[Any, dict[str, Any]]:
        trainer = make(global_batch_size=8, per_device_train_batch_size=per_device, **given)
        trainer.train()
        return trainer, json.loads((tmp_path / "out" / "run.json").read_text())

    kept, record = trained(4)
    assert asked == [] and record["micro_batch"]["reason"] == "as configured"
    assert record["config"]["training"]["per_device_train_batch_size"] == 4

    kept, record = trained(8)  # TRL's default, but given
    assert asked == [] and record["micro_batch"]["reason"] == "as configured" and record["batch"]["per_device"] == 8

    found, record = trained(None, save_strategy="steps", save_steps=2)
    assert asked and record["batch"] == {"per_device": 2, "accumulation": 4, "global_batch_size": 8}
    assert record["micro_batch"]["per_device"] == found.args.per_device_train_batch_size == 2
    assert losses(found) == pytest.approx(losses(kept), rel=1e-5)

    asked.clear()
    found.train()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert asked == [] and record["micro_batch"]["reason"].endswith("from an earlier search of this job")
    resumed = make(global_batch_size=8, per_device_train_batch_size=None)
    resumed.train(resume_from_checkpoint=tmp_path / "out" / "checkpoint-2")
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert asked == [] and record["micro_batch"]["reason"] == "as in the checkpoint"
