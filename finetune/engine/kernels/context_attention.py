"""Attention over rows whose tokens several ranks share, by all-to-all over heads (Ulysses, arXiv 2309.14509).

Each rank has a part of every row's tokens. Around the attention of each layer, two all-to-alls turn that into all
tokens of a part of the heads, and back. In between, the kernel sees the whole row, so that documents, their bounds and
sliding windows are what they are on one rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from finetune.engine.kernels import attention
from finetune.engine.sharding import shard
from finetune.errors import UserError
from finetune.runtime.ranks.context_group import ContextGroup
from finetune.runtime.types import Model

NAME = "finetune_context_parallel"  # among transformers' attention functions


# --- heads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How heads are dealt to ranks: each key/value head `repeats` times, then heads of zeros until the ranks divide
    them. A query head stays with the key/value head that it attends to."""

    query: int  # of all ranks, with those of zeros
    key_value: int
    repeats: int


@functools.cache
def deal_heads(query: int, key_value: int, ranks: int) -> Heads:
    """The heads to exchange between `ranks`: as few query heads as possible, then as few key/value heads.

    12 query and 2 key/value heads on 4 ranks: each key/value head twice, none of zeros. 9 and 3 on 2 ranks: each
    key/value head three times, which makes 9 and 9, and one of zeros.
    """
    group = query // key_value

    def padded(repeats: int) -> Heads:
        dealt = -(-key_value * repeats // ranks) * ranks
        return Heads(query=dealt * group // repeats, key_value=dealt, repeats=repeats)

    divisors = [number for number in range(1, group + 1) if group % number == 0]
    return min(map(padded, divisors), key=lambda heads: (heads.query, heads.key_value))


def own_shapes(shapes: attention.AttentionShapes, ranks: int) -> attention.AttentionShapes:
    """The shapes that one of `ranks` computes of a row that they share."""
    heads = deal_heads(shapes.heads, shapes.key_value_heads, ranks)
    return replace(shapes, heads=heads.query // ranks, key_value_heads=heads.key_value // ranks)


# --- exchange ---------------------------------------------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """All-to-all over the first dimension; gradients go back the way that the values came."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ContextGroup) -> torch.Tensor:
        ctx.group = group
        return group.exchange(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.group.exchange(gradient), None


def gather_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: ContextGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All heads of this rank's tokens -> all tokens of this rank's heads, in one all-to-all.

    Args:
        query, key, value: [tokens, heads, head_dim], with fewer key and value than query heads.

    Returns:
        Each as [size * tokens, heads of `deal_heads` / size, head_dim].
    """
    heads = deal_heads(query.shape[1], key.shape[1], group.size)
    if heads.repeats > 1:
        key, value = (one.repeat_interleave(heads.repeats, dim=1) for one in (key, value))
    parts = []
    for tensor, count in ((query, heads.query), (key, heads.key_value), (value, heads.key_value)):
        padded = F.pad(tensor, (0, 0, 0, count - tensor.shape[1])) if count > tensor.shape[1] else tensor
        parts.append(padded.unflatten(1, (group.size, -1)).transpose(0, 1))  # [size, tokens, own heads, head_dim]
    received = _Exchange.apply(torch.cat(parts, dim=2), group)
    query, key, value = received.flatten(0, 1).split([part.shape[2] for part in parts], dim=1)  # type: ignore[union-attr]
    return query, key, value


def gather_heads(output: torch.Tensor, heads: int, group: ContextGroup) -> torch.Tensor:
    """All tokens of this rank's heads -> all `heads` of this rank's tokens: the way back.

    Args:
        output: [size * tokens, own heads, head_dim].

    Returns:
        [tokens, heads, head_dim], without heads of zeros; contiguous, as some layers expect of any attention.
    """
    received: Any = _Exchange.apply(output.unflatten(0, (group.size, -1)), group)
    return received.transpose(0, 1).flatten(1, 2)[:, :heads].contiguous()


# --- transformers' attention function ---------------------------------------------------------------------------------


def install(model: Model, group: ContextGroup) -> None:
    """Let a transformers model compute attention together with the ranks of its group. Batches then need
    `attention.batch_arguments`, with the lengths of the whole row; without them it computes as before."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    base = shard.base_model(model)
    ALL_ATTENTION_FUNCTIONS.register(NAME, functools.partial(context_attention, group))
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    base.set_attn_implementation(NAME)


def _rope_types(module: torch.nn.Module) -> list[str]:
    """The kinds of a module of transformers that computes rotary embeddings; empty for others."""
    kinds = getattr(module, "rope_type", ())
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds] if isinstance(kinds, str) else []


def why_not_shared(model: Model, dtype: torch.dtype) -> str | None:
    """Why ranks cannot share the attention of this model; None if they can.

    Args:
        dtype: that the run computes in.
    """
    if (why := attention.why_not_computed(model)) is not None:
        return why
    kinds = {kind for module in model.modules() for kind in _rope_types(module)}
    if "longrope" in kinds or any("dynamic" in kind for kind in kinds):
        return f"the rotary embeddings of {model.config.model_type} depend on how long rows are"
    if next(model.parameters()).device.type == "cuda":
        if (wide := max(attention.head_widths(model), default=0)) > attention.WIDEST:
            return f"it has heads of {wide}, and GPUs share attention with heads up to {attention.WIDEST}"
        return attention.why_no_kernel(model, dtype)
    return None


def context_attention(
    group: ContextGroup,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """`attention.packed_attention` over a row whose tokens the ranks of a group share; SDPA for other rows.

    Args:
        query, key, value: [1, heads, tokens of this rank, head_dim].
        given: what that takes by name; with `cu_seq_lens_q`, int32 [documents + 1], where each document of the whole
            row begins.

    Returns:
        [1, tokens of this rank, heads, head_dim], and no weights.
    """
    if given.get("cu_seq_lens_q") is None:
        return attention.packed_attention(module, query, key, value, attention_mask, **given)
    if (found := attention.found_in_call(attention_mask, given)) is not None:
        raise UserError(
            f"training.context_parallel is {group.size}, but this model's attention has {found}, which several GPUs "
            "cannot share. Set it to 1."
        )
    own = attention.kernel_inputs(query, key, value)
    whole = [tensor.transpose(0, 1)[None] for tensor in gather_tokens(own[0], own[1], own[2], group)]
    compute = attention.packed_attention if value.device.type == "cuda" else document_attention
    output, _ = compute(module, whole[0], whole[1], whole[2], None, **given)
    return attention.layer_output(gather_heads(output[0], query.shape[1], group), value), None


def document_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **given: Any
) -> tuple[torch.Tensor, None]:
    """`attention.packed_attention` on a CPU, which has no kernel for it: SDPA, one document after another."""
    bounds, scaling, sliding_window = given["cu_seq_lens_q"].tolist(), given.get("scaling"), given.get("sliding_window")
    outputs = []
    for first, end in zip(bounds, bounds[1:], strict=False):
        one = [tensor[:, :, first:end] for tensor in (query, key, value)]
        band = None
        if sliding_window is not None and sliding_window < end - first:
            place = torch.arange(end - first, device=query.device)
            back = place[:, None] - place
            band = (back >= 0) & (back < sliding_window)
        outputs.append(
            F.scaled_dot_product_attention(
                *one, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=query.shape[1] > key.shape[1]
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None
