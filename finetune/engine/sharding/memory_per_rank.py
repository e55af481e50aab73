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
    parameters = list(model.parameters())
    trained = [one for one in parameters if one.requires_grad]

    def largest_parts(tensors: Iterable[torch.Tensor]) -> int:
        return sum(_parts(one, world_size)[0] * one.element_size() for one in tensors)

    return RankMemory(
        parameters=largest_parts(parameters),
        gradients=largest_parts(trained),
        optimizer=int(predicted_state_bytes(trained, world_size, optimizer, weights))
        if optimizer in state_bytes.STATES
        else None,
    )


def predicted_state_bytes(
    trained: Iterable[torch.Tensor], world_size: int, optimizer: str, weights: str = "float32"
) -> float:
    """Most of an optimizer's state that a rank may hold for these parameters; as of Adam if it is not known. The
    arguments are those of `predicted_bytes`."""
    states = 0.0
    for one in trained:
        each = state_bytes.bytes_per_number(optimizer, one.element_size(), weights)
        parts = _parts(one, world_size)
        known = [state_bytes.optimizer_state_bytes(optimizer, part, each) for part in parts]
        unknown = parts[0] * state_bytes.state_bytes_per_weight(optimizer, each)
        states += max((part for part in known if part is not None), default=unknown)
    return states


def _parts(tensor: torch.Tensor, world_size: int) -> tuple[int, int]:
    """Numbers in the part of a rank, and in that of the last one that has any."""
    rows, *others = tensor.shape or (1,)
    each, row = math.ceil(rows / world_size), math.prod(others)
    return each * row, (rows % each if each else 0) * row


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


def local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's parts of tensors."""
    return [one.to_local() if isinstance(one, DTensor) else one for one in tensors]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each once: the gradients of a unit are views of one."""
    storages = [one.untyped_storage() for one in local(tensors)]
    return sum({one.data_ptr(): one.nbytes() for one in storages if one.nbytes()}.values())
