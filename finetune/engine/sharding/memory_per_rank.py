"""A rank's memory for a sharded model, in bytes: predicted from the shapes of its parameters, and counted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from finetune.engine.optimizer import eight_bit, state_bytes
from finetune.runtime.types import Model


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank, outside of a forward or backward pass. `optimizer` is None if it is not known."""

    parameters: int
    gradients: int
    optimizer: int | None


def predicted_bytes(model: Model, world_size: int, optimizer: str, weights: str = "float32") -> RankMemory:
    """Most memory that a rank may hold.

    FSDP2 splits a parameter along its first dimension into parts of ceil(rows / ranks) rows and pads the last one
    (`FSDPParam._init_sharded_param`, torch/distributed/fsdp). Gradients have the same parts in the parameter's type,
    and Adam keeps two more tensors, perhaps in 8 bits. Only shapes are read, which are the same if nothing is sharded.

    Args:
        optimizer, weights: as `training.optim` and `training.master_weights`.
    """
    total = trained = states = 0
    for parameter in model.parameters():
        rows, *others = parameter.shape or (1,)
        each, row, size = math.ceil(rows / world_size), math.prod(others), parameter.element_size()
        total += each * row * size
        if parameter.requires_grad:
            trained += each * row * size
            parts = (each * row, rows % each * row)  # of a rank, and of the last one that has any
            size = state_bytes.bytes_per_number(optimizer, size, weights)
            states += max(state_bytes.optimizer_state_bytes(optimizer, one, size) or 0 for one in parts)
    known = optimizer in state_bytes.STATES
    return RankMemory(parameters=total, gradients=trained, optimizer=states if known else None)


def allocated_bytes(model: Model, optimizer: torch.optim.Optimizer | None = None) -> RankMemory:
    """Memory on this rank, by the storages of its tensors. An optimizer's step counters are left out."""
    parameters = list(model.parameters())
    state = {} if optimizer is None else optimizer.state
    kept = [one for of_one in state.values() for one in of_one.values() if torch.is_tensor(one) and one.dim() > 0]
    return RankMemory(
        parameters=_bytes(parameters),
        gradients=_bytes(one.grad for one in parameters if one.grad is not None),
        optimizer=sum(eight_bit.local_bytes(one) for one in kept),
    )


def excess(found: RankMemory, expected: RankMemory) -> str | None:
    """Which of them exceeds the prediction and by what figures, for a message; None if none does."""
    for name, most in vars(expected).items():
        if most is not None and getattr(found, name) > most:
            return f"{getattr(found, name):,} bytes of {name}, predicted {most:,}"
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each once: the gradients of a unit are views of one."""
    storages = [_local(one).untyped_storage() for one in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages if one.nbytes()}.values())
