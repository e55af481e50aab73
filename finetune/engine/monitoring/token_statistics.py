"""Figures of single tokens: accuracy, entropy and the loss of each document, from outputs that a loss has produced."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from finetune.data import IGNORE_INDEX
from finetune.runtime.ranks.context_group import ALONE, ContextGroup
from finetune.runtime.types import JsonObject

CHUNK = 512  # tokens whose distribution is computed at a time: 300 MB in float32 at a vocabulary of 150,000


@dataclass(frozen=True)
class TokenStatistics:
    """Of one micro-batch; tensors of shape [rows, positions], zero where nothing is supervised."""

    log_probs: torch.Tensor  # of the label
    entropy: torch.Tensor  # of the distribution over the vocabulary, nats
    is_top1: torch.Tensor  # whether the label is the likeliest token


def from_outputs(outputs: object, targets: torch.Tensor) -> TokenStatistics | None:
    """The statistics of a forward pass: from the fused head's own values or from the logits; None if it has neither.

    Args:
        targets: int64 [rows, positions], the label that each position predicts, IGNORE_INDEX where nothing is
            supervised. The last position may be left out.
    """
    fused = [getattr(outputs, name, None) for name in ("log_probs", "entropy", "is_top1")]
    if all(torch.is_tensor(value) for value in fused):
        return TokenStatistics(*fused)  # type: ignore[arg-type]
    logits = getattr(outputs, "logits", None)
    rows, positions = targets.shape
    if (
        not torch.is_tensor(logits)
        or logits.dim() != 3
        or logits.shape[:2] not in ((rows, positions), (rows, positions + 1))
    ):
        return None  # Unsloth's fused loss leaves no logits
    return _from_logits(logits.detach()[:, :positions], targets)


def _from_logits(logits: torch.Tensor, targets: torch.Tensor) -> TokenStatistics:
    supervised = targets != IGNORE_INDEX
    chosen, wanted = logits[supervised], targets[supervised]
    columns: list[list[torch.Tensor]] = [[], [], []]
    for some, want in zip(chosen.split(CHUNK), wanted.split(CHUNK), strict=True):
        log_probs = some.float().log_softmax(-1)
        columns[0].append(log_probs.gather(-1, want[:, None])[:, 0])
        columns[1].append(-(log_probs.exp() * log_probs).sum(-1))
        columns[2].append((log_probs.argmax(-1) == want).float())
    zeros = torch.zeros(targets.shape, dtype=torch.float32, device=logits.device)
    return TokenStatistics(*(zeros.masked_scatter(supervised, torch.cat(one)) for one in columns))


def document_losses(found: TokenStatistics, inputs: JsonObject, group: ContextGroup = ALONE) -> torch.Tensor:
    """Mean loss of each document that has supervised tokens, in nats, float32 [documents].

    Args:
        inputs: the micro-batch: packs, whose position ids restart at each document, or one document per row.
        group: the ranks that share the row. All call it; the documents are those of the first one.
    """
    if group.size > 1:
        return _shared_document_losses(found, inputs, group)
    labels = inputs["labels"]
    if "position_ids" in inputs:
        numbers = (inputs["position_ids"] == 0).flatten().cumsum(0).view(labels.shape) - 1
    else:
        numbers = torch.arange(len(labels), device=labels.device)[:, None].expand_as(labels)
    supervised = labels[:, 1:] != IGNORE_INDEX
    numbers = numbers[:, 1:][supervised]  # a label belongs to the document that it stands in
    count = int(numbers.max()) + 1 if len(numbers) else 0
    sums = torch.zeros(count, device=labels.device).index_add_(0, numbers, -found.log_probs[supervised].float())
    tokens = torch.bincount(numbers, minlength=count)
    return (sums / tokens)[tokens > 0]


def _shared_document_losses(found: TokenStatistics, inputs: JsonObject, group: ContextGroup) -> torch.Tensor:
    """Of documents whose tokens several ranks have; empty on all but the first."""
    bounds, targets = inputs["cu_seq_lens_q"], inputs["shift_labels"].flatten()
    first = group.part * len(targets)
    places = torch.arange(first, first + len(targets), dtype=bounds.dtype, device=targets.device)
    numbers = torch.searchsorted(bounds, places, right=True) - 1
    # Float64 counts exactly. A label that a position predicts is of the same document, or none.
    each = torch.stack([-found.log_probs.flatten().double(), (targets != IGNORE_INDEX).double()])
    sums, tokens = group.sum(each.new_zeros(2, len(bounds) - 1).index_add_(1, numbers, each))
    return (sums / tokens)[tokens > 0].float()[: None if group.part == 0 else 0]
