"""The best evaluation of a run: which step it was, and when training stops because no later one is better.

The decision is that of transformers' EarlyStoppingCallback, on evaluation metrics that are equal on all ranks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.config.schema import TrainingConfig
from finetune.engine.checkpoint import checkpoints
from finetune.errors import RunError, UserError
from finetune.runtime.command import print_line
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject

_STATE = "best_model"  # key in `stateful_callbacks` of trainer_state.json


def best_model_callbacks(training: TrainingConfig, *, evaluates: bool) -> list[BestModel]:
    """The callback of a run that tracks its best evaluation; none for other runs.

    Args:
        evaluates: whether there are held-out rows.

    Raises:
        UserError: the run tracks its best evaluation and has no held-out rows.
    """
    if training.best_metric is None or not training.eval_steps:
        return []
    if not evaluates:
        raise UserError(
            "The best model is chosen by evaluations, and no rows are held out. Set data.eval_file or "
            "data.eval_fraction, or remove training.load_best_model_at_end and training.early_stopping_patience."
        )
    return [BestModel(training.early_stopping_patience, training.early_stopping_threshold)]


class BestModel(TrainerCallback):
    """Saves a checkpoint at each new best evaluation, and ends training after `patience` evaluations in a row that
    do not improve on the best so far by more than `threshold`.

    transformers' trainer keeps the best value and its step in its state after this callback has seen an evaluation.
    """

    def __init__(self, patience: int | None = None, threshold: float = 0.0) -> None:
        self.patience, self.threshold = patience, threshold
        self.misses = 0  # evaluations in a row without an improvement
        self.stopped_at: int | None = None  # step at which training ended early
        self._training = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._training = True
        kept = _callback_states(state).get(_STATE)
        same = kept is not None and _metric(args) == kept["metric"]
        moved = Path(str(args.output_dir), f"checkpoint-{state.best_global_step}")
        if same and state.best_model_checkpoint is None and moved.is_dir():
            state.best_model_checkpoint = str(moved)
        lost = same and args.load_best_model_at_end and state.best_model_checkpoint is None
        self.misses = kept["misses"] if kept is not None and same and not lost else 0
        if not same or lost:
            if lost and state.best_global_step is not None:
                print_line(
                    f"warning: the checkpoint of the best step so far, {state.best_global_step}, no longer exists. The "
                    "best model is chosen from the steps that follow.",
                    style="yellow",
                )
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if state.global_step >= state.max_steps and args.load_best_model_at_end:
            control.should_evaluate = True  # or a better last step would lose to an earlier one
        if control.should_evaluate and self.patience is not None and self.misses + 1 >= self.patience:
            control.should_log = True  # if training ends here, run.json still has the losses of all steps

    def on_evaluate(  # type: ignore[override]
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **kwargs: object,
    ) -> None:
        name = args.metric_for_best_model
        if name not in metrics:
            raise UserError(
                f"training.metric_for_best_model is {name}, which this run's evaluation does not return. Use one of "
                f"{', '.join(metrics)}."
            )
        if not self._training:
            return
        gain = _gain(metrics[name], state.best_metric, greater=bool(args.greater_is_better))
        self.misses = 0 if gain > self.threshold else self.misses + 1
        _callback_states(state)[_STATE] = {"metric": _metric(args), "misses": self.misses}
        if gain > 0 and args.load_best_model_at_end:
            control.should_save = True
        if self.patience is not None and self.misses >= self.patience and state.global_step < state.max_steps:
            self.stopped_at = state.global_step
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._training = False

    def ended_at(self, args: TrainingArguments, state: TrainerState, total_steps: int) -> bool:
        """Whether a run of `total_steps` steps ends at a checkpoint with this state: it was stopped early there."""
        kept = _callback_states(state).get(_STATE)
        if kept is None or kept["metric"] != _metric(args) or state.max_steps != total_steps:
            return False
        return self.patience is not None and kept["misses"] >= self.patience


def _callback_states(state: TrainerState) -> JsonObject:
    return state.stateful_callbacks  # type: ignore[return-value]  # annotated as a list, converted to a dict on creation


def _metric(args: TrainingArguments) -> list[object]:
    return [args.metric_for_best_model, args.greater_is_better]


def _gain(value: float, best: float | None, *, greater: bool) -> float:
    """By how much `value` is better than the best so far; not above 0 if it is not, or not a number."""
    if not math.isfinite(value):
        return -math.inf
    if best is None or not math.isfinite(best):
        return math.inf
    return value - best if greater else best - value


def verify_best_checkpoint(checkpoint: Path, last: Path) -> None:
    """Compare the checksums of the best checkpoint, once per machine. Every rank calls it.

    Args:
        last: the checkpoint of the last step, which the error names.

    Raises:
        RunError: on every rank: it is damaged.
    """
    found = checkpoints.damage(checkpoint, verify=True) if distributed.ranks().is_local_main else None
    wrong = next((one for one in distributed.gather_objects(found) if one is not None), None)
    if wrong is not None:
        raise RunError(
            f"The best checkpoint, {checkpoint}, is damaged: {wrong}. The model of the last step is in {last}. Remove "
            "the damaged folder, then resume with training.resume_from_checkpoint: true."
        )


def best_summary(trainer: Any) -> JsonObject | None:
    """{step, metric, value, loaded} of the best evaluation, for run.json; None if none was tracked."""
    state, args = trainer.state, trainer.args
    if args.metric_for_best_model is None or not state.best_global_step:
        return None
    loaded = bool(args.load_best_model_at_end and state.best_model_checkpoint)
    return {
        "step": state.best_global_step,
        "metric": args.metric_for_best_model,
        "value": float(state.best_metric),
        "loaded": loaded,
    }
