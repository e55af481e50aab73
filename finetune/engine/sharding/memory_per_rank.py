"""Bytes that a rank holds of a sharded model: predicted from the shapes of its parameters, and counted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from finetune.engine.optimizer import eight_bit, state_bytes


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on one rank, outside of a forward or backward pass. `optimizer` is None if it is not known."""

    parameters: int
    gradients: int
    optimizer: int | None


def predicted(model: Any, world_size: int, optimizer: str, weights: str = "float32") -> Held:
    """What each rank may hold at most.

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
            size = state_bytes.of_number(optimizer, size, weights)
            states += max(state_bytes.of_part(optimizer, one, size) or 0 for one in parts)
    known = optimizer in state_bytes.STATES
    return Held(parameters=total, gradients=trained, optimizer=states if known else None)


def held(model: Any, optimizer: Any = None) -> Held:
    """What this rank holds, by the storages of its tensors. The steps that an optimizer counts are left out."""
    parameters = list(model.parameters())
    state = {} if optimizer is None else optimizer.state
    kept = [one for of_one in state.values() for one in of_one.values() if torch.is_tensor(one) and one.dim() > 0]
    return Held(
        parameters=_bytes(parameters),
        gradients=_bytes(one.grad for one in parameters if one.grad is not None),
        optimizer=sum(eight_bit.local_bytes(one) for one in kept),
    )


def too_much(found: Held, expected: Held) -> str | None:
    """What is held beyond the prediction, in words; None if nothing is."""
    for name, most in vars(expected).items():
        if most is not None and getattr(found, name) > most:
            return f"{getattr(found, name):,} bytes of {name}, predicted are {most:,}"
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each once: the gradients of a unit are views of one."""
    storages = [_local(one).untyped_storage() for one in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages if one.nbytes()}.values())
