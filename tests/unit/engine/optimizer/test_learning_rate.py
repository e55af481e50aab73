"""The learning rate of optimizers that keep it as a number, and of those that keep it in a tensor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.engine.optimizer.learning_rate import learning_rate, set_learning_rate


@pytest.mark.parametrize("start", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_a_rate_that_was_read_does_not_change_with_the_optimizer(start: Any) -> None:
    group: dict[str, Any] = {"lr": start}
    optimizer: Any = SimpleNamespace(param_groups=[group])
    read = []
    for value in (0.5, 0.25):
        set_learning_rate(group, value)
        read.append(learning_rate(optimizer))
    assert read == [0.5, 0.25] and all(type(one) is float for one in read)
    assert type(group["lr"]) is type(start)
