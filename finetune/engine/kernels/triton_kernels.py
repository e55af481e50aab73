"""Triton kernels of `fp8`, `frozen` and `fused_lora`: compiled once per width of a model's layers, never per number of
tokens."""

# A branch on a `tl.constexpr` binds names for a later branch on the same one.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from finetune.engine.kernels.low_rank import LowRankTerm, aligned
from finetune.runtime.types import JsonObject

# Programs that share the columns of one tile's rows, or the rows of its columns.
PARTS = 8
LARGEST_RANK = 64


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
def left_rows(left, left_row, row, rows, RANK: tl.constexpr, PADDED: tl.constexpr):  # noqa: N803
    """These rows of a term's left factor."""
    k = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (k < RANK)[None, :]
    return tl.load(left + row[:, None] * left_row + k[None, :], mask=inside, other=0.0)


@triton.jit
def right_part(right, right_rank, right_column, column, columns, RANK: tl.constexpr, PADDED: tl.constexpr):  # noqa: N803
    """These columns of a term's right factor."""
    k = tl.arange(0, PADDED)
    inside = (k < RANK)[:, None] & (column < columns)[None, :]
    return tl.load(right + k[:, None] * right_rank + column[None, :] * right_column, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _widen(
    x, x_row, a, wide, wide_row, product, rows, columns,
    RANK: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Each program handles a block of rows and loops over the columns."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    total = tl.zeros([ROWS, PADDED], tl.float32)
    for at in tl.range(0, columns, COLUMNS, num_stages=STAGES):
        column = at + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        given = tl.load(x + row[:, None] * x_row + column[None, :], mask=inside, other=0.0)
        tl.store(wide + row[:, None] * wide_row + column[None, :], given, mask=inside)
        right = right_part(a, columns, 1, column, columns, RANK, PADDED)
        total += tl.dot(given, tl.trans(right), input_precision=PRECISION)
    k = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (k < RANK)[None, :]
    tl.store(product + row[:, None] * RANK + k[None, :], total, mask=inside)
    tl.store(wide + row[:, None] * wide_row + columns + k[None, :], total, mask=inside)


def widened_rows(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_lora.widened_rows` on a GPU."""
    (rows, columns), rank = x.shape, a.shape[0]
    wide = aligned(rows, columns + rank, x, x.dtype)
    if rank > 2 * largest_rank(x):
        inner = x @ a.t()
        wide[:, :columns], wide[:, columns:] = x, inner
        return wide, inner
    x, a, inner = x if x.stride(1) == 1 else x.contiguous(), a.contiguous(), x.new_empty(rows, rank)
    exact, padded = x.dtype == torch.float32, max(16, triton.next_power_of_2(rank))
    tile = EXACT if exact else {"ROWS": 64, "COLUMNS": 64, "STAGES": 4 if padded <= 64 else 3, "num_warps": 4}
    constants = tile | {"PADDED": padded, "PRECISION": "ieee" if exact else "tf32"}
    with torch.cuda.device(x.device):
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        _widen[grid](x, x.stride(0), a, wide, wide.stride(0), inner, rows, columns, RANK=rank, **constants)
    return wide, inner


@triton.jit(do_not_specialize=["rows"])
def _add_term(
    y, left, left_row, right, right_rank, right_column, scaling, total, rows, columns,
    RANK: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.static_range(0, RANK, PADDED):
        own = begin + tl.arange(0, PADDED)
        of_left = (row < rows)[:, None] & (own < RANK)[None, :]
        of_right = (own < RANK)[:, None] & (column < columns)[None, :]
        one = tl.load(left + row[:, None] * left_row + own[None, :], mask=of_left, other=0.0)
        other = tl.load(right + own[:, None] * right_rank + column[None, :] * right_column, mask=of_right, other=0.0)
        part += tl.dot(one, other, input_precision=PRECISION)
    at = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    given = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, given + tl.cast(scaling, tl.float32) * part, mask=inside)


def add_term(y: torch.Tensor, term: LowRankTerm, dtype: torch.dtype) -> torch.Tensor:
    """`fused_lora.add_term` on a GPU."""
    if not largest_rank(y):
        return term.added_to(y, dtype)
    (rows, columns), rank = y.shape, term.left.shape[1]
    y, total = y.contiguous(), y.new_empty(rows, columns, dtype=dtype)
    left = term.left if term.left.stride(1) == 1 else term.left.contiguous()
    exact, padded = term.left.dtype == torch.float32, min(64, max(16, triton.next_power_of_2(rank)))
    tile = {"ROWS": 16, "COLUMNS": 32} if exact else {"ROWS": 64, "COLUMNS": 64}
    grid = triton.cdiv(rows, tile["ROWS"]), triton.cdiv(columns, tile["COLUMNS"])
    with torch.cuda.device(y.device):
        _add_term[grid](
            y, left, left.stride(0), term.right, *term.right.stride(), float(term.scaling), total, rows, columns,
            RANK=rank, PADDED=padded, PRECISION="ieee" if exact else "tf32", **tile, num_warps=4,
        )  # fmt: skip
    return total


@triton.jit
def _dequantize(
    packed, code, scales, blocks_code, blocks_scales, offset, out, out_row, columns, count,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, NESTED: tl.constexpr, SIZE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    both = tl.load(packed + at // 2, mask=inside, other=0)
    value = tl.load(code + tl.where(at % 2 == 0, both >> 4, both & 15))
    block = at // BLOCK
    scale = tl.load(scales + block, mask=inside, other=0)
    if NESTED:
        scale = tl.load(blocks_code + scale) * tl.load(blocks_scales + block // BLOCKS, mask=inside, other=0.0)
        scale += tl.load(offset)
    tl.store(out + at // columns * out_row + at % columns, value * scale, mask=inside)


def dequantize(packed: torch.Tensor, state: Any, out: torch.Tensor) -> torch.Tensor:
    """Write an NF4 weight into `out` (out, k), whose rows may be apart: bit for bit what bitsandbytes computes.

    Args:
        state: bitsandbytes' QuantState.
    """
    nested, size = state.nested, 2048
    of_blocks = (state.state2.code, state.state2.absmax, state.offset) if nested else (state.code,) * 3
    with torch.cuda.device(packed.device):
        _dequantize[(triton.cdiv(out.numel(), size),)](
            packed, state.code, state.absmax, *of_blocks, out, out.stride(0), out.shape[1], out.numel(),
            BLOCK=state.blocksize, BLOCKS=state.state2.blocksize if nested else 1, NESTED=nested, SIZE=size,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _part(length, STEP: tl.constexpr, part, parts):  # noqa: N803
    """Begin and end of one of `parts` parts of `length`, in whole steps."""
    own = tl.cdiv(tl.cdiv(length, STEP), parts) * STEP
    return part * own, tl.minimum((part + 1) * own, length)


@triton.jit(do_not_specialize=["rows"])
def _silu_forward(
    gate, gate_left, gate_right, gate_scaling, gate_left_row, gate_right_rank, gate_right_column,
    up, up_left, up_right, up_scaling, up_left_row, up_right_rank, up_right_column,
    h, h_row, down, down_rank_stride, down_column, products, rows, columns,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, DOWN_RANK: tl.constexpr, PADDED: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Each program handles a block of rows and loops over its part of the columns."""
    part = tl.program_id(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    if GATE_RANK > 0:
        left_of_gate = left_rows(gate_left, gate_left_row, row, rows, GATE_RANK, PADDED)
    if UP_RANK > 0:
        left_of_up = left_rows(up_left, up_left_row, row, rows, UP_RANK, PADDED)
    product = tl.zeros([ROWS, PADDED], tl.float32)
    begin, end = _part(columns, COLUMNS, part, tl.num_programs(0))
    for at in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        column = at + tl.arange(0, COLUMNS)
        offsets = row[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        g = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
        if GATE_RANK > 0:
            right = right_part(gate_right, gate_right_rank, gate_right_column, column, columns, GATE_RANK, PADDED)
            g += tl.cast(gate_scaling, tl.float32) * tl.dot(left_of_gate, right, input_precision=PRECISION)
        if UP_RANK > 0:
            right = right_part(up_right, up_right_rank, up_right_column, column, columns, UP_RANK, PADDED)
            u += tl.cast(up_scaling, tl.float32) * tl.dot(left_of_up, right, input_precision=PRECISION)
        # Rounded before the product, as transformers does.
        kind = h.dtype.element_ty
        both = ((g * tl.sigmoid(g)).to(kind).to(tl.float32) * u).to(kind)
        tl.store(h + row[:, None] * h_row + column[None, :], both, mask=inside)
        if DOWN_RANK > 0:
            right = right_part(down, down_rank_stride, down_column, column, columns, DOWN_RANK, PADDED)
            product += tl.dot(both, tl.trans(right), input_precision=PRECISION)
    if DOWN_RANK > 0:
        k = tl.arange(0, PADDED)
        inside = (row < rows)[:, None] & (k < DOWN_RANK)[None, :]
        tl.store(products + (part * rows + row)[:, None] * DOWN_RANK + k[None, :], product, mask=inside)


@triton.jit
def _store_product(sums, product, scaling, column, columns, rank_stride, column_stride,
                   RANK: tl.constexpr, PADDED: tl.constexpr):  # noqa: N803  # fmt: skip
    k = tl.arange(0, PADDED)
    inside = (k < RANK)[:, None] & (column < columns)[None, :]
    product *= tl.cast(scaling, tl.float32)  # Inductor passes Python's floats in float64
    tl.store(sums + k[:, None] * rank_stride + column[None, :] * column_stride, product, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _silu_backward(
    gate, gate_left, gate_right, gate_scaling, gate_left_row, gate_right_rank, gate_right_column,
    up, up_left, up_right, up_scaling, up_left_row, up_right_rank, up_right_column,
    dh, dh_left, dh_right, dh_scaling, dh_left_row, dh_right_rank, dh_right_column,
    dgate, dup, h, sums, rows, columns,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, DH_RANK: tl.constexpr, PADDED: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr, KEEPS_H: tl.constexpr, STAGES: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Each program handles a block of columns and loops over its part of the rows: the products with left factors are
    sums over rows."""
    part = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if GATE_RANK > 0:
        right_of_gate = right_part(gate_right, gate_right_rank, gate_right_column, column, columns, GATE_RANK, PADDED)
        gate_product = tl.zeros([PADDED, COLUMNS], tl.float32)
    if UP_RANK > 0:
        right_of_up = right_part(up_right, up_right_rank, up_right_column, column, columns, UP_RANK, PADDED)
        up_product = tl.zeros([PADDED, COLUMNS], tl.float32)
    if DH_RANK > 0:
        right_of_dh = right_part(dh_right, dh_right_rank, dh_right_column, column, columns, DH_RANK, PADDED)
        dh_product = tl.zeros([PADDED, COLUMNS], tl.float32)
    kind = dgate.dtype.element_ty
    begin, end = _part(rows, ROWS, part, tl.num_programs(1))
    for at in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = (at + tl.arange(0, ROWS)).to(tl.int64)
        offsets = row[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        g = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dh + offsets, mask=inside, other=0.0).to(tl.float32)
        if GATE_RANK > 0:
            left_of_gate = left_rows(gate_left, gate_left_row, row, rows, GATE_RANK, PADDED)
            g += tl.cast(gate_scaling, tl.float32) * tl.dot(left_of_gate, right_of_gate, input_precision=PRECISION)
        if UP_RANK > 0:
            left_of_up = left_rows(up_left, up_left_row, row, rows, UP_RANK, PADDED)
            u += tl.cast(up_scaling, tl.float32) * tl.dot(left_of_up, right_of_up, input_precision=PRECISION)
        if DH_RANK > 0:
            left_of_dh = left_rows(dh_left, dh_left_row, row, rows, DH_RANK, PADDED)
            d += tl.cast(dh_scaling, tl.float32) * tl.dot(left_of_dh, right_of_dh, input_precision=PRECISION)
        sigmoid = tl.sigmoid(g)
        silu = g * sigmoid
        of_gate = (d * u * sigmoid * (1.0 + g - silu)).to(kind)
        of_up = (d * silu).to(kind)
        both = (silu.to(kind).to(tl.float32) * u).to(kind)
        tl.store(dgate + offsets, of_gate, mask=inside)
        tl.store(dup + offsets, of_up, mask=inside)
        if KEEPS_H:
            tl.store(h + offsets, both, mask=inside)
        if GATE_RANK > 0:
            gate_product += tl.dot(tl.trans(left_of_gate), of_gate, input_precision=PRECISION)
        if UP_RANK > 0:
            up_product += tl.dot(tl.trans(left_of_up), of_up, input_precision=PRECISION)
        if DH_RANK > 0:
            dh_product += tl.dot(tl.trans(left_of_dh), both, input_precision=PRECISION)
    at_gate = part.to(tl.int64) * columns * (GATE_RANK + UP_RANK + DH_RANK)
    at_up = at_gate + columns * GATE_RANK
    at_dh = at_up + columns * UP_RANK
    if GATE_RANK > 0:
        _store_product(sums + at_gate, gate_product, gate_scaling, column, columns, 1, GATE_RANK, GATE_RANK, PADDED)
    if UP_RANK > 0:
        _store_product(sums + at_up, up_product, up_scaling, column, columns, 1, UP_RANK, UP_RANK, PADDED)
    if DH_RANK > 0:
        _store_product(sums + at_dh, dh_product, dh_scaling, column, columns, columns, 1, DH_RANK, PADDED)


def silu_and_multiply(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_term: LowRankTerm | None,
    up_term: LowRankTerm | None,
    down: torch.Tensor | None,
    *,
    widens: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`fused_lora.silu_and_multiply` for contiguous gate and up."""
    largest = largest_rank(gate)
    rows, columns = gate.shape
    own = 0 if down is None else down.shape[0]
    rank = own if own <= largest else 0
    wide = aligned(rows, columns + own, gate, gate.dtype) if widens else None
    h = torch.empty_like(gate) if wide is None else wide[:, :columns]
    inputs, ranks = _kernel_inputs(largest, (gate, gate_term), (up, up_term))
    products = torch.empty(PARTS, rows, rank, dtype=torch.float32, device=gate.device) if rank else h
    of_down = (h, 0, 0) if down is None else (down, *down.stride())
    with torch.cuda.device(gate.device):
        constants = _constants(gate, *ranks, rank, backward=False)
        grid = PARTS, triton.cdiv(rows, constants["ROWS"])
        _silu_forward[grid](*inputs, h, h.stride(0), *of_down, products, rows, columns, *ranks, rank, **constants)
    if down is None:
        return h, None, None
    inner = products.sum(0).to(h.dtype) if rank else h @ down.t()
    if wide is not None:
        wide[:, columns:] = inner
    return h, wide, inner


def silu_and_multiply_backward(
    gate: torch.Tensor,
    up: torch.Tensor,
    dh: torch.Tensor,
    gate_term: LowRankTerm | None,
    up_term: LowRankTerm | None,
    dh_term: LowRankTerm | None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """`fused_lora.silu_and_multiply_backward` for contiguous gate, up and dh."""
    terms = (gate_term, up_term, dh_term)
    rows, columns = gate.shape
    inputs, ranks = _kernel_inputs(largest_rank(gate), *zip((gate, up, dh), terms, strict=True))
    keeps_h = dh_term is not None and not ranks[2]
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    h = torch.empty_like(gate) if keeps_h else dgate
    sums = torch.empty(PARTS, columns * sum(ranks), dtype=torch.float32, device=gate.device)
    with torch.cuda.device(gate.device):
        constants = _constants(gate, *ranks, backward=True)
        grid = triton.cdiv(columns, constants["COLUMNS"]), PARTS
        _silu_backward[grid](*inputs, dgate, dup, h, sums, rows, columns, *ranks, KEEPS_H=keeps_h, **constants)
    parts = iter(sums.sum(0).split([columns * rank for rank in ranks if rank]) if any(ranks) else ())
    products: list[torch.Tensor | None] = []
    for y, term, rank, transposed in zip((dgate, dup, h), terms, ranks, (True, True, False), strict=True):
        if term is None:
            products.append(None)
        elif rank:
            products.append(next(parts).view((columns, rank) if transposed else (rank, columns)))
        else:
            product = y.t() @ term.left if transposed else term.left.t() @ y
            products.append(product if term.scaling == 1.0 else product * term.scaling)
    return dgate, dup, products


def largest_rank(y: torch.Tensor) -> int:
    """Of an adapter that the kernels for silu(gate) * up compute. Before Ampere, tl.dot has no bfloat16."""
    return LARGEST_RANK if torch.cuda.get_device_capability(y.device) >= (8, 0) else 0


def _kernel_inputs(largest: int, *given: tuple[torch.Tensor, LowRankTerm | None]) -> tuple[list[Any], list[int]]:
    """Tensors and their terms as the kernels take them: pointers, scalings and strides; and the rank of each term, 0
    without one. Terms of more than `largest` ranks are added here."""
    inputs: list[Any] = []
    ranks: list[int] = []
    for y, term in given:
        if term is not None and term.left.shape[1] > largest:
            y, term = add_term(y, term, y.dtype), None
        if term is None:
            inputs += [y, y, y, 0.0, 0, 0, 0]
            ranks.append(0)
        else:
            left = term.left if term.left.stride(1) == 1 else term.left.contiguous()
            inputs += [y, left, term.right, float(term.scaling), left.stride(0), *term.right.stride()]
            ranks.append(left.shape[1])
    return inputs, ranks


def _constants(y: torch.Tensor, *ranks: int, backward: bool) -> JsonObject:
    """What a kernel is compiled for: ranks padded to what tl.dot takes, its precision, and its tile."""
    padded = max(16, triton.next_power_of_2(max(ranks)))
    exact = y.dtype == torch.float32
    tile = EXACT if exact else _tile(padded, backward, full=all(rank in (0, padded) for rank in ranks))
    return tile | {"PADDED": padded, "PRECISION": "ieee" if exact else "tf32"}


# Rows and columns that a program takes in each turn of its loop, how many turns ahead they are loaded, and warps.
EXACT = {"ROWS": 16, "COLUMNS": 32, "STAGES": 1, "num_warps": 4}


def _tile(padded: int, backward: bool, full: bool) -> dict[str, int]:
    """The same in 16 bits: the fastest of those tried on an H200 (benchmarks/results/2026-11-25-mlp-kernels-h200.json)
    that fit in the shared memory of consumer GPUs (99 KiB). `full`: no rank is less than `padded`."""
    if padded == 16 and full:
        rows, columns = 64, 64
    elif padded == 16:
        rows, columns = (32, 32) if backward else (64, 32)
    else:
        rows, columns = (32, 64) if backward and padded > 32 else (64, 32)
    return {"ROWS": rows, "COLUMNS": columns, "STAGES": 3, "num_warps": 4}
