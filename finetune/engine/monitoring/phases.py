"""Where the time of a training step goes: marks at the trainer's boundaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.runtime.clock import Clock
from finetune.runtime.ranks import activity

PHASES = ("data", "forward", "backward", "optimizer", "other")
END = "end"  # closes a step; the interval before it is "other"
BETWEEN = "between"  # steps: logging, evaluation, saving; belongs to no step


class PhaseTimer(TrainerCallback):
    """Marks the phases of a trainer's steps on a clock; evaluation is not marked.

    A step runs from the request for its rows to the end of its callbacks after the update. What happens between two
    steps (logging, evaluation, checkpoints) belongs to neither.

    data: waiting for the step's batches. forward: from there, or from the previous backward pass, to the loss of a
    micro-batch. backward: to the end of its backward pass, including the communication inside. optimizer: gradient
    clipping and the update. other: the rest of the step, such as zeroing gradients and callbacks.
    """

    def __init__(self, trainer: Any, device: str) -> None:
        """
        Args:
            trainer: four of its methods are wrapped, and this callback is added to it.
            device: "cuda" or "cpu".
        """
        self._clock = Clock(device)
        self._trainer = trainer
        self.host_lead = 0.0  # seconds that the host was ahead of the device at the last step that was logged
        trainer.get_batch_samples = self._timed("data", trainer.get_batch_samples)
        trainer.compute_loss = self._timed("forward", trainer.compute_loss)
        trainer.accelerator.backward = self._timed("backward", trainer.accelerator.backward)
        trainer.average_gradients = self._timed("backward", trainer.average_gradients)
        trainer.add_callback(self)

    def take(self) -> list[dict[str, list[float]]]:
        """The complete steps since training began or the last call (see `split_steps`). Call it between steps. It
        synchronizes with the device."""
        return split_steps(self._clock.drain())

    def on_train_begin(self, *_: object, **kwargs: object) -> None:
        self._clock.reset()
        self._clock.mark()

    def on_pre_optimizer_step(self, *_: object, **kwargs: object) -> None:
        activity.enter("optimizer")

    def on_optimizer_step(self, *_: object, **kwargs: object) -> None:
        self._mark("optimizer")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._mark(END)
        activity.enter("between steps", state.global_step)
        # transformers synchronizes right after this, to log its loss, so this costs nothing more.
        if getattr(control, "should_log", False):
            self.host_lead = self._clock.wait()

    def _timed(self, label: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if label == "data":
                self._mark(BETWEEN)
            if torch.is_grad_enabled():
                activity.enter(label, self._trainer.state.global_step if label == "data" else None)
            result = function(*args, **kwargs)
            self._mark(label)
            return result

        return call

    def _mark(self, label: str) -> None:
        if torch.is_grad_enabled():  # gradients are off during evaluation
            self._clock.mark(label)


def split_steps(intervals: Iterable[tuple[str, float]]) -> list[dict[str, list[float]]]:
    """Seconds of each complete step by phase, one number per interval: several of forward and backward under gradient
    accumulation.

    Args:
        intervals: (label, seconds), as from `Clock.drain`; END closes a step, BETWEEN is left out.
    """
    steps: list[dict[str, list[float]]] = []
    step: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for label, seconds in intervals:
        if label == BETWEEN:
            continue
        step["other" if label == END else label].append(seconds)
        if label == END:
            steps.append(step)
            step = {phase: [] for phase in PHASES}
    return steps
