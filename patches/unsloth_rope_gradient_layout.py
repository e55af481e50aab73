"""Unsloth's rotary embedding returns the gradients of query and key in a different memory layout.

Given position indices, as for packs, its backward pass writes them as [batch, heads, tokens, head_dim]. The layers that
computed query and key need [batch, tokens, heads, head_dim], so autograd copies both.
Without this: the same gradients, and two copies per layer: 3.9 of 348 ms per step (1.2 B LoRA, one H200).
"""

import functools
import sys
from types import ModuleType
from typing import Any

UPSTREAM = "https://github.com/unslothai/unsloth/blob/main/unsloth/kernels/rope_embedding.py"
REMOVE_WHEN = None  # when its backward pass allocates as `Fast_RoPE_Embedding_QK_Positions`, without indices, does

MODULE, FUNCTION = "unsloth.kernels.rope_embedding", "Fast_RoPE_Embedding_QK"


def _loaded() -> ModuleType | None:
    module = sys.modules.get(MODULE)
    return module if module is not None and hasattr(module, FUNCTION) else None


def _device() -> str | None:
    """Where the kernel runs; None without a GPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else None


def needed() -> bool:
    """Whether gradients in the layout of the projections, of two tokens, come back in another one."""
    module, device = _loaded(), _device()
    if module is None or device is None:
        return False
    import torch

    def rows(heads: int) -> Any:
        return torch.ones(1, 2, heads, 16, device=device).transpose(1, 2).requires_grad_()

    query, key, angles = rows(2), rows(1), torch.ones(2, 8, device=device)
    with torch.enable_grad():
        indices = torch.arange(2, device=device, dtype=torch.int32)
        outputs = getattr(module, FUNCTION).apply(query, key, angles, angles, indices)
        gradients = torch.autograd.grad(outputs, (query, key), [one.detach().clone() for one in (query, key)])
    return not all(one.transpose(1, 2).is_contiguous() for one in gradients)


def apply() -> None:
    """Give the backward pass each token as a row of the batch: what it writes then has the projections' layout."""
    module = _loaded()
    if module is None or not needed():
        return
    function = getattr(module, FUNCTION)
    original = function.backward

    @functools.wraps(original)
    def backward(ctx: Any, *gradients: Any) -> Any:
        tokens_first = [one.transpose(1, 2) for one in gradients]
        if ctx.rope_indices is None or not all(one.is_contiguous() for one in tokens_first):
            return original(ctx, *gradients)
        # An index per token, whatever the batch: the kernel numbers tokens row by row.
        rotated = original(ctx, *(one.view(-1, one.shape[2], 1, one.shape[3]) for one in tokens_first))
        found = [one.view(like.shape).transpose(1, 2) for one, like in zip(rotated[:2], tokens_first, strict=True)]
        return *found, *rotated[2:]

    function.backward = staticmethod(backward)
