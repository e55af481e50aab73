"""How a rank's rows become the inputs of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from finetune.data import IGNORE_INDEX
from finetune.data.layout import Layout
from finetune.runtime.ranks.context_group import ContextGroup
from finetune.runtime.types import JsonObject

PREDICTING = "predicting"  # positions that predict a supervised token; not an input of the model


def eval_datasets(layout: Layout | Mapping[str, Layout] | None) -> Any:
    """What TRL's constructor gets as its evaluation rows; it only looks whether there are any, and at their names."""
    if layout is None or isinstance(layout, Layout):
        return layout.rows.dataset if layout else None
    return {name: one.rows.dataset for name, one in layout.items()}


def own_part(batch: JsonObject, group: ContextGroup) -> JsonObject:
    """This rank's part of the tokens of a micro-batch that the ranks of `group` share, which `group.size` divides.

    Positions count from the beginning of each document, wherever the part begins, and `packed_seq_lengths` stay those
    of the whole row. `shift_labels` has the label that each position predicts: the last one's is the first of the next
    part. `document_lengths` are those of the part. A stand-in has the part with the most labels, for which a loss takes
    longest.
    """
    each = batch["input_ids"].shape[1] // group.size
    shifted = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    part = group.part
    if group.processes < group.size:
        part = int((shifted != IGNORE_INDEX).view(group.size, -1).sum(1).argmax())
    first, end = part * each, (part + 1) * each
    parts = {name: batch[name] for name in ("input_ids", "position_ids", "labels")} | {"shift_labels": shifted}
    lengths = batch["document_lengths"]
    ends = lengths.abs().cumsum(0)
    within = (ends.clamp(first, end) - (ends - lengths.abs()).clamp(first, end)) * lengths.sign()
    return {
        **batch,
        **{name: tensor[:, first:end].contiguous() for name, tensor in parts.items()},
        "document_lengths": within[within != 0],
    }


def targets(inputs: JsonObject) -> torch.Tensor:
    """The label that each position predicts, int64 [rows, positions]; the last position of a whole row predicts
    none."""
    shifted = inputs.get("shift_labels")
    return inputs["labels"][:, 1:] if shifted is None else shifted


def predicting(labels: torch.Tensor) -> torch.Tensor:
    """Positions in the flattened micro-batch whose next token is supervised, int64 [supervised tokens].

    Args:
        labels: int64 [rows, positions] on the host.
    """
    return F.pad(labels[:, 1:] != IGNORE_INDEX, (0, 1)).flatten().nonzero().squeeze(-1)


def to_device(
    inputs: JsonObject, device: torch.device, of_pack: Callable[[torch.Tensor, torch.device], JsonObject]
) -> JsonObject:
    """Move a micro-batch to the device without blocking, except for the document lengths.

    Transformers' layers get the boundaries of the documents on the device. Unsloth reads the lengths on the host: on
    the device they would cost a host-device sync. `HostTensor` keeps DDP from moving them. Non-blocking copies let the
    host launch the forward pass while the device still works on the previous micro-batch.

    Args:
        of_pack: what a pack needs beside its tokens (`by_document.arguments_of_pack`).
    """
    lengths = inputs.pop("packed_seq_lengths", None)
    moved = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
    if lengths is None:
        return moved
    given = of_pack(lengths, device)
    return moved | {name: HostTensor(one) if one is lengths else one for name, one in given.items()}


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
