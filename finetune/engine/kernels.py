"""Triton kernels for `fp8` and `adapted`: compiled once per width of a model's layers, never per number of tokens."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # elements that one program of an elementwise kernel takes


@triton.jit
def _quantize(x, values, scales, columns, largest, smallest, WIDTH: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, WIDTH)
    inside = offsets < columns
    given = tl.load(x + row * columns + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.math.div_rn(tl.maximum(tl.max(tl.abs(given)), smallest), largest)
    tl.store(values + row * columns + offsets, tl.math.div_rn(given, scale).to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale)


def quantize(x: torch.Tensor, form: torch.dtype, largest: float, smallest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (n, k) in e4m3 and their float32 scales (n, 1); bit for bit what `fp8.quantize` computes on a CPU."""
    x = x.contiguous()
    rows, columns = x.shape
    values = torch.empty(rows, columns, dtype=form, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(columns)
    warps = min(max(width // 1024, 1), 16)
    with torch.cuda.device(x.device):
        _quantize[(rows,)](x, values, scales, columns, largest, smallest, WIDTH=width, num_warps=warps)
    return values, scales


@triton.jit
def _silu_forward(gate, up, out, count, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    g = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + offsets, mask=inside, other=0.0)
    # Rounded before the product, as transformers does.
    tl.store(out + offsets, (g * tl.sigmoid(g)).to(u.dtype) * u, mask=inside)


@triton.jit
def _silu_backward(gate, up, dh, h, dgate, dup, count, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    g = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + offsets, mask=inside, other=0.0)
    d = tl.load(dh + offsets, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    tl.store(h + offsets, silu.to(u.dtype) * u, mask=inside)
    tl.store(dgate + offsets, d * u.to(tl.float32) * sigmoid * (1.0 + g - silu), mask=inside)
    tl.store(dup + offsets, d * silu, mask=inside)


def silu_and_multiply(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of two contiguous tensors of one shape."""
    out = torch.empty_like(gate)
    with torch.cuda.device(gate.device):
        _silu_forward[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK)
    return out


def silu_and_multiply_backward(gate: torch.Tensor, up: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """silu(gate) * up, and the gradients of gate and up; all contiguous and of one shape."""
    h, dgate, dup = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(up)
    with torch.cuda.device(gate.device):
        _silu_backward[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, dh, h, dgate, dup, gate.numel(), BLOCK=BLOCK)
    return h, dgate, dup
