"""A rank's memory for a sharded model, predicted and counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from finetune.engine import invariants
from finetune.engine.sharding import (
    memory_per_rank,
)
from finetune.errors import UserError
from tests.helpers.layers import Model


def test_a_rank_that_holds_the_whole_model_holds_more_than_predicted() -> None:
    """Of what `fully_shard` leaves alone, in each of parameters, gradients and optimizer state."""
    model, ids = Model(tied=True), torch.tensor([[1, 2, 3]])
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids).sum().backward()
    optimizer.step()
    found, elements = memory_per_rank.allocated_bytes(model, optimizer), sum(one.numel() for one in model.parameters())
    assert found == memory_per_rank.RankMemory(parameters=4 * elements, gradients=4 * elements, optimizer=8 * elements)
    assert memory_per_rank.predicted_bytes(model, 1, "adamw_torch") == found
    half = memory_per_rank.predicted_bytes(model, 2, "adamw_torch")
    assert half == memory_per_rank.RankMemory(parameters=2 * elements, gradients=2 * elements, optimizer=4 * elements)
    assert memory_per_rank.excess(found, found) is None
    for name in ("parameters", "gradients", "optimizer"):
        worse = replace(half, **{name: getattr(found, name)})
        assert (memory_per_rank.excess(worse, half) or "").endswith(f"of {name}, predicted {getattr(half, name):,}")
    part = nn.Module()
    part.weight = nn.Parameter(torch.zeros(8, 4)[:4])  # of a larger storage, which it keeps
    with pytest.raises(
        UserError, match="rank 0 holds more memory than predicted .128 bytes of parameters, predicted 64"
    ):
        invariants.check_memory(part, torch.optim.SGD(part.parameters()), "sgd")
