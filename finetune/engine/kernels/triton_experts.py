"""Triton kernels of `grouped_experts`: compiled once per width of a model's experts, never per number of tokens."""

# A branch on a `tl.constexpr` binds names for a later branch on the same one.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from finetune.engine.kernels.triton_kernels import left_rows, right_part
from finetune.runtime.types import JsonObject


@triton.jit
def _tile(ends, EXPERTS: tl.constexpr, ALL: tl.constexpr, ROWS: tl.constexpr):  # noqa: N803
    """The expert of this program's rows, its first row, and the end of the expert's rows: no row beyond the last tile.
    An expert's rows begin a tile of their own."""
    expert = tl.arange(0, ALL)
    end = tl.load(ends + expert, mask=expert < EXPERTS, other=0)
    begin = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < EXPERTS), other=0)
    tiles = tl.cdiv(tl.maximum(end - begin, 0), ROWS)
    after = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    own = tl.sum((after <= tile).to(tl.int32), 0)
    mine = expert == own
    first = tl.sum(tl.where(mine, begin + (tile - (after - tiles)) * ROWS, 0), 0)
    return own, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit(do_not_specialize=["tiles"])
def _gather(
    x, token, ends, a, pairs, product, columns, tiles,
    RANK: tl.constexpr, PADDED: tl.constexpr, EXPERTS: tl.constexpr, ALL: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Each program handles a block of one expert's rows and loops over the columns."""
    expert, first, end = _tile(ends, EXPERTS, ALL, ROWS)
    if first < end:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        source = tl.load(token + row, mask=row < end, other=0)
        own_a = a + expert.to(tl.int64) * RANK * columns
        total = tl.zeros([ROWS, PADDED], tl.float32)
        for at in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = at + tl.arange(0, COLUMNS)
            inside = (row < end)[:, None] & (column < columns)[None, :]
            given = tl.load(x + source[:, None] * columns + column[None, :], mask=inside, other=0.0)
            tl.store(pairs + row[:, None] * columns + column[None, :], given, mask=inside)
            if RANK > 0:
                right = right_part(own_a, columns, 1, column, columns, RANK, PADDED)
                total += tl.dot(given, tl.trans(right), input_precision=PRECISION)
        if RANK > 0:
            k = tl.arange(0, PADDED)
            inside = (row < end)[:, None] & (k < RANK)[None, :]
            tl.store(product + row[:, None] * RANK + k[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["tiles"])
def _gated(
    gate_up, inner, b, scaling, h, last_a, product, ends, columns, tiles,
    RANK: tl.constexpr, LAST_RANK: tl.constexpr, PADDED: tl.constexpr,  # noqa: N803
    EXPERTS: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Each program handles a block of one expert's rows and loops over the columns."""
    expert, first, end = _tile(ends, EXPERTS, ALL, ROWS)
    if first < end:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        own_b = b + expert.to(tl.int64) * RANK * 2 * columns
        own_a = last_a + expert.to(tl.int64) * LAST_RANK * columns
        if RANK > 0:
            left = left_rows(inner, RANK, row, end, RANK, PADDED)
        total = tl.zeros([ROWS, PADDED], tl.float32)
        for at in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = at + tl.arange(0, COLUMNS)
            inside = (row < end)[:, None] & (column < columns)[None, :]
            both = gate_up + row[:, None] * (2 * columns) + column[None, :]
            g = tl.load(both, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(both + columns, mask=inside, other=0.0).to(tl.float32)
            if RANK > 0:
                right = right_part(own_b, 2 * columns, 1, column, columns, RANK, PADDED)
                g += tl.cast(scaling, tl.float32) * tl.dot(left, right, input_precision=PRECISION)
                right = right_part(own_b + columns, 2 * columns, 1, column, columns, RANK, PADDED)
                u += tl.cast(scaling, tl.float32) * tl.dot(left, right, input_precision=PRECISION)
            kind = h.dtype.element_ty
            hidden = (g * tl.sigmoid(g) * u).to(kind)
            tl.store(h + row[:, None] * columns + column[None, :], hidden, mask=inside)
            if LAST_RANK > 0:
                right = right_part(own_a, columns, 1, column, columns, LAST_RANK, PADDED)
                total += tl.dot(hidden, tl.trans(right), input_precision=PRECISION)
        if LAST_RANK > 0:
            k = tl.arange(0, PADDED)
            inside = (row < end)[:, None] & (k < LAST_RANK)[None, :]
            tl.store(product + row[:, None] * LAST_RANK + k[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["tiles"])
def _gated_backward(
    gate_up, inner, b, scaling, weights, dh, dlast_inner, last_a, dgate_up, dinner, dweights, h, ends, columns, tiles,
    RANK: tl.constexpr, LAST_RANK: tl.constexpr, PADDED: tl.constexpr,  # noqa: N803
    EXPERTS: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """As `_gated`: a block of one expert's rows, and all columns in turn."""
    expert, first, end = _tile(ends, EXPERTS, ALL, ROWS)
    if first < end:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        weight = tl.load(weights + row, mask=row < end, other=0.0)
        own_b = b + expert.to(tl.int64) * RANK * 2 * columns
        own_a = last_a + expert.to(tl.int64) * LAST_RANK * columns
        if RANK > 0:
            left = left_rows(inner, RANK, row, end, RANK, PADDED)
        if LAST_RANK > 0:
            last_left = left_rows(dlast_inner, LAST_RANK, row, end, LAST_RANK, PADDED)
        total = tl.zeros([ROWS, PADDED], tl.float32)
        of_weight = tl.zeros([ROWS], tl.float32)
        for at in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = at + tl.arange(0, COLUMNS)
            inside = (row < end)[:, None] & (column < columns)[None, :]
            narrow = row[:, None] * columns + column[None, :]
            wide = row[:, None] * (2 * columns) + column[None, :]
            g = tl.load(gate_up + wide, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(gate_up + columns + wide, mask=inside, other=0.0).to(tl.float32)
            d = tl.load(dh + narrow, mask=inside, other=0.0).to(tl.float32)
            if RANK > 0:
                of_gate = right_part(own_b, 2 * columns, 1, column, columns, RANK, PADDED)
                g += tl.cast(scaling, tl.float32) * tl.dot(left, of_gate, input_precision=PRECISION)
                of_up = right_part(own_b + columns, 2 * columns, 1, column, columns, RANK, PADDED)
                u += tl.cast(scaling, tl.float32) * tl.dot(left, of_up, input_precision=PRECISION)
            if LAST_RANK > 0:
                right = right_part(own_a, columns, 1, column, columns, LAST_RANK, PADDED)
                d += tl.dot(last_left, right, input_precision=PRECISION)
            kind = h.dtype.element_ty
            sigmoid = tl.sigmoid(g)
            silu = g * sigmoid
            of_weight += tl.sum(d * silu * u, 1)
            d *= weight[:, None]
            dgate = (d * u * sigmoid * (1.0 + g - silu)).to(kind)
            dup = (d * silu).to(kind)
            tl.store(dgate_up + wide, dgate, mask=inside)
            tl.store(dgate_up + columns + wide, dup, mask=inside)
            tl.store(h + narrow, (silu * u * weight[:, None]).to(kind), mask=inside)
            if RANK > 0:
                total += tl.dot(dgate, tl.trans(of_gate), input_precision=PRECISION)
                total += tl.dot(dup, tl.trans(of_up), input_precision=PRECISION)
        tl.store(dweights + row, of_weight, mask=row < end)
        if RANK > 0:
            k = tl.arange(0, PADDED)
            inside = (row < end)[:, None] & (k < RANK)[None, :]
            tl.store(dinner + row[:, None] * RANK + k[None, :], total * tl.cast(scaling, tl.float32), mask=inside)


@triton.jit
def _sum(
    pairs, place, weights, more, y, columns,
    WEIGHTED: tl.constexpr, MORE: tl.constexpr, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(CHOSEN):
        own = tl.load(place + token * CHOSEN + k)
        weight = tl.load(weights + own) if WEIGHTED else 1.0
        total += weight * tl.load(pairs + own * columns + column, mask=inside, other=0.0).to(tl.float32)
    if MORE:
        total += tl.load(more + token * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * columns + column, total, mask=inside)


def sum_of_pairs(
    pairs: torch.Tensor, place: torch.Tensor, tokens: int, weights: torch.Tensor | None, more: torch.Tensor | None
) -> torch.Tensor:
    """`Routing.sum` for contiguous pairs."""
    columns = pairs.shape[1]
    y = torch.empty(tokens, columns, dtype=pairs.dtype, device=pairs.device)
    width = min(triton.next_power_of_2(columns), 2048)
    with torch.cuda.device(pairs.device):
        grid = tokens, triton.cdiv(columns, width)
        given = {"WEIGHTED": weights is not None, "MORE": more is not None, "CHOSEN": len(place) // max(tokens, 1)}
        _sum[grid](pairs, place, _or(weights, y), _or(more, y), y, columns, **given, COLUMNS=width, num_warps=8)
    return y


def gather(
    x: torch.Tensor, token: torch.Tensor, ends: torch.Tensor, a: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`Routing.gather` for contiguous tensors."""
    x = x.contiguous()
    rows, columns = len(token), x.shape[1]
    pairs, rank = x.new_empty(rows, columns), 0 if a is None else a.shape[1]
    product = pairs if a is None else x.new_empty(rows, rank)
    constants = _constants(x, ends, rank)
    tiles = triton.cdiv(rows, constants["ROWS"]) + len(ends)
    with torch.cuda.device(x.device):
        _gather[(tiles,)](x, token, ends, _or(a, x), pairs, product, columns, tiles, RANK=rank, **constants)
    return pairs, None if a is None else product


def gated(
    gate_up: torch.Tensor,
    ends: torch.Tensor,
    inner: torch.Tensor | None,
    b: torch.Tensor | None,
    scaling: float,
    last_a: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`grouped_experts.gated` for contiguous tensors."""
    rows, columns = len(gate_up), gate_up.shape[1] // 2
    h = gate_up.new_empty(rows, columns)
    rank, last_rank = (0 if one is None else one.shape[1] for one in (inner, last_a))
    product = h if last_a is None else gate_up.new_empty(rows, last_rank)
    constants = _constants(gate_up, ends, rank, last_rank)
    tiles = triton.cdiv(rows, constants["ROWS"]) + len(ends)
    with torch.cuda.device(gate_up.device):
        _gated[(tiles,)](
            gate_up, _or(inner, h), _or(b, h), float(scaling), h, _or(last_a, h), product, ends, columns,
            tiles, RANK=rank, LAST_RANK=last_rank, **constants,
        )  # fmt: skip
    return h, None if last_a is None else product


def gated_backward(
    gate_up: torch.Tensor,
    weights: torch.Tensor,
    dh: torch.Tensor,
    ends: torch.Tensor,
    inner: torch.Tensor | None,
    b: torch.Tensor | None,
    scaling: float,
    dlast_inner: torch.Tensor | None,
    last_a: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """`grouped_experts.gated_backward` for contiguous tensors."""
    rows, columns = len(gate_up), gate_up.shape[1] // 2
    dgate_up, h = torch.empty_like(gate_up), gate_up.new_empty(rows, columns)
    dweights = torch.empty(rows, dtype=torch.float32, device=gate_up.device)
    rank, last_rank = (0 if one is None else one.shape[1] for one in (inner, last_a))
    dinner = h if inner is None else torch.empty_like(inner)
    constants = _constants(gate_up, ends, rank, last_rank)
    tiles = triton.cdiv(rows, constants["ROWS"]) + len(ends)
    with torch.cuda.device(gate_up.device):
        _gated_backward[(tiles,)](
            gate_up, _or(inner, h), _or(b, h), float(scaling), weights, dh, _or(dlast_inner, h), _or(last_a, h),
            dgate_up, dinner, dweights, h, ends, columns, tiles, RANK=rank, LAST_RANK=last_rank, **constants,
        )  # fmt: skip
    return dgate_up, None if inner is None else dinner, dweights, h


def _or(given: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    """What a kernel gets in place of a tensor that it will not read."""
    return unused if given is None else given


def _constants(y: torch.Tensor, ends: torch.Tensor, *ranks: int) -> JsonObject:
    """What a kernel is compiled for: the experts, ranks padded to what tl.dot takes, its precision, and its tile."""
    padded = max(16, triton.next_power_of_2(max(ranks)))
    exact = y.dtype == torch.float32
    tile = {"ROWS": 64, "COLUMNS": 64 if padded <= 32 else 32, "STAGES": 3, "num_warps": 4}
    if exact:
        tile = {"ROWS": 16, "COLUMNS": 32, "STAGES": 1, "num_warps": 4}
    experts = len(ends)
    own = {"EXPERTS": experts, "ALL": triton.next_power_of_2(experts), "PADDED": padded}
    return tile | own | {"PRECISION": "ieee" if exact else "tf32"}
