"""The load-balancing loss of a mixture of experts, per document: the same objective at any micro-batch and world size.

transformers defines it over all tokens of a micro-batch: number of experts x sum over experts of (share of the tokens
that choose the expert) x (mean probability of the expert). A mean over a product of means depends on how a step is
divided. Here it is that loss of each document alone, and a step has the mean over its documents, weighted by their
tokens. Padding and dummy rows do not count.

Its gradient with respect to the router's probabilities follows from the counts of the forward pass alone. So it is
added to the gradient of the router logits when the backward pass reaches them. That works below every head, because
nothing is added to the loss, and under every kind of gradient checkpointing: reentrant checkpointing computes the
forward pass without a graph, and loses the gradient of a term that is computed from it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from finetune.errors import UserError

OFF = "Set router_aux_loss_coef to 0.0 to train without the load-balancing loss."
# Names by which configurations have the number of routed experts.
_NUMBERS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Routers that transformers 5.17 does not record in `_can_record_outputs`, with the place of the logits in their output.
_NOT_RECORDED = {
    "GraniteMoeTopKRouter": 2,
    "GraniteMoeSharedTopKRouter": 2,
    "GraniteMoeHybridTopKRouter": 2,
    "GraniteMoeSWATopKRouter": 0,
}


class NoRouters(UserError, ValueError):
    """A model whose router logits are wanted does not yield them. A ValueError, as TRL raises."""


def check(model: Any, coefficient: float | None) -> None:
    """Raises NoRouters if a coefficient is given for a model whose type has no experts, as TRL does."""
    if coefficient and not hasattr(model.config.get_text_config(), "output_router_logits"):
        raise NoRouters(
            f"router_aux_loss_coef is {coefficient:g}, but {_name(model)} is no mixture of experts that returns its "
            "router logits. Remove it."
        )


def _name(model: Any) -> str:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__


def routers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, int]]:
    """The modules whose output holds router logits, each once, and the place of the logits in a tuple that it returns.

    As transformers' `output_router_logits` finds them: by the classes that a model declares.
    """
    found: dict[int, tuple[torch.nn.Module, int]] = {}
    for part in model.modules():
        if not isinstance(part, transformers.PreTrainedModel):
            continue
        declared = (part._can_record_outputs or {}).get("router_logits", [])
        for one in declared if isinstance(declared, list) else [declared]:
            target, place = getattr(one, "target_class", one), getattr(one, "index", 1)
            inside = f".{name}." if (name := getattr(one, "layer_name", None)) else ""
            for path, module in part.named_modules():
                # By name as well: Unsloth replaces classes by compiled ones.
                same = isinstance(module, target) or type(module).__name__ == target.__name__
                if same and inside in f".{path}.":
                    found.setdefault(id(module), (module, place))
        for module in part.modules():
            if (place := _NOT_RECORDED.get(type(module).__name__)) is not None:
                found.setdefault(id(module), (module, place))
    return list(found.values())


def install(model: Any, coefficient: float) -> LoadBalancing | None:
    """Add the term to every training pass of a model, in place of transformers' own; None for a model with one expert
    or none, whose type may have several.

    Raises:
        NoRouters: the model does not yield its router logits.
    """
    config = model.config.get_text_config()
    config.output_router_logits = False  # with it, the model adds the loss of the micro-batch
    numbers = [number for key in _NUMBERS_OF_EXPERTS if isinstance(number := getattr(config, key, None), int)]
    if numbers and max(numbers) <= 1:
        return None
    found, chosen = routers(model), getattr(config, "num_experts_per_tok", None)
    if not found or chosen is None:
        raise NoRouters(f"{_name(model)} does not return the logits of its routers. {OFF}")
    one = LoadBalancing(coefficient=coefficient, chosen=chosen, name=_name(model))
    for module, place in found:
        module.register_forward_hook(functools.partial(one.note, place))
    return one


@dataclass
class _Pass:
    """One micro-batch. Tensors have a row for each segment: a document or a run of padding."""

    segments: torch.Tensor  # int64 [tokens], the segment of each token
    sizes: torch.Tensor  # float32 [segments, 1], tokens of each document; 0 for padding
    share: float  # of one token in the step: 1 / (tokens of the step)
    scale: float  # what the token losses of this rank are multiplied by
    counts: Any = 0.0  # float32 [segments, experts], how many tokens chose an expert, summed over layers
    probabilities: Any = 0.0  # float32 [segments, experts], summed over tokens and layers
    layers: int = 0
    weights: torch.Tensor | None = None  # float32 [segments, experts], the loss's gradient by each probability
    upstream: torch.Tensor | None = None  # the gradient of the loss: 1, or the factor of a gradient scaler


class _Attached(torch.autograd.Function):
    """The loss, unchanged. Its backward pass, which runs before that of any layer, notes the gradient of the loss."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, one: _Pass) -> torch.Tensor:
        ctx.one = one
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.one.upstream = gradients[0]
        return gradients[0], None


