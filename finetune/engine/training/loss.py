"""The loss of a micro-batch as a share of its step's, and what the passes of a rank yield besides gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from finetune.data import IGNORE_INDEX
from finetune.engine.model.expert_load import ExpertLoad
from finetune.engine.sharding import shard
from finetune.runtime.types import Model


def has_fused_head(model: Model) -> bool:
    """Whether TRL has given the model the forward that computes token losses without keeping the logits."""
    code = getattr(shard.base_model(model).forward, "__code__", None)
    return code is not None and "fused_lm_head" in code.co_varnames


def loss_from_mean(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], total: torch.Tensor) -> torch.Tensor:
    """Sum of the token losses / `total`, for a model whose forward ignores the count and returns the mean over its
    micro-batch.

    Args:
        total: supervised tokens of the global batch.
    """
    own = (inputs["labels"][:, 1:] != IGNORE_INDEX).sum()
    outputs = model(**inputs)
    mean = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    mean = torch.where(own > 0, mean, torch.zeros_like(mean))  # the mean over no label is NaN
    return mean * own / total


def loss_of_part(
    model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], total: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """(sum of the token losses of a part of a row / `total`, outputs), from the logits: a model's own loss may shift
    the labels once more.

    Args:
        inputs: with `shift_labels`, the label that each position predicts.
        total: supervised tokens of the global batch.
    """
    given = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
    outputs = model(**given)
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    labels = inputs["shift_labels"].flatten()
    summed = F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return summed / total, outputs


class StepStatistics:
    """This rank's losses and token statistics since they were last taken. They stay on the device until then; to take
    them synchronizes with it."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []  # of complete steps
        self._loss: torch.Tensor | None = None  # of the step that is trained, so far
        self._token_sums: torch.Tensor | None = None  # likeliest labels, entropy
        self._balancing: torch.Tensor | None = None
        self.expert_load: ExpertLoad | None = None  # of a mixture of experts

    def add_loss(self, loss: torch.Tensor, *, ends_step: bool) -> None:
        """A micro-batch is done."""
        self._loss = loss if self._loss is None else self._loss + loss
        if ends_step:
            self._losses.append(self._loss)
            self._loss = None

    def add_tokens(self, outputs: object) -> None:
        """A training pass is done: keep what a fused head has computed anyway, which other heads do not."""
        entropy, is_top1 = getattr(outputs, "entropy", None), getattr(outputs, "is_top1", None)
        if entropy is not None and is_top1 is not None:
            sums = torch.stack([is_top1.sum().float(), entropy.detach().sum().float()])
            self._token_sums = sums if self._token_sums is None else self._token_sums + sums

    def add_load_balancing(self, value: torch.Tensor) -> None:
        """A training pass of a mixture of experts is done."""
        self._balancing = value if self._balancing is None else self._balancing + value

    def take_losses(self) -> list[float]:
        """This rank's share of the loss of each step: their mean over ranks is the loss in nats per supervised
        token."""
        if not self._losses:
            return []
        own = torch.stack(self._losses).double().tolist()
        self._losses.clear()
        return own

    def take_tokens(self) -> tuple[float, float] | None:
        """(supervised tokens whose label was the likeliest, summed entropy in nats); None if the loss does not yield
        them."""
        sums, self._token_sums = self._token_sums, None
        if sums is None:
            return None
        top1, entropy = sums.tolist()
        return top1, entropy

    def take_load_balancing(self) -> float | None:
        """This rank's share of the load-balancing losses of the steps, without the coefficient; the sum over ranks is
        that of the steps. None if there were none."""
        summed, self._balancing = self._balancing, None
        return None if summed is None else float(summed)

    def take_expert_counts(self) -> list[float]:
        """This rank's tokens of each expert, layer by layer; the sum over ranks is that of the steps. Empty for a dense
        model."""
        return [] if self.expert_load is None else self.expert_load.take()

    def forget(self) -> None:
        """Drop everything: it is of passes outside of training, such as trials of a micro-batch."""
        if self.expert_load is not None:
            self.expert_load.forget()
        self._losses.clear()
        self._loss = self._token_sums = self._balancing = None
