"""Counts how many tokens each expert gets in training, where the experts are called: with the choice itself.

Logits of a router are not the choice: DeepSeek and GLM correct them and choose among groups. Routers need not be
trained for it, nor return logits. Padding, evaluation and recomputed layers do not count.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from finetune.engine.model import experts
from finetune.runtime.types import Model

# The counters of this process's models by number: what a compiled layer can pass on. As in `router_loss` an operator,
# because torch.compile does not look into it: Unsloth compiles layers without graph breaks.
_counters: weakref.WeakValueDictionary[int, ExpertLoad] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _count(chosen: torch.Tensor, number: int, layer: int) -> None:
    if (counter := _counters.get(number)) is not None:
        counter.count(chosen, layer)


@torch.library.custom_op("finetune::count_choices", mutates_args=())
def _count_choices(chosen: torch.Tensor, number: int, layer: int) -> torch.Tensor:
    """The choice of a layer's router, unchanged."""
    _count(chosen, number, layer)
    return chosen.clone()


@_count_choices.register_fake
def _(chosen: torch.Tensor, number: int, layer: int) -> torch.Tensor:
    return torch.empty_like(chosen)


def _hook(number: int, layer: int, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Forward hook of a layer's experts, before they compute: their first argument of whole numbers is the choice."""
    given = dict(enumerate(args)) | kwargs
    tensors = [(name, one) for name, one in given.items() if isinstance(one, torch.Tensor) and one.dim() == 2]
    name = next((name for name, one in tensors if one.dtype in (torch.int64, torch.int32)), None)
    if name is None:
        return None
    if not torch.compiler.is_compiling():
        return _count(given[name], number, layer)
    given[name] = _count_choices(given[name], number, layer)
    return tuple(given[place] for place in range(len(args))), {key: given[key] for key in kwargs}


class ExpertLoad:
    """Tokens by layer and expert since they were last taken. They stay on the device until then."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """
        Args:
            sizes: number of experts in each layer that has several.
        """
        self.sizes = tuple(sizes)
        self.number = next(_numbers)
        _counters[self.number] = self
        self._counts: list[torch.Tensor | None] = [None] * len(self.sizes)  # int64 [experts + 1] each, the last of none
        self._counted: torch.Tensor | None = None  # int64 [tokens] of the pass: 1 of a document, 0 of padding

    @contextlib.contextmanager
    def forward(self, lengths: torch.Tensor, tokens: int) -> Iterator[None]:
        """Context of the forward pass of a micro-batch that is trained on.

        Args:
            lengths: int64 [segments], of documents and, negative, of padding, in the order of the tokens.
            tokens: of all segments.
        """
        documents = (lengths > 0).long()
        self._counted = torch.repeat_interleave(documents, lengths.abs(), output_size=tokens)  # no host-device sync
        try:
            yield
        finally:
            self._counted = None

    def count(self, chosen: torch.Tensor, layer: int) -> None:
        """Count the choices of one layer: int [tokens, experts per token]."""
        if self._counted is None or len(chosen) != len(self._counted):
            return
        counts, size = self._counts[layer], self.sizes[layer]
        if counts is None:
            counts = self._counts[layer] = torch.zeros(size + 1, dtype=torch.int64, device=chosen.device)
        # A choice of no expert is -1 or the number of experts.
        counts.index_add_(0, chosen.flatten().long() % (size + 1), self._counted[:, None].expand_as(chosen).flatten())

    def take(self) -> list[float]:
        """This rank's tokens of each expert, layer by layer: `sum(sizes)` numbers. Synchronizes with the device."""
        counts = [
            one[:-1] if one is not None else torch.zeros(size, dtype=torch.int64)
            for one, size in zip(self._counts, self.sizes, strict=True)
        ]
        self.forget()
        device = counts[0].device
        return torch.cat([one.to(device) for one in counts]).double().tolist()

    def forget(self) -> None:
        """Drop what was counted."""
        self._counts = [None] * len(self.sizes)


def install(model: Model) -> ExpertLoad | None:
    """Count in every training pass of a model; None for a model without routed experts."""
    config = model.config.get_text_config()
    found = [(name, number) for name, _, number in experts.stacks(model) if experts.per_token(config, name)]
    if not found:
        return None
    load = ExpertLoad([number for _, number in found])
    for layer, (name, _) in enumerate(found):
        while name.endswith(".base_layer"):  # an adapter of a stack is around it, and may compute without calling it
            name = name.removesuffix(".base_layer")
        hook = functools.partial(_hook, load.number, layer)
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    return load
