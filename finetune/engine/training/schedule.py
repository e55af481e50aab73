"""The learning rate's schedule: errors in its arguments, and its position in a resumed run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from finetune.errors import UserError
from finetune.runtime.types import JsonObject


@contextlib.contextmanager
def explain_schedule_error(name: object, arguments: object) -> Iterator[None]:
    """Context in which a schedule is made; an error is about its arguments.

    Raises:
        UserError: with the keys.
    """
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        message = " ".join(str(error).split())
        given = f"training.lr_scheduler_kwargs is {arguments}, and " if arguments else ""
        raise UserError(
            f"{given}training.lr_scheduler_type {getattr(name, 'value', name)} cannot be used so: {message[:300]}. "
            "Give the arguments that transformers' schedule of this name has, or choose another."
        ) from error


def move_schedule(schedule: object, step: int) -> None:
    """Move a new schedule to optimizer step `step` and set its optimizer's learning rates to match.

    Schedules that depend on measurements (reduce_lr_on_plateau, greedy) have no position; they start over.
    """
    if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        return
    schedule.last_epoch = step
    schedule._step_count = step + 1
    schedule._last_lr = [
        base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        set_learning_rate(group, rate)


def set_learning_rate(group: JsonObject, rate: float | torch.Tensor) -> None:
    """Set the learning rate of one parameter group. torchao's optimizers keep it in a tensor, and refuse a number."""
    if torch.is_tensor(group["lr"]):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
