"""Packs in models whose layers get no document boundaries: what carries a state (short convolutions, gated delta rules,
Mamba) runs on each document alone, which is exact, and slower than a kernel that knows the boundaries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.engine import multimodal
from finetune.engine.kernels import attention, context_attention
from finetune.engine.sharding import shard
from finetune.errors import UserError
from finetune.runtime.types import JsonObject, Model

NAME = "finetune_by_document"  # among transformers' attention functions
# What a layer gets about a whole row.
_OF_ROWS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass
class Row:
    """Tokens of each document of the row that a model computes; None without packs."""

    lengths: list[int] | None = None

    @classmethod
    def of(cls, model: Model) -> Row:
        """The row of a model from now on."""
        row = cls()
        shard.base_model(model).register_forward_pre_hook(row.note, with_kwargs=True)
        return row

    def note(self, module: nn.Module, args: tuple, given: JsonObject) -> tuple[tuple, JsonObject]:
        """Forward pre-hook of a model. The backward pass may compute layers again before the next row."""
        bounds, places = given.get("cu_seq_lens_q"), given.get("position_ids")
        if bounds is None and places is not None and places.shape[-2] == 1 and given.get("past_key_values") is None:
            starts = (places.reshape(-1, places.shape[-1])[0] == 0).nonzero()[:, 0]
            bounds = torch.cat([starts, starts.new_tensor([places.shape[-1]])])
        lengths = [] if bounds is None else bounds.diff().tolist()
        self.lengths = lengths if len(lengths) > 1 else None
        return args, given


def recurrent_layers(model: Model) -> dict[str, nn.Module]:
    """The modules that mix tokens with a convolution, which all layers with a state have except RWKV's and MiniMax's,
    by name."""
    return {
        name: one
        for name, one in multimodal.outside_towers(model).items()
        if any(isinstance(getattr(child, "base_layer", child), nn.Conv1d) for child in one.children())
    }


def separate_recurrent(model: Model) -> bool:
    """Compute recurrent layers one document after another. False if the model has none."""
    layers = recurrent_layers(model)
    if layers:
        row = Row.of(model)
        for layer in layers.values():
            layer.forward = _each_document(row, layer.forward)
    return bool(layers)


def _each_document(row: Row, whole: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer over the documents of a row. Those of similar length run side by side, padded behind their
    last tokens, which none before them sees."""

    def forward(*args: Any, **given: Any) -> Any:
        if row.lengths is None:
            return whole(*args, **given)
        given = {name: value for name, value in given.items() if name not in _OF_ROWS}
        if "attention_mask" in given:
            given["attention_mask"] = None
        ends = list(itertools.accumulate(row.lengths))
        outputs: dict[int, torch.Tensor] = {}
        further: Sequence[Any] = ()
        for group in _groups(row.lengths):

            def part(value: Any, spans: Sequence[slice]) -> Any:
                if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, ends[-1]):
                    return value
                return nn.utils.rnn.pad_sequence([value[0, one] for one in spans], batch_first=True)

            own = [slice(ends[one] - row.lengths[one], ends[one]) for one in group]
            found = whole(*(part(one, own) for one in args), **{name: part(one, own) for name, one in given.items()})
            found, *further = [found] if isinstance(found, torch.Tensor) else found
            outputs |= {one: found[place, : row.lengths[one]] for place, one in enumerate(group)}
        joined = torch.cat([outputs[one] for one in range(len(ends))])[None]
        return (joined, *further) if further else joined

    return forward


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The documents, in groups whose shortest has at least 3/4 of the tokens of the longest."""
    group: list[int] = []
    for one in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if group and lengths[one] < 3 / 4 * lengths[group[0]]:
            yield group
            group = []
        group.append(one)
    yield group


def separate_attention(model: Model) -> bool:
    """Compute the attention of a transformers model whose mask does not tell documents apart one document after
    another. False if that needs more than SDPA."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    base = shard.base_model(model)
    if base.config._attn_implementation != "sdpa" or attention.why_not_computed(model) is not None:
        return False
    ALL_ATTENTION_FUNCTIONS.register(NAME, _document_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    row = Row.of(model)
    for module in multimodal.outside_towers(model).values():
        if hasattr(module, "is_causal"):
            module.row_of_documents = row  # type: ignore[assignment]
    base.set_attn_implementation(NAME)
    return True


def _document_attention(module: nn.Module, *layer: Any, **given: Any) -> tuple[torch.Tensor, None]:
    """As `attention.packed_attention`, on a row of `Row`."""
    row: Any = getattr(module, "row_of_documents", None)
    query, key, value, mask = layer
    if row is None or row.lengths is None:
        return attention.packed_attention(module, query, key, value, mask, **given)
    if (found := attention.found_in_call(None, given)) is not None:
        raise UserError(f"This model's attention has {found}. Set data.packing: false.")
    given["cu_seq_lens_q"] = torch.tensor([0, *itertools.accumulate(row.lengths)])
    return context_attention.document_attention(module, query, key, value, None, **given)


def separate_positions(model: Model) -> bool:
    """Give a model whose positions count along time, height and width (Qwen2-VL and later) those of text beside them,
    all the same in rows of text: some find the documents of a pack in them alone. False for other models."""
    settings = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if "mrope_section" not in settings:
        return False

    def expand(module: nn.Module, args: tuple, given: JsonObject) -> tuple[tuple, JsonObject]:
        places = given.get("position_ids")
        if places is not None and places.ndim == 2:
            given = {**given, "position_ids": places[None].expand(4, *places.shape)}
        return args, given

    shard.base_model(model).register_forward_pre_hook(expand, with_kwargs=True)
    return True
