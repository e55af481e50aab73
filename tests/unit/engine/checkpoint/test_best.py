"""The best model and early stopping: decisions against transformers' callback, and runs inside this process."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from finetune import train
from finetune.config import load
from finetune.config.schema import ConfigError
from finetune.engine.checkpoint.best import BestModel
from finetune.engine.training.trainer import SFTTrainer
from finetune.runtime import command

BEST = ("--training.load_best_model_at_end", "true")
RESUME = ("--training.resume_from_checkpoint", "true")


@pytest.mark.parametrize("greater", [False, True])
def test_decisions_equal_those_of_transformers(greater: bool, tmp_path: Path) -> None:
    """Every sequence of five evaluations with values of a few levels, at several patiences and thresholds."""
    arguments = TrainingArguments(
        str(tmp_path), metric_for_best_model="eval_loss", greater_is_better=greater, use_cpu=True, report_to="none"
    )

    def stops_at(callback: Any, losses: tuple[float, ...]) -> int | None:
        state, control = TrainerState(max_steps=100, stateful_callbacks=[]), TrainerControl()
        if isinstance(callback, BestModel):
            callback.on_train_begin(arguments, state, control)
        for step, loss in enumerate(losses, start=1):
            state.global_step = step
            callback.on_evaluate(arguments, state, control, metrics={"eval_loss": loss})
            if control.should_training_stop:
                return step
            if state.best_metric is None or (loss > state.best_metric if greater else loss < state.best_metric):
                state.best_metric = loss
        return None

    ends = set()
    for losses in itertools.product((1.0, 1.5, 1.75, 3.0), repeat=5):
        for patience, threshold in ((1, 0.0), (2, 0.0), (2, 0.3), (3, 0.25)):
            expected = stops_at(EarlyStoppingCallback(patience, threshold), losses)
            assert stops_at(BestModel(patience, threshold), losses) == expected
            ends.add(expected)
    assert ends == {None, 2, 3, 4, 5}


def test_a_loss_that_is_not_a_number_is_no_improvement(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), metric_for_best_model="eval_loss", use_cpu=True, report_to="none")
    state, control, callback = TrainerState(max_steps=9, stateful_callbacks=[]), TrainerControl(), BestModel(2)
    callback.on_train_begin(arguments, state, control)
    callback.on_evaluate(arguments, state, control, metrics={"eval_loss": float("nan")})
    assert not control.should_training_stop
    callback.on_evaluate(arguments, state, control, metrics={"eval_loss": float("nan")})
    assert control.should_training_stop


def run(arguments: list[str], code: int = 0) -> dict[str, Any]:
    assert command.run_guarded(lambda: train.run(load(arguments))) == code
    folder = Path(arguments[arguments.index("--training.output_dir") + 1])
    return json.loads((folder / "run.json").read_text())


def worsen(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The held-out loss that the run sees falls until step `after`, then rises."""
    evaluate = SFTTrainer.evaluate

    def planted(self: SFTTrainer, *arguments: Any, **named: Any) -> dict[str, float]:
        handler, call = self.callback_handler, self.callback_handler.on_evaluate

        def on_evaluate(args: Any, state: Any, control: Any, metrics: dict[str, float]) -> Any:
            metrics["eval_loss"] = 1.0 + abs(state.global_step - after) / 10
            return call(args, state, control, metrics)

        monkeypatch.setattr(handler, "on_evaluate", on_evaluate)
        try:
            return evaluate(self, *arguments, **named)
        finally:
            monkeypatch.setattr(handler, "on_evaluate", call)

    monkeypatch.setattr(SFTTrainer, "evaluate", planted)


def assert_final_is(out: Path, step: int) -> None:
    name = next(path.name for path in out.glob("*model.safetensors"))
    final, best = load_file(out / name), load_file(out / f"checkpoint-{step}" / name)
    assert final.keys() == best.keys() and all(torch.equal(final[key], best[key]) for key in final)


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "full"])
def test_the_best_weights_are_the_final_model(
    evaluating_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    full: bool,
) -> None:
    """Best at step 4, the training ends at 8. save_steps has nothing to do with eval_steps, and rotation keeps two."""
    out = tmp_path / "out"
    worsen(monkeypatch, after=4)
    given = [*evaluating_run, *BEST, "--training.early_stopping_patience", "2", "--training.save_steps", "5"]
    given += ["--training.save_total_limit", "2", "--training.learning_rate", "1e-2", "--logging.logging_steps", "5"]
    given += ["--model.full_finetuning", "true"] if full else []
    content = run(given)
    assert content["best"] == {"step": 4, "metric": "eval_loss", "value": 1.0, "loaded": True}
    assert (content["status"], content["steps"], content["total_steps"]) == ("done", 8, 12)
    assert content["early_stopping"]["step"] == 8 and len(content["losses"]) == 8
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    assert_final_is(out, 4)
    last, final = (load_file(next(path.glob("*model.safetensors"))) for path in (out / "checkpoint-8", out))
    assert any(not torch.equal(last[name], final[name]) for name in final)
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "Stopped early after step 8 of 12" in shown and "eval_loss 1.0000 at step 4" in shown

    if full:
        return
    same = run([*given, *RESUME])  # it is finished, and says so
    assert same == content and "stopped early by training.early_stopping_patience" in capsys.readouterr().out
    record = out / "run.json"  # killed before its final model was saved: nothing is trained, the best is loaded again
    record.write_text(json.dumps(content | {"status": "running"}))
    (out / "adapter_model.safetensors").unlink()
    again = run([*given, *RESUME])
    assert (again["steps"], again["best"]["step"], again["early_stopping"]["step"]) == (8, 4, 8)
    assert_final_is(out, 4)
    longer = run([*given, *RESUME, "--training.early_stopping_patience", "3"])
    assert (longer["steps"], longer["best"]["step"], longer["early_stopping"]["step"]) == (10, 4, 10)
    assert_final_is(out, 4)


