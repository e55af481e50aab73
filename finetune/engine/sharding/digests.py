"""Compares the bytes of frozen weights before a model is sharded with those that its units gather.

On CUDA, FSDP2 copies a unit's parameters with `torch._foreach_copy_`, which converts 16-bit types through float32 and
so rewrites bit patterns of NaN: packed 4-bit weights that are stored as bfloat16 or float16 come back changed
(docs/defects.md, A13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_WORDS = 1 << 22  # of four bytes, hashed at a time: 80 MB for the products


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of a tensor's bytes, an int64 scalar on its device: its 32-bit words, each times the odd number of its
    place, summed modulo 2^64. Any change of a single word changes it."""
    content = tensor.detach().contiguous().flatten().view(torch.uint8)
    content = nn.functional.pad(content, (0, -content.numel() % 4))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    place = 0
    for words in content.view(torch.int32).split(_WORDS):
        odd = torch.arange(place, place + words.numel(), device=tensor.device) * 2 + 1
        total += (words.long() * odd).sum()
        place += words.numel()
    return total


def record_digests(module: nn.Module, gathered_in: torch.dtype | None) -> None:
    """Keep the digests of a unit's frozen weights, right before it is sharded.

    Args:
        gathered_in: to which the weights are cast when they are gathered; None for no cast.
    """
    module.frozen_digests = {  # type: ignore[assignment]
        name: digest(one if gathered_in is None or not one.is_floating_point() else one.to(gathered_in))
        for name, one in module.named_parameters()
        if not one.requires_grad and not isinstance(one, DTensor)  # those of inner units are
    }


def changed_weights(model: nn.Module) -> tuple[str, ...]:
    """Names of the frozen weights whose bytes change when gathered. Every rank calls it: it gathers each unit."""
    wrong = []
    units: list[tuple[str, Any]] = [(name, one) for name, one in model.named_modules() if isinstance(one, FSDPModule)]
    for prefix, unit in units:
        expected: dict[str, torch.Tensor] = unit.__dict__.get("frozen_digests", {})
        if not expected:
            continue
        unit.unshard()
        gathered = dict(unit.named_parameters())
        differ = [digest(gathered[name]) != one.to(gathered[name].device) for name, one in expected.items()]
        found = torch.stack(differ).tolist()
        unit.reshard()
        wrong += [f"{prefix}.{name}".lstrip(".") for name, yes in zip(expected, found, strict=True) if yes]
    return tuple(wrong)
