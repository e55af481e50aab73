"""How a rank's rows become the inputs of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from finetune.data.layout import Layout
from finetune.engine.kernels import attention
from finetune.runtime.types import JsonObject


def eval_datasets(layout: Layout | Mapping[str, Layout] | None) -> Any:
    """What TRL's constructor gets as its evaluation rows; it only looks whether there are any, and at their names."""
    if layout is None or isinstance(layout, Layout):
        return layout.rows.dataset if layout else None
    return {name: one.rows.dataset for name, one in layout.items()}


def to_device(inputs: JsonObject, device: torch.device, *, packed_kernel: bool) -> JsonObject:
    """Move a micro-batch to the device without blocking, except for the document lengths.

    Transformers' layers get the boundaries of the documents on the device. Unsloth reads the lengths on the host: on
    the device they would cost a host-device sync. `HostTensor` keeps DDP from moving them. Non-blocking copies let the
    host launch the forward pass while the device still works on the previous micro-batch.

    Args:
        packed_kernel: transformers' layers compute attention with `attention.packed_attention`.
    """
    lengths = inputs.pop("packed_seq_lengths", None)
    moved = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
    if lengths is None:
        return moved
    if packed_kernel:
        return moved | attention.batch_arguments(lengths, device)
    return moved | {"packed_seq_lengths": HostTensor(lengths)}


class HostTensor:
    """Wraps a tensor among a forward's arguments to keep it on the host: DDP moves every tensor it recognizes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def unwrap_host_tensors(model: torch.nn.Module, args: tuple, kwargs: JsonObject) -> tuple[tuple, JsonObject]:
    """Forward pre-hook of the model inside DDP: unwraps the tensors."""
    return args, {name: value.tensor if isinstance(value, HostTensor) else value for name, value in kwargs.items()}


class PlanLoader(DataLoader):
    """A DataLoader that passes the epoch to its rank view; plain DataLoaders have no `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
