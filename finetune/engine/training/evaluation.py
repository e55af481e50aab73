"""Mean loss, token accuracy and entropy of held-out rows, each row once, over all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from finetune.data.layout import Layout
from finetune.engine.monitoring import token_statistics
from finetune.engine.sharding import shard
from finetune.runtime.ranks import activity, distributed


def evaluate_rows(trainer: Any, layout: Layout, prefix: str) -> tuple[dict[str, float], list[float]]:
    """The metrics over all rows of `layout`, and the loss of each document on any rank. Every rank calls it, with its
    `SFTTrainer`.

    Sums are reduced over all ranks, then divided: the result does not depend on the world size, nor on how rows are
    divided into batches. Token accuracy and entropy are left out, and no document has a loss, if the model does not
    yield them for every batch of every rank.
    """
    args, context = trainer.args, trainer.context
    one = torch.ones((), dtype=torch.int64, device=args.device)  # dividing by 1 gives sums
    order = layout.largest_first()[context.data_rank :: context.data_ranks]
    total = 0.0
    losses, documents, tokens = [], [], []
    recorded = trainer.recorded_rows(layout)
    size = recorded or args.per_device_eval_batch_size
    for start in range(0, len(order), size):
        activity.enter("evaluation")  # anew: a long evaluation is not a long phase as long as it gets on
        rows = order[start : start + size].tolist()
        rows += [-1] * (size - len(rows)) if recorded else []  # dummy rows: graphs replay one shape
        loss, inputs, found = trainer.evaluation_pass(layout, rows, one)
        losses.append(loss.double() / args.world_size)
        if found is not None:
            documents.append(token_statistics.document_losses(found, inputs, context))
            tokens.append(torch.stack([found.is_top1.sum(), found.entropy.sum()]).double())
    if trainer.sharded:
        _join_all_gathers(trainer, layout, len(losses), one)
    if losses:
        total = float(torch.stack(losses).sum())
    known = len(tokens) == len(losses)  # of all micro-batches, or the means would be of some
    top1, entropy = torch.stack(tokens).sum(0).tolist() if known and tokens else (0.0, 0.0)
    counted = float(layout.label_tokens[order].sum()) if context.part == 0 else 0.0  # ranks may share these rows
    summed, labels, top1, entropy, unknown = distributed.sum_over_ranks(
        [total, counted, top1, entropy, float(not known)]
    )
    metrics = {f"{prefix}_loss": summed / labels}
    if unknown:
        return metrics, []
    metrics |= {f"{prefix}_token_accuracy": top1 / labels, f"{prefix}_entropy": entropy / labels}
    own = torch.cat(documents).tolist() if documents else []
    return metrics, [loss for part in distributed.gather_objects(own) for loss in part]


def _join_all_gathers(trainer: Any, layout: Layout, done: int, count: torch.Tensor) -> None:
    """Dummy forward passes on the first row, so that every rank joins the same number of FSDP all-gathers."""
    args = trainer.args
    passes = math.ceil(math.ceil(len(layout) / trainer.context.data_ranks) / args.per_device_eval_batch_size)
    for _ in range(passes - done):
        trainer.evaluation_pass(layout, [0], count)
    shard.reshard(trainer.model)