@pytest.mark.campaign
def test_the_last_step_can_be_the_best(
    evaluating_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 is no multiple of 5: the last step is evaluated nevertheless, and wins."""
    worsen(monkeypatch, after=12)
    content = run([*evaluating_run, *BEST, "--training.eval_steps", "5", "--training.save_steps", "0"])
    assert (content["best"]["step"], content["early_stopping"]) == (12, None)
    assert_final_is(tmp_path / "out", 12)


def test_a_damaged_best_checkpoint_is_not_loaded(
    evaluating_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worsen(monkeypatch, after=2)
    load_best = SFTTrainer._load_best_model

    def damage(self: SFTTrainer) -> None:
        file = tmp_path / "out" / "checkpoint-2" / "adapter_model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        load_best(self)

    monkeypatch.setattr(SFTTrainer, "_load_best_model", damage)
    assert run([*evaluating_run, *BEST, "--training.max_steps", "4"], code=1)["status"] == "failed"
    shown = " ".join(capsys.readouterr().err.split())
    assert "adapter_model.safetensors does not match its checksum" in shown and "checkpoint-4" in shown


@pytest.mark.campaign
def test_resume_keeps_the_best_so_far(
    evaluating_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Best at step 2, resumed at step 6; and once more without the best checkpoint, then with another metric."""
    worsen(monkeypatch, after=2)
    given = [*evaluating_run, *BEST, "--training.save_steps", "2", "--training.lr_scheduler_type", "constant"]
    run([*given, "--training.max_steps", "6"])
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    assert run([*given, *RESUME])["best"] == {"step": 2, "metric": "eval_loss", "value": 1.0, "loaded": True}
    assert_final_is(tmp_path / "out", 2)

    given[given.index("--training.output_dir") + 1] = str(tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "checkpoint-2")
    shutil.rmtree(tmp_path / "out")
    assert run([*given, *RESUME, "--training.max_steps", "10"])["best"]["step"] == 8
    assert "best step so far, 2, no longer exists" in " ".join(capsys.readouterr().out.split())
    other = run([*given, *RESUME, "--training.metric_for_best_model", "eval_token_accuracy"])["best"]
    assert other["metric"] == "eval_token_accuracy" and other["step"] == 12 and 0 <= other["value"] <= 1


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (BEST, "eval_steps is 0"),
        (("--training.early_stopping_patience", "2"), "eval_steps is 0"),
        (("--training.metric_for_best_model", "eval_entropy"), "eval_steps is 0"),
        (("--training.early_stopping_threshold", "0.1"), "early_stopping_threshold has no effect"),
        (("--training.metric_for_best_model", "bleu"), "eval_loss, eval_token_accuracy, eval_entropy"),
        ((*BEST, "--training.eval_steps", "2"), "no rows are held out"),
    ],
)
def test_what_the_best_model_needs_is_checked_first(extra: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(["--model.model_name_or_path", "m", "--data.train_file", "t.jsonl", *extra])
    assert expected in str(refusal.value) and len(refusal.value.problems) == 1


def test_metrics_know_which_direction_is_better() -> None:
    given = ["--data.eval_fraction", "0.1", "--training.eval_steps", "2", *BEST]
    assert load(given).training.best_is_greatest is False
    assert load([*given, "--training.metric_for_best_model", "eval_token_accuracy"]).training.best_is_greatest is True
    assert load([*given, "--training.metric_for_best_model", "eval_entropy"]).training.best_is_greatest is False
    assert load([*given, "--training.greater_is_better", "true"]).training.best_is_greatest is True
    assert load([]).training.best_metric is None


def test_the_best_model_needs_held_out_rows_of_the_script(evaluating_run: list[str]) -> None:
    """A script's function may return no held-out rows, which is known only after it has run."""
    from finetune.engine.checkpoint import best
    from finetune.errors import UserError

    training = load([*evaluating_run, *BEST]).training
    with pytest.raises(UserError, match="no rows are held out"):
        best.best_model_callbacks(training, evaluates=False)
