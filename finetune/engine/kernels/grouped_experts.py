"""A layer's experts with their adapters: products of tokens that are sorted by expert.

    y_n = sum over the experts e of token n of w_ne D'_e h_ne       h_ne = silu(G'_e x_n) * U'_e x_n
    G' = G + s B A, and U' and D' alike

PEFT adds B A to the weights of all experts in every pass, and computes the gradient of these weights to get that of A
and B. Here the adapters are small products of their own. The kernels that sort tokens by expert, and that of silu(gate)
* up, multiply by the adapters' factors what they have read. What goes from the adapters to the sums over a token's
experts, and the gradients of their outer factors, are matrix products of all tokens and all experts at once, most of
whose entries are zeros: a pass over a token's row for each of its experts costs more. The results of these experts, in
16 bits, are multiplied by w as they are added in float32: else many sums would lie exactly between two numbers of 16
bits, and a small adapter decide where they go.

`install` puts this in place of the forward method of the experts. Whatever it does not compute goes through PEFT and
transformers or Unsloth as before.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from finetune.engine.kernels import fp8
from finetune.engine.kernels.fused_lora import active_adapter, is_silu
from finetune.runtime.types import Model

FIRST, LAST = "gate_up_proj", "down_proj"  # the parameters of a layer's experts, as transformers names them
MULTIPLE = 8  # of a rank and of the model's widths: grouped products take rows of whole 16 bytes


@dataclass(frozen=True)
class Routing:
    """Which experts a micro-batch's tokens have. A pair is a token and one of its experts.

    order:  int64 [pairs], which pair, token by token, is at each place after sorting by expert
    place:  int64 [pairs], the opposite: the place of each pair
    token:  int64 [pairs], the token of the pair at each place
    slot:   int64 [pairs], token * experts + expert of the pair at each place
    ends:   int32 [experts], where each expert's pairs end
    """

    order: torch.Tensor
    place: torch.Tensor
    token: torch.Tensor
    slot: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, experts: torch.Tensor, number: int) -> Routing:
        """Of the experts (tokens, chosen) of each token, without a host-device sync."""
        pairs = experts.numel()
        expert, order = torch.sort(experts.reshape(-1).to(torch.int32), stable=True)
        token = order // experts.shape[1]
        place = torch.empty_like(order)
        place[order] = torch.arange(pairs, device=order.device)
        known = torch.arange(number, device=order.device, dtype=torch.int32)
        ends = torch.searchsorted(expert, known, right=True, out_int32=True)
        return cls(order=order, place=place, token=token, slot=token * number + expert, ends=ends)

    def spread(self, pairs: torch.Tensor, tokens: int) -> torch.Tensor:
        """(pairs, rank) as (tokens, experts * rank): each in the columns of its expert, beside zeros."""
        experts, rank = len(self.ends), pairs.shape[1]
        table = pairs.new_zeros(tokens * experts, rank)
        return table.index_copy_(0, self.slot, pairs).view(tokens, experts * rank)

    def gather(self, x: torch.Tensor, a: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows of x (tokens, k) for the pairs (pairs, k), and them times a^T (pairs, rank) for a (experts, rank,
        k), None without it. In one kernel on a GPU."""
        if x.is_cuda:
            from finetune.engine.kernels import triton_experts

            return triton_experts.gather(x, self.token, self.ends, a)
        pairs = x.index_select(0, self.token)
        return pairs, None if a is None else self.product(pairs, a.transpose(1, 2))

    def product(self, pairs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(pairs, k) times the weights (experts, k, n) of each pair's expert."""
        return functional.grouped_mm(pairs, weights, offs=self.ends)

    def outer(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """left^T right of each expert's pairs: (experts, k, n) of (pairs, k) and (pairs, n)."""
        return functional.grouped_mm(left.t(), right, offs=self.ends)

    def sum(
        self, pairs: torch.Tensor, tokens: int, weights: torch.Tensor | None = None, more: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sum of each token's pairs (pairs, n) times their weights (pairs), and of `more` (tokens, n), added in
        float32: (tokens, n)."""
        if pairs.is_cuda:
            from finetune.engine.kernels import triton_experts

            return triton_experts.sum_of_pairs(pairs, self.place, tokens, weights, more)
        weighted = pairs.float() if weights is None else pairs * weights[:, None]
        total = weighted[self.place].view(tokens, -1, pairs.shape[1]).sum(1)
        return (total if more is None else total + more).to(pairs.dtype)


@dataclass(frozen=True)
class Experts:
    """Frozen experts: their module, whose gate_up_proj is (experts, 2 m, k) and down_proj (experts, k, m), and the
    scalings of the adapters of the two."""

    module: Any
    scalings: tuple[float, float]

    def weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Of gate and up, and of down."""
        return self.module.gate_up_proj.to(dtype), self.module.down_proj.to(dtype)


class _Experts(torch.autograd.Function):
    """The experts' outputs (n, k) for x (n, k). Keeps gate and up of each pair without their adapters' part, and
    computes what follows again in the backward pass.

    Args:
        weights: of each token's experts (n, chosen), and the experts' numbers alike.
        a, b: the adapter of gate and up, (experts, rank, k) and (experts, rank, 2 m).
        last_a, last_b: that of down, (experts, rank, m) and (experts, rank, k).
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, numbers: torch.Tensor, experts: Experts, *factors: Any
    ) -> torch.Tensor:
        (first, last), (scaling, last_scaling) = experts.weights(x.dtype), experts.scalings
        a, b, last_a, last_b = factors
        routing = Routing.of(numbers, len(first))
        pairs, inner = routing.gather(x, a)
        gate_up = routing.product(pairs, first.transpose(1, 2))
        del pairs
        sorted_weights = weights.reshape(-1).index_select(0, routing.order).float()
        h, last_inner = gated(gate_up, routing, inner, b, scaling, last_a)
        part = None
        if last_inner is not None:
            last_inner = (last_inner * sorted_weights[:, None]).to(h.dtype)
            part = (routing.spread(last_inner, len(x)) * last_scaling) @ last_b.flatten(0, 1)
        y = routing.sum(routing.product(h, last.transpose(1, 2)), len(x), sorted_weights, part)
        ctx.experts, ctx.routing, ctx.weights = experts, routing, weights.dtype
        ctx.save_for_backward(x, gate_up, sorted_weights, inner, last_inner, *factors)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, gate_up, weights, inner, last_inner, a, b, last_a, last_b = ctx.saved_tensors
        routing, (scaling, last_scaling) = ctx.routing, ctx.experts.scalings
        first, last = ctx.experts.weights(x.dtype)
        (dy,) = gradients
        da = db = dlast_a = dlast_b = None
        pairs, dlast_inner = routing.gather(dy, last_b)
        if last_b is not None:
            spread = routing.spread(last_inner, len(x))
            dlast_b = (spread.t() @ dy).view_as(last_b) * last_scaling
        dh = routing.product(pairs, last)
        del pairs
        dlast_inner = None if dlast_inner is None else dlast_inner * last_scaling
        dgate_up, dinner, dweights, h = gated_backward(
            gate_up, weights, dh, routing, inner, b, scaling, dlast_inner, last_a
        )
        del dh
        if dlast_inner is not None:
            dlast_a = routing.outer(dlast_inner, h)
        dx = routing.sum(routing.product(dgate_up, first), len(x)) if ctx.needs_input_grad[0] else None
        if dinner is not None:
            db = routing.outer(inner, dgate_up) * scaling
            spread = routing.spread(dinner, len(x))
            da = (spread.t() @ x).view_as(a)
            if dx is not None:
                dx.addmm_(spread, a.flatten(0, 1))
        dweights = dweights.index_select(0, routing.place).view(len(x), -1).to(ctx.weights)
        return dx, dweights, None, None, da, db, dlast_a, dlast_b


def gated(
    gate_up: torch.Tensor,
    routing: Routing,
    inner: torch.Tensor | None,
    b: torch.Tensor | None,
    scaling: float,
    last_a: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h = silu(gate) * up (pairs, m), and h times `last_a` (pairs, rank), None without it. In one kernel on a GPU.

    Args:
        gate_up: without the adapter, (pairs, 2 m).
        inner, b: scaling * inner (pairs, rank) @ b (experts, rank, 2 m) is the adapter's part; None without one.
        last_a: (experts, rank, m).
    """
    if gate_up.is_cuda:
        from finetune.engine.kernels import triton_experts

        return triton_experts.gated(gate_up, routing.ends, inner, b, scaling, last_a)
    gate, up = _with_adapter(gate_up, routing, inner, b, scaling).chunk(2, dim=1)
    h = (functional.silu(gate) * up).to(gate_up.dtype)
    return h, None if last_a is None else routing.product(h, last_a.transpose(1, 2))


def gated_backward(
    gate_up: torch.Tensor,
    weights: torch.Tensor,
    dh: torch.Tensor,
    routing: Routing,
    inner: torch.Tensor | None,
    b: torch.Tensor | None,
    scaling: float,
    dlast_inner: torch.Tensor | None,
    last_a: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Gradients of gate and up (pairs, 2 m), of `inner`, and of the weights w in float32; and w h. Arguments as
    of `gated`; `dlast_inner` (pairs, rank) @ `last_a` is added to dh before."""
    if gate_up.is_cuda:
        from finetune.engine.kernels import triton_experts

        return triton_experts.gated_backward(gate_up, weights, dh, routing.ends, inner, b, scaling, dlast_inner, last_a)
    gate, up = _with_adapter(gate_up, routing, inner, b, scaling).chunk(2, dim=1)
    if dlast_inner is not None and last_a is not None:
        dh = dh + routing.product(dlast_inner, last_a)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    weight = weights[:, None]
    dweights = (dh * silu * up).sum(1, dtype=torch.float32)
    dh = dh * weight
    dgate_up = torch.cat([dh * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * silu], dim=1).to(gate_up.dtype)
    dinner = None if b is None else routing.product(dgate_up, b.transpose(1, 2)) * scaling
    return dgate_up, dinner, dweights, (silu * up * weight).to(gate_up.dtype)


def _with_adapter(
    gate_up: torch.Tensor, routing: Routing, inner: torch.Tensor | None, b: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """In float32, in which the sum is not rounded."""
    return gate_up.float() if inner is None or b is None else gate_up.float() + routing.product(inner, b) * scaling


# --- PEFT's layers ----------------------------------------------------------------------------------------------------


def _forward(layer: Any, x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    """Forward of experts, or of PEFT's layers around them."""
    if named or len(given) != 2 or not is_supported(layer):
        return type(layer).forward(layer, x, *given, **named)
    numbers, weights = given
    rows = fp8.in_compute_dtype(x.reshape(-1, x.shape[-1]))
    experts, factors = _experts(layer, rows.dtype)
    y: Any = _Experts.apply(rows, weights, numbers, experts, *factors)
    return y.view_as(x).to(x.dtype)


def _experts(layer: Any, dtype: torch.dtype) -> tuple[Experts, list[torch.Tensor | None]]:
    """The experts, and A and B of the adapter of each parameter in turn, in `dtype`."""
    found: dict[str, tuple[float, torch.Tensor, torch.Tensor]] = {}
    module = layer
    for module in _nested(layer):
        if (name := active_adapter(module)) is not None:
            a, b, number = module.lora_A[name].weight, module.lora_B[name].weight, module.num_experts
            # As PEFT orders them: experts are the slowest dimension of A's rows, and the fastest of B's columns.
            a, b = a.view(number, -1, a.shape[1]), b.view(b.shape[0], -1, number).permute(2, 1, 0)
            missing = -a.shape[1] % MULTIPLE
            a, b = (functional.pad(one.to(dtype), (0, 0, 0, missing)).contiguous() for one in (a, b))
            found[module.parameter_name] = (module.scaling[name], a, b)
    absent = (1.0, None, None)
    (scaling, *first), (last_scaling, *last) = found.get(FIRST, absent), found.get(LAST, absent)
    return Experts(module, (scaling, last_scaling)), [*first, *last]


def _nested(layer: Any) -> Iterator[Any]:
    """PEFT's layers around experts, the outermost first, and the experts."""
    yield layer
    while hasattr(layer, "parameter_name"):
        layer = layer.base_layer
        yield layer


def is_supported(layer: Any) -> bool:
    """Whether this computes what these experts would: frozen ones with silu(gate) * up in 16 or 32 bits, plain or with
    one adapter of plain LoRA on either parameter."""
    *around, module = _nested(layer)
    if not _is_plain(module):
        return False
    names = [one.parameter_name for one in around]
    return len(set(names)) == len(names) and all(
        one.parameter_name in (FIRST, LAST)
        and not one.disable_adapters
        and not one.merged
        and active_adapter(one) is not None
        for one in around
    )


def _is_plain(module: Any) -> bool:
    """Whether these are frozen experts of transformers (or Unsloth's copies of them), without biases and with their
    inputs last, in widths that grouped products take."""
    first: Any = getattr(module, FIRST, None)
    last: Any = getattr(module, LAST, None)
    if not all(
        type(one) is nn.Parameter and one.ndim == 3 and one.is_floating_point() and not one.requires_grad
        for one in (first, last)
    ):
        return False
    (number, twice, width), device = first.shape, first.device
    return (
        tuple(last.shape) == (number, width, twice // 2)
        and width % MULTIPLE == twice // 2 % MULTIPLE == 0
        and not (hasattr(module, f"{FIRST}_bias") or nn.utils.parametrize.is_parametrized(module))
        and _is_standard(type(module))
        and is_silu(getattr(module, "act_fn", None))
        and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0))
    )


def _is_standard(kind: Any) -> bool:
    """Whether a class of experts is what transformers' `use_experts_implementation` describes, with the default gate:
    silu of the first half times the second. Unsloth's compiled copies lack what that decorator adds."""
    gate = getattr(kind, "_apply_gate", None)
    if gate is None:
        return kind.forward.__name__ == "forward_moe_backend"
    return gate.__name__ == "_default_apply_gate"


def installed(model: Model) -> int:
    """The number of layers whose experts this module computes."""
    return sum(getattr(vars(one).get("forward"), "__func__", None) is _forward for one in model.modules())


def install(model: Model) -> int:
    """Compute the model's experts as this module does. Returns the number of layers that it changed."""
    inside: set[int] = set()
    changed = 0
    for layer in model.modules():  # outer modules come before inner ones
        *around, module = _nested(layer)
        if id(layer) in inside or not is_supported(layer):
            continue
        inside |= {id(one) for one in (*around, module)}
        layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
        changed += 1
    if changed and "unsloth" in sys.modules:
        # Unsloth compiles a decoder layer as one region. It cannot compile these kernels: it would try so twice in the
        # first step, and leave the layer as it is.
        os.environ.setdefault("UNSLOTH_BLOCK_COMPILE", "0")
    return changed
