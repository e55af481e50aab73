"""The load-balancing loss of a mixture of experts, per document: the same objective at any micro-batch and world size.

transformers defines it over all tokens of a micro-batch: number of experts x sum over experts of (share of the tokens
that choose the expert) x (mean probability of the expert). A mean over a product of means depends on how a step is
divided. Here it is that loss of each document alone, and a step has the mean over its documents, weighted by their
tokens. Padding and dummy rows do not count.

Its gradient with respect to the router logits follows from the logits and from counts of the forward pass. So it is
not computed from a term of the loss, but added when the backward pass reaches the router. That works below every head,
and under every kind of gradient checkpointing: the reentrant kind, as Unsloth's on a GPU, computes the forward pass
without a graph, and would lose the gradient of a term.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from finetune.engine.model.experts import NUMBERS_OF_EXPERTS
from finetune.engine.sharding import shard
from finetune.errors import UserError
from finetune.runtime.types import Model

OFF = "Set training.router_aux_loss_coef to 0.0 to train without the load-balancing loss."
# Routers that transformers 5.17 does not record in `_can_record_outputs`, with the place of the logits in their output.
_NOT_RECORDED = {
    "GraniteMoeTopKRouter": 2,
    "GraniteMoeSharedTopKRouter": 2,
    "GraniteMoeHybridTopKRouter": 2,
    "GraniteMoeSWATopKRouter": 0,
}


class NoRoutersError(UserError, ValueError):
    """A model whose router logits are wanted does not yield them. A ValueError, as TRL raises."""


def check(model: Model, coefficient: float | None) -> None:
    """Raises NoRouters if a coefficient is given for a model whose type has no experts, as TRL does."""
    if coefficient and not hasattr(model.config.get_text_config(), "output_router_logits"):
        raise NoRoutersError(
            f"router_aux_loss_coef is {coefficient:g}, but {_name(model)} is no mixture of experts that returns its "
            "router logits. Remove it."
        )


def _name(model: Model) -> str:
    return type(shard.base_model(model)).__name__


def routers(model: Model) -> list[tuple[torch.nn.Module, int]]:
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


def install(model: Model, coefficient: float) -> LoadBalancing | None:
    """Add the term to every training pass of a model, in place of transformers' own; None for a model with one expert
    or none, whose type may have several.

    Raises:
        NoRouters: the model does not yield its router logits.
    """
    config = model.config.get_text_config()
    config.output_router_logits = False  # with it, the model adds the loss of the micro-batch
    numbers = [number for key in NUMBERS_OF_EXPERTS if isinstance(number := getattr(config, key, None), int)]
    if numbers and max(numbers) <= 1:
        return None
    found, chosen = routers(model), getattr(config, "num_experts_per_tok", None)
    if not found or chosen is None:
        raise NoRoutersError(f"{_name(model)} does not return the logits of its routers. {OFF}")
    one = LoadBalancing(coefficient=coefficient, chosen=chosen, name=_name(model))
    for module, place in found:
        module.register_forward_hook(functools.partial(_balance, place, one.number))
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


# The terms of this process's models by number: what a compiled layer can pass on. Operators, because torch.compile does
# not look into them: Unsloth compiles layers without graph breaks.
_terms: weakref.WeakValueDictionary[int, LoadBalancing] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@torch.library.custom_op("finetune::balanced", mutates_args=())
def _balance_loss(output: torch.Tensor, logits: torch.Tensor, number: int) -> torch.Tensor:
    """An output of a router, unchanged. The backward pass adds the term's gradient to that of the router's logits."""
    if (term := _terms.get(number)) is not None:
        term.count(logits)
    return output.clone()


@_balance_loss.register_fake
def _(output: torch.Tensor, logits: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(output)


@torch.library.custom_op("finetune::balanced_gradient", mutates_args=())
def _balanced_gradient(after: torch.Tensor, logits: torch.Tensor, number: int) -> torch.Tensor:
    """The term's gradient by router logits, computed `after` a gradient: compiled code would compute what depends on
    the forward pass alone in the forward pass."""
    term = _terms.get(number)
    return torch.zeros_like(logits) if term is None else term.gradient(logits)


@_balanced_gradient.register_fake
def _(after: torch.Tensor, logits: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(logits)


def _keep_counts(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, logits, ctx.number = inputs
    ctx.save_for_backward(logits)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    (logits,) = ctx.saved_tensors
    return gradient, _balanced_gradient(gradient, logits, ctx.number), None


_balance_loss.register_autograd(_backward, setup_context=_keep_counts)


def _balance(place: int, number: int, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    """Forward hook of a router. It runs in each forward pass; outside of training the term ignores it."""
    if not isinstance(output, tuple):
        return _balance_loss(output, output, number)
    # What the layer computes with: routing weights. Most layers do not read the logits.
    used = next(
        (at for at, one in enumerate(output) if at != place and torch.is_tensor(one) and one.is_floating_point()), place
    )
    return (*output[:used], _balance_loss(output[used], output[place], number), *output[used + 1 :])


class LoadBalancing:
    """The term in a model's training passes.

    Args:
        coefficient: of the term in the objective.
        chosen: experts that each token is routed to.
        name: of the model's class, for errors.
    """

    def __init__(self, *, coefficient: float, chosen: int, name: str) -> None:
        self.coefficient, self.chosen, self.name = coefficient, chosen, name
        self.number = next(_numbers)
        _terms[self.number] = self
        self._pass: _Pass | None = None
        self._in_forward = False

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

    def count(self, logits: torch.Tensor) -> None:
        """Count the choices of one router. Recomputed layers have been counted."""
        one = self._pass
        if one is None or not self._in_forward:
            return
        logits = logits.flatten(0, -2)
        if len(logits) != len(one.segments):
            raise NoRoutersError(
                f"The routers of {self.name} return {len(logits)} rows of logits for {len(one.segments)} tokens. {OFF}"
            )
        probabilities = logits.float().softmax(-1)
        choices = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(self.chosen).indices, 1.0)
        empty = torch.zeros(len(one.sizes), logits.shape[-1], device=logits.device)
        one.counts = empty.index_add(0, one.segments, choices) + one.counts
        one.probabilities = empty.index_add(0, one.segments, probabilities) + one.probabilities
        one.layers += 1

    def attach(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of the forward pass, unchanged, whose backward pass will include the term; and this micro-batch's
        share of the load-balancing loss of the step, without the coefficient: a scalar on the device.

        Raises:
            NoRouters: the forward pass called no router.
        """
        one = self._pass
        if one is None or not one.layers:
            raise NoRoutersError(f"{self.name} computes its layers without calling its routers. {OFF}")
        experts = one.counts.shape[-1]
        weights = (one.sizes > 0) * experts * one.share * one.counts / (one.sizes.clamp(min=1) * one.layers**2)
        value = (weights * one.probabilities).sum()
        one.weights = weights * (self.coefficient * one.scale)
        return _Attached.apply(loss, one), value  # type: ignore[return-value]

    def gradient(self, logits: torch.Tensor) -> torch.Tensor:
        """Of the term with respect to the logits of one router, in their type."""
        one = self._pass
        if one is None or one.weights is None or one.upstream is None:  # of another loss of the user's
            return torch.zeros_like(logits)
        probabilities = logits.flatten(0, -2).float().softmax(-1)
        weights = one.weights[one.segments]
        weights = weights - (probabilities * weights).sum(-1, keepdim=True)
        return (probabilities * weights * one.upstream).to(logits.dtype).view_as(logits)

    def end(self) -> None:
        """The backward pass is over."""
        self._pass = None
