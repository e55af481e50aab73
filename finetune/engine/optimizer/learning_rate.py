"""The learning rate of an optimizer. torchao's optimizers keep it in a tensor, whose value changes later."""

from __future__ import annotations

import torch

from finetune.runtime.types import JsonObject


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The rate of the next step, as a number."""
    return float(optimizer.param_groups[0]["lr"])


def set_learning_rate(group: JsonObject, rate: float | torch.Tensor) -> None:
    """Set the learning rate of one parameter group. torchao's optimizers keep it in a tensor, and refuse a number."""
    if torch.is_tensor(group["lr"]):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
