"""A rank's memory for a sharded model, predicted and counted."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

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


@pytest.mark.parametrize("full", [True, False], ids=["full", "adapters of experts"])
def test_memory_of_a_mixture_of_experts_is_that_of_all_experts_and_of_what_is_trained(full: bool) -> None:
    """Predicted from shapes, and counted after a step; before it, the optimizer's part is still to be allocated."""
    import peft

    from finetune.engine.model import experts
    from finetune.measure.held import bytes_not_yet_allocated
    from tests.unit.engine.model.test_experts import tiny

    model: Any = tiny()
    if not full:
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets))
    count = experts.count(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    trainer: Any = types.SimpleNamespace(
        model=model,
        weights="float32",
        optimizer=optimizer,
        args=types.SimpleNamespace(optim="adamw_torch"),
        accelerator=types.SimpleNamespace(ddp_handler=None),
    )
    needed = bytes_not_yet_allocated(trainer)
    model(input_ids=torch.arange(3, 20)[None], labels=torch.arange(3, 20)[None]).loss.backward()
    optimizer.step()
    assert bytes_not_yet_allocated(trainer) == 0
    found = memory_per_rank.allocated_bytes(model, optimizer)
    assert memory_per_rank.predicted_bytes(model, 1, "adamw_torch") == found
    assert (found.parameters, found.optimizer) == (4 * count.total, 8 * count.trainable)
    assert needed == found.optimizer and count.active < count.total
    half = memory_per_rank.predicted_bytes(model, 2, "adamw_torch")
    assert half.parameters == pytest.approx(found.parameters / 2, rel=0.01)
