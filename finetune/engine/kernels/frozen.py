"""Frozen weights of linear layers as matrix products read them: in 16 or 32 bits, or dequantized from the 4 or 8 bits
of bitsandbytes.

An adapter's part must be added to a layer's product before either is rounded. A matrix product with the columns of B
beside those of W does it: its accumulator holds both. `make_room` gives a weight in 16 bits the space for these
columns; the others are copied beside them in each forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from finetune.engine.kernels.low_rank import aligned


def bits(layer: nn.Module) -> int:
    """How bitsandbytes stores the layer's weight: in 4 or 8 bits; 0 if it does not."""
    kind = type(layer)
    if not kind.__module__.startswith("bitsandbytes."):
        return 0
    if kind.__name__ == "Linear8bitLt":
        return 8 if layer.weight.dtype == torch.int8 else 0
    return 4 if kind.__name__ == "Linear4bit" else 0


def weight(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """(out, k) in `dtype`."""
    if not bits(layer):
        return layer.weight.to(dtype)
    out = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device=layer.weight.device)
    return _dequantize(layer, out)


def widened(layer: Any, extra: int, dtype: torch.dtype) -> torch.Tensor:
    """(out, k + extra) in `dtype`: the weight, and `extra` columns for the caller to write."""
    own, columns = layer.weight, layer.in_features + extra
    if bits(layer):
        found = aligned(layer.out_features, columns, own, dtype)
        _dequantize(layer, found[:, : layer.in_features])
        return found
    if own.dtype == dtype and own.stride(0) >= columns:
        return own.detach().as_strided((own.shape[0], columns), own.stride())
    found = aligned(own.shape[0], columns, own, dtype)
    found[:, : own.shape[1]].copy_(own)
    return found


def make_room(layer: nn.Linear, extra: int) -> None:
    """Store the weight of a layer in 16 bits in rows with room for `extra` columns."""
    own = layer.weight
    if own.dtype.itemsize != 2 or own.stride(0) >= own.shape[1] + extra or own.is_meta:
        return
    roomy = aligned(own.shape[0], own.shape[1] + extra, own, own.dtype)[:, : own.shape[1]]
    own.data = roomy.copy_(own.data)


def _dequantize(layer: Any, out: torch.Tensor) -> torch.Tensor:
    """Write the layer's weight into `out` (out, k), whose rows may be apart."""
    stored = layer.weight
    if bits(layer) == 8:
        state = layer.state
        values, scales = (stored.data, stored.SCB) if state.CB is None else (state.CB, state.SCB)
        return torch.mul(values, (scales.float() / 127)[:, None], out=out)
    state = getattr(stored, "quant_state", None) or layer.quant_state
    packed = stored.data.view(torch.uint8)
    if packed.is_cuda and state.quant_type == "nf4":
        from finetune.engine.kernels import triton_kernels

        return triton_kernels.dequantize(packed, state, out)
    from bitsandbytes.functional import dequantize_4bit

    return out.copy_(dequantize_4bit(packed.view(-1, 1), state))
