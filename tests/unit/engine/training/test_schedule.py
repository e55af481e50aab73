"""The learning rate of optimizers that keep it as a number, and of those that keep it in a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.engine.training.schedule import set_learning_rate


@pytest.mark.parametrize("start", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_a_rate_is_set_in_the_form_that_the_optimizer_keeps(start: Any) -> None:
    group: dict[str, Any] = {"lr": start}
    for value in (0.5, 0.25):
        set_learning_rate(group, value)
        assert float(group["lr"]) == value and type(group["lr"]) is type(start)
