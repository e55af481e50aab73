"""Packs in models whose layers carry a state (short convolutions, gated delta rules, Mamba). They get the boundaries of
the documents, for kernels that know them. Where there is none, a short convolution leaves out other documents' tokens,
and the other layers run on each document alone, which is exact and slower."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from finetune.engine import multimodal
from finetune.engine.kernels import attention, context_attention
from finetune.engine.sharding import shard
from finetune.runtime.types import JsonObject, Model

CONVOLUTION = "causal_conv1d_fn"  # in transformers' modules
# What a layer gets about a whole row.
_OF_ROWS = "attention_mask packed_seq_lengths seq_idx cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k".split()


def recurrent_layers(model: Model) -> dict[str, nn.Module]:
    """The modules that mix tokens with a convolution, or in RWKV with a shift by one token, by name. All layers with a
    state do, except MiniMax's."""
    return {
        name: one
        for name, one in multimodal.outside_towers(model).items()
        if any(isinstance(getattr(child, "base_layer", child), (nn.Conv1d, nn.ZeroPad2d)) for child in one.children())
    }


def carries_state(model: Model) -> str | None:
    """That a model has such layers, as a reason; None if it has none."""
    layer = next(iter(recurrent_layers(model).values()), None)
    return layer and f"{type(layer).__name__} carries a state from each token to the next"


def arguments_of_pack(model: Model, backend: str) -> Callable[[torch.Tensor, torch.device], JsonObject]:
    """What a model gets with a pack beside its tokens and positions, from the documents' lengths, int32 [documents] on
    the host: what the kernel of its attention reads, and for layers with a state the lengths, `cu_seq_lens_q` (for
    flash-linear-attention) and `seq_idx`, int32 [1, tokens], each token's document (causal-conv1d, mamba-ssm)."""
    own = model.config.get_text_config()._attn_implementation
    packed = own in (attention.PACKED, context_attention.NAME)
    states = bool(recurrent_layers(model))

    def arguments(lengths: torch.Tensor, device: torch.device) -> JsonObject:
        kernels = attention.batch_arguments(lengths, device) if packed or states else {}
        found = kernels if packed else {}
        if states:
            documents = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[None]
            documents = documents.pin_memory() if device.type == "cuda" else documents
            found |= {"cu_seq_lens_q": kernels["cu_seq_lens_q"], "seq_idx": documents.to(device, non_blocking=True)}
        return found | ({"packed_seq_lengths": lengths} if states or backend == "unsloth" and not packed else {})

    return arguments


def separate_convolutions(model: Model) -> bool:
    """Keep documents apart in the short convolutions of transformers' layers where no kernel does. False if the model
    has none that get the boundaries."""
    changed = False
    for layer in recurrent_layers(model).values():
        names = inspect.unwrap(type(layer).forward).__globals__
        own = names.get(CONVOLUTION)
        if own is not None and not isinstance(own, functools.partial):
            names[CONVOLUTION], changed = functools.partial(_convolution, own), True
    return changed


def _convolution(
    own: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    seq_idx: torch.Tensor | None = None,
    **further: Any,
) -> torch.Tensor:
    """A causal convolution of each channel, [rows, channels, tokens] by [channels, width], within the documents of
    `seq_idx`; transformers' `own` without it."""
    if seq_idx is None:
        return own(hidden_states, weight, bias, activation=activation, **further)
    from transformers.activations import ACT2FN

    before = weight.shape[1] - 1
    taps = nn.functional.pad(hidden_states, (before, 0)).unfold(2, before + 1, 1)
    other = nn.functional.pad(seq_idx, (before, 0), value=-1).unfold(1, before + 1, 1) != seq_idx[..., None]
    found = torch.einsum("rctw,cw->rct", taps.masked_fill(other[:, None], 0).to(weight.dtype), weight)
    found = found if bias is None else found + bias[:, None]
    return (found if activation is None else ACT2FN[activation](found)).to(hidden_states.dtype)


def separate_recurrent(model: Model) -> bool:
    """Compute recurrent layers one document after another. False if the model has none."""
    row: list[int] = []  # tokens of each document of the row that the model computes; empty without packs

    def note(module: nn.Module, args: tuple, given: JsonObject) -> None:
        # The backward pass may compute layers again before the next row.
        row[:] = [] if (lengths := given.get("packed_seq_lengths")) is None else lengths.tolist()

    layers = recurrent_layers(model)
    shard.base_model(model).register_forward_pre_hook(note, with_kwargs=True)
    for layer in layers.values():
        layer.forward = _each_document(row, layer.forward)
    return bool(layers)


def _each_document(row: list[int], whole: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer over the documents of a row. Those of similar length run side by side, padded behind their
    last tokens, which none before them sees."""

    def forward(*args: Any, **given: Any) -> Any:
        if len(row) < 2:
            return whole(*args, **given)
        given = {name: None if name in _OF_ROWS else value for name, value in given.items()}
        ends = list(itertools.accumulate(row))
        outputs: dict[int, torch.Tensor] = {}
        further: Sequence[Any] = ()
        for group in _groups(row):

            def part(value: Any, spans: Sequence[slice]) -> Any:
                if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, ends[-1]):
                    return value
                return nn.utils.rnn.pad_sequence([value[0, one] for one in spans], batch_first=True)

            own = [slice(ends[one] - row[one], ends[one]) for one in group]
            found = whole(*(part(one, own) for one in args), **{name: part(one, own) for name, one in given.items()})
            found, *further = [found] if isinstance(found, torch.Tensor) else found
            outputs |= {one: found[place, : row[one]] for place, one in enumerate(group)}
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


def give_masks(model: Model) -> bool:
    """Give the decoder of a transformers model the masks that it would make if it passed on the positions of a pack
    (Granite 4, Qwen2-VL, OPT), and leave the kernel for packs, whose boundaries it may not pass on (Nemotron). False
    if its attention needs more than masks."""
    from transformers.masking_utils import create_masks_for_generate

    base = shard.base_model(model)
    own = base.config._attn_implementation
    if own not in ("sdpa", "eager", attention.PACKED) or attention.why_not_computed(model):
        return False
    if own == attention.PACKED:
        base.get_decoder().set_attn_implementation("sdpa")  # not the towers, which may lack it

    def complete(decoder: Any, args: tuple, given: JsonObject) -> tuple[tuple, JsonObject]:
        places = given.get("position_ids")
        if places is None or any(given.get(name) is not None for name in ("attention_mask", "past_key_values")):
            return args, given
        places = places[0] if places.ndim == 3 else places  # those of text, of several
        row = torch.empty(*places.shape, 1, dtype=model.dtype, device=places.device)
        masks: Any = create_masks_for_generate(decoder.config, row, None, None, places)  # by place: 5.24 renames one
        return args, given | {"attention_mask": masks}

    base.get_decoder().register_forward_pre_hook(complete, with_kwargs=True)
    return True
