"""FlashAttention-4 as an operator of torch, which a compiled graph can hold and selective checkpointing can see.

The graph of the decoder blocks that Unsloth compiles for full fine-tuning holds torch's kernel itself instead of the
function that `flash` switches. `install_switch` replaces the call with the operator.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from finetune.runtime.machine import flash
from finetune.runtime.types import JsonObject

NAME = "finetune::flash_attention_4"


# Unsloth's function takes query, key and value [1, heads, tokens, head_dim], and gives the output [1, tokens, ...].
BLOCKS, FUNCTION = "unsloth.utils.hf_packed_attention", "_flash_varlen"
PARAMETERS = ["query", "key", "value", "cu_seqlens", "max_seqlen", "scale", "window"]


def install_switch() -> None:
    """Install the switch, before a block is compiled. Does nothing if flash-attn cannot be imported, or if the
    signatures differ from those that this module knows: `flash.has_run` then stays false."""
    blocks = sys.modules.get(BLOCKS)
    torchs = getattr(blocks, FUNCTION, None)
    if torchs is None or hasattr(torchs, "is_switch"):
        return
    if list(inspect.signature(torchs).parameters) != PARAMETERS or not _signatures_match():
        return
    operator = torch.ops.finetune.flash_attention_4.default

    @functools.wraps(torchs)
    def flash_varlen(
        query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None
    ) -> Tensor:
        if not flash.is_enabled() or window is not None:
            return torchs(query, key, value, cu_seqlens, max_seqlen, scale, window)  # type: ignore[no-any-return]
        tokens_first = [one[0].transpose(0, 1) for one in (query, key, value)]
        return operator(*tokens_first, cu_seqlens, max_seqlen, scale)[0].unsqueeze(0)  # type: ignore[no-any-return]

    flash_varlen.is_switch = True  # type: ignore[attr-defined]
    setattr(blocks, FUNCTION, flash_varlen)


def operator() -> Any:
    """`attention` as an operator of torch; None if the package's signatures differ from those that this module
    knows."""
    return torch.ops.finetune.flash_attention_4.default if _signatures_match() else None


def _signatures_match() -> bool:
    """Whether the package's two functions, which it does not document, take what they are given here."""
    options = _options(None, 1, 1.0)
    try:
        inspect.signature(_package()._flash_attn_fwd).bind(*"qkv", return_lse=True, out=None, lse=None, **options)
        inspect.signature(_package()._flash_attn_bwd).bind(*"qkvogl", dq=None, dk=None, dv=None, **options)
    except Exception:  # a broken installation raises many types; `attention.choose` says which
        return False
    return True


def _package() -> Any:
    flash.kernel()  # decides where compiled kernels are kept, before the package is imported
    from flash_attn.cute import interface

    return interface


def _options(bounds: Tensor | None, longest: int, scale: float) -> JsonObject:
    most = max(longest, flash.SHORTEST_BOUND)
    both = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": most, "max_seqlen_k": most}
    return both | {"softmax_scale": scale, "causal": True}


@torch.library.custom_op(NAME, mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention within each document.

    Args:
        query, key, value: [tokens, heads, head_dim].
        bounds: int32 [documents + 1], where each document begins and the last one ends.
        longest: tokens of the longest document.

    Returns:
        The output [tokens, heads, head_dim], and float32 [heads, tokens], the logarithms of the sums of exponentials.
    """
    output, logsumexp = _fake_attention(query)
    options = _options(bounds, longest, scale)
    _package()._flash_attn_fwd(query, key, value, return_lse=True, out=output, lse=logsumexp, **options)
    flash.mark_run()
    return output, logsumexp


@torch.library.custom_op(f"{NAME}_gradients", mutates_args=())
def gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    given: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from that of the output, `given`."""
    dq, dk, dv = _fake_gradients(query, key, value)
    options = _options(bounds, longest, scale)
    _package()._flash_attn_bwd(query, key, value, output, given, logsumexp, dq=dq, dk=dk, dv=dv, **options)
    return dq, dk, dv


@attention.register_fake
def _fake_attention(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    tokens, heads, _dim = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, tokens), dtype=torch.float32)


@gradients.register_fake
def _fake_gradients(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.longest, ctx.scale = inputs[4:]


def _backward(ctx: Any, given: Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, bounds, output, logsumexp = ctx.saved_tensors
    found = gradients(query, key, value, output, logsumexp, given.contiguous(), bounds, ctx.longest, ctx.scale)
    return *found, None, None, None


attention.register_autograd(_backward, setup_context=_save_for_backward)
