"""The learning rate of an optimizer. torchao's optimizers keep it in a tensor, whose value changes later."""

from __future__ import annotations

from typing import Any

import torch


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The rate of the next step, as a number."""
    return float(optimizer.param_groups[0]["lr"])


def set_learning_rate(group: dict[str, Any], rate: float | torch.Tensor) -> None:
    """Set the learning rate of one parameter group. torchao's optimizers keep it in a tensor, and refuse a number."""
    if torch.is_tensor(group["lr"]):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
