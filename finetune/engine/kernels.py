"""Triton kernels for `fp8` and `adapted`: compiled once per width of a model's layers, never per number of tokens."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from finetune.engine.low_rank import Term, plus

# Rows and columns that one program of an elementwise kernel takes, and its warps: without a term, and with. The fastest
# of those tried on an H200 (benchmarks/results/2026-11-24-adapter-kernels-h200.json).
PLAIN = {"ROWS": 16, "COLUMNS": 128, "num_warps": 4}
FORWARD = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4}
BACKWARD = {"ROWS": 16, "COLUMNS": 128, "num_warps": 4}
LARGEST_RANK = 64  # of a term that is added by an elementwise kernel


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
def _plus(y, left, right, scaling, rows, columns, left_row, right_rank, right_column, row, column,
          RANK: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr):  # noqa: N803  # fmt: skip
    """A tile of y, in float32, plus that tile of scaling * left @ right."""
    if RANK == 0:
        return y
    k = tl.arange(0, PADDED)
    inside = (k < RANK)[None, :] & (row < rows)[:, None]
    of_left = tl.load(left + row[:, None] * left_row + k[None, :], mask=inside, other=0.0)
    inside = (k < RANK)[:, None] & (column < columns)[None, :]
    of_right = tl.load(right + k[:, None] * right_rank + column[None, :] * right_column, mask=inside, other=0.0)
    return y + scaling * tl.dot(of_left, of_right, input_precision=PRECISION)


@triton.jit(do_not_specialize=["rows"])
def _silu_forward(
    gate, gate_left, gate_right, gate_scaling, gate_left_row, gate_right_rank, gate_right_column,
    up, up_left, up_right, up_scaling, up_left_row, up_right_rank, up_right_column,
    out, rows, columns,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    offsets = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    g = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
    g = _plus(g, gate_left, gate_right, gate_scaling, rows, columns, gate_left_row, gate_right_rank, gate_right_column,
              row, column, GATE_RANK, PADDED, PRECISION)  # fmt: skip
    u = _plus(u, up_left, up_right, up_scaling, rows, columns, up_left_row, up_right_rank, up_right_column,
              row, column, UP_RANK, PADDED, PRECISION)  # fmt: skip
    # Rounded before the product, as transformers does.
    rounded = (g * tl.sigmoid(g)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + offsets, rounded * u, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _silu_backward(
    gate, gate_left, gate_right, gate_scaling, gate_left_row, gate_right_rank, gate_right_column,
    up, up_left, up_right, up_scaling, up_left_row, up_right_rank, up_right_column,
    dh, dh_left, dh_right, dh_scaling, dh_left_row, dh_right_rank, dh_right_column,
    h, dgate, dup, rows, columns,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, DH_RANK: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    offsets = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    g = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dh + offsets, mask=inside, other=0.0).to(tl.float32)
    g = _plus(g, gate_left, gate_right, gate_scaling, rows, columns, gate_left_row, gate_right_rank, gate_right_column,
              row, column, GATE_RANK, PADDED, PRECISION)  # fmt: skip
    u = _plus(u, up_left, up_right, up_scaling, rows, columns, up_left_row, up_right_rank, up_right_column,
              row, column, UP_RANK, PADDED, PRECISION)  # fmt: skip
    d = _plus(d, dh_left, dh_right, dh_scaling, rows, columns, dh_left_row, dh_right_rank, dh_right_column,
              row, column, DH_RANK, PADDED, PRECISION)  # fmt: skip
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    tl.store(h + offsets, silu.to(h.dtype.element_ty).to(tl.float32) * u, mask=inside)
    tl.store(dgate + offsets, d * u * sigmoid * (1.0 + g - silu), mask=inside)
    tl.store(dup + offsets, d * silu, mask=inside)


def silu_and_multiply(
    gate: torch.Tensor, up: torch.Tensor, gate_term: Term | None, up_term: Term | None
) -> torch.Tensor:
    """silu(gate) * up of two contiguous tensors (n, m), with a term added to each before."""
    out = torch.empty_like(gate)
    inputs, ranks = _prepared((gate, gate_term), (up, up_term))
    with torch.cuda.device(gate.device):
        _silu_forward[_grid](*inputs, out, *out.shape, *ranks, **(FORWARD if any(ranks[:-2]) else PLAIN))
    return out


def silu_and_multiply_backward(
    gate: torch.Tensor,
    up: torch.Tensor,
    dh: torch.Tensor,
    gate_term: Term | None,
    up_term: Term | None,
    dh_term: Term | None,
) -> tuple[torch.Tensor, ...]:
    """silu(gate) * up, and the gradients of gate and up; all contiguous (n, m), with a term added to each of the three
    inputs before."""
    outputs = torch.empty_like(gate), torch.empty_like(gate), torch.empty_like(up)
    inputs, ranks = _prepared((gate, gate_term), (up, up_term), (dh, dh_term))
    with torch.cuda.device(gate.device):
        _silu_backward[_grid](*inputs, *outputs, *gate.shape, *ranks, **(BACKWARD if any(ranks[:-2]) else PLAIN))
    return outputs


def _grid(arguments: dict[str, Any]) -> tuple[int, int]:
    return triton.cdiv(arguments["columns"], arguments["COLUMNS"]), triton.cdiv(arguments["rows"], arguments["ROWS"])


def _prepared(*given: tuple[torch.Tensor, Term | None]) -> tuple[list[Any], list[Any]]:
    """Tensors and their terms as the kernels take them: pointers, scalings and strides; then the rank of each term (0
    without one), all of them padded to what tl.dot takes, and its precision."""
    inputs: list[Any] = []
    ranks: list[int] = []
    # Before Ampere, tl.dot has no bfloat16.
    largest = LARGEST_RANK if torch.cuda.get_device_capability(given[0][0].device) >= (8, 0) else 0
    for y, term in given:
        if term is not None and term.left.shape[1] > largest:
            y, term = plus(y, term), None
        if term is None:
            inputs += [y, y, y, 0.0, 0, 0, 0]
            ranks.append(0)
        else:
            left = term.left if term.left.stride(1) == 1 else term.left.contiguous()
            inputs += [y, left, term.right, float(term.scaling), left.stride(0), *term.right.stride()]
            ranks.append(left.shape[1])
    precision = "ieee" if given[0][0].dtype == torch.float32 else "tf32"  # of float32 alone
    return inputs, [*ranks, max(16, triton.next_power_of_2(max(ranks))), precision]