class LoadBalancing:
    """The term in a model's training passes.

    Args:
        coefficient: of the term in the objective.
        chosen: experts that each token is routed to.
        name: of the model's class, for errors.
    """

    def __init__(self, *, coefficient: float, chosen: int, name: str) -> None:
        self.coefficient, self.chosen, self.name = coefficient, chosen, name
        self._pass: _Pass | None = None
        self._in_forward = False
        self._summed: torch.Tensor | None = None

    @contextlib.contextmanager
    def forward(self, lengths: torch.Tensor, tokens: int, share: float, scale: float) -> Iterator[None]:
        """Context of the forward pass of a micro-batch that is trained on.

        Args:
            lengths: int64 [segments], of documents and, negative, of padding, in the order of the tokens.
            tokens: of all segments.
            share: of one token in the step: 1 / (tokens of all documents of the step).
            scale: what the token losses of this rank are multiplied by.
        """
        numbers = torch.arange(len(lengths), device=lengths.device)
        segments = torch.repeat_interleave(numbers, lengths.abs(), output_size=tokens)  # without a host-device sync
        sizes = lengths.clamp(min=0).float()[:, None]
        self._pass, self._in_forward = _Pass(segments=segments, sizes=sizes, share=share, scale=scale), True
        try:
            yield
        finally:
            self._in_forward = False

    def note(self, place: int, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook of a router. Under checkpointing it runs again in the backward pass."""
        if (one := self._pass) is None:
            return
        logits = output[place] if isinstance(output, tuple) else output
        if self._in_forward:
            self._count(one, logits.detach())
        if logits.requires_grad:
            kept = logits.detach()  # the hook must not hold the tensor that holds the hook
            logits.register_hook(lambda gradient: gradient + self._gradient(one, kept).view_as(gradient))

    def _count(self, one: _Pass, logits: torch.Tensor) -> None:
        logits = logits.flatten(0, -2)
        if len(logits) != len(one.segments):
            raise NoRouters(
                f"The routers of {self.name} return {len(logits)} rows of logits for {len(one.segments)} tokens. {OFF}"
            )
        probabilities = logits.float().softmax(-1)
        choices = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(self.chosen).indices, 1.0)
        empty = torch.zeros(len(one.sizes), logits.shape[-1], device=logits.device)
        one.counts = empty.index_add(0, one.segments, choices) + one.counts
        one.probabilities = empty.index_add(0, one.segments, probabilities) + one.probabilities
        one.layers += 1

    def attach(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of the forward pass, unchanged; its backward pass will include the term.

        Raises:
            NoRouters: the forward pass called no router.
        """
        one = self._pass
        if one is None or not one.layers:
            raise NoRouters(f"{self.name} computes its layers without calling its routers. {OFF}")
        experts = one.counts.shape[-1]
        weights = (one.sizes > 0) * experts * one.share * one.counts / (one.sizes.clamp(min=1) * one.layers**2)
        value = (weights * one.probabilities).sum()
        self._summed = value if self._summed is None else self._summed + value
        one.weights = weights * (self.coefficient * one.scale)
        return _Attached.apply(loss, one)  # type: ignore[return-value]

    @staticmethod
    def _gradient(one: _Pass, logits: torch.Tensor) -> torch.Tensor:
        """Of the term with respect to the logits of one layer, in their type."""
        probabilities = logits.flatten(0, -2).float().softmax(-1)
        assert one.weights is not None and one.upstream is not None
        weights = one.weights[one.segments]
        weights = weights - (probabilities * weights).sum(-1, keepdim=True)
        return (probabilities * weights * one.upstream).to(logits.dtype)

    def end(self) -> None:
        """The backward pass is over."""
        self._pass = None

    def take(self) -> float | None:
        """This rank's share of the term, without the coefficient, summed over the steps since the last call; None if
        there were none. Synchronizes with the device."""
        summed, self._summed = self._summed, None
        return None if summed is None else float(summed)
