"""Frozen linear layers with LoRA adapters, computed together where they share an input.

    y_i = x W_i^T + s_i (x A_i^T) B_i^T        for the layers i of one input x: q, k, v; or gate and up

The A_i are stacked, so that all x A_i^T are one product, and so are all gradients of A_i. The adapter's part is added
to y by the matrix product itself, and the gradients of x are summed in the same way. Inside an MLP, whose activations
are its widest tensors, it is added by the kernel of silu(gate) * up, which reads them anyway. An MLP keeps gate and up
without it for the backward pass, and computes their product again. The frozen W may be in 16 bits, 32 bits or FP8
(`fp8`), which needs x quantized once for all layers.

`install` puts this in place of the forward methods of PEFT's layers and of Unsloth's functions for them. Whatever it
does not compute (dropout, DoRA, several adapters, merged weights) goes through PEFT as before.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from finetune.engine import fp8
from finetune.engine.low_rank import Term, plus

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Group:
    """The layers of one input: frozen weights, scalings, and the adapters' ranks, 0 without one. Their A and B are
    arguments, as they get gradients: `a` is the A of all layers, one below the other (sum of ranks, k), or None."""

    bases: tuple[nn.Linear, ...]
    scalings: tuple[float, ...]
    ranks: tuple[int, ...]

    @property
    def parts(self) -> list[slice]:
        """The rows of each adapter in `a`, and its columns in the product with it."""
        ends = list(accumulate(self.ranks))
        return [slice(end - rank, end) for end, rank in zip(ends, self.ranks, strict=True)]

    def factors(self, given: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """`a`, and each B, in `dtype`. `given` is A and B of each layer in turn, None without an adapter."""
        each_a = [one for one in given[::2] if one is not None]
        each_b = [one for one in given[1::2] if one is not None]
        if not each_a:
            return None, [None] * len(self.bases)
        if all(one.dtype == dtype for one in (*each_a, *each_b)):
            return each_a[0] if len(each_a) == 1 else torch.cat(each_a), list(given[1::2])
        a = each_a[0].new_empty((sum(self.ranks), each_a[0].shape[1]), dtype=dtype)
        copies = [torch.empty_like(one, dtype=dtype) for one in each_b]
        # One kernel. Adapters are small: the host takes longer to launch a kernel than the GPU to run it.
        torch._foreach_copy_([*a.split([rank for rank in self.ranks if rank]), *copies], [*each_a, *each_b])
        rest = iter(copies)
        return a, [next(rest) if rank else None for rank in self.ranks]

    def products(self, x: torch.Tensor, a: torch.Tensor | None) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """x (n, k) times each W (n, out_i), and x times `a` (n, sum of ranks); None without any adapter."""
        inner = None if a is None else x @ a.t()
        form = fp8.quantize(x) if any(isinstance(base, fp8.Linear) for base in self.bases) else None
        outputs = []
        for base in self.bases:
            if isinstance(base, fp8.Linear) and form is not None:
                outputs.append(base.product(*form, x.dtype))
            else:
                bias = None if base.bias is None else base.bias.to(x.dtype)
                outputs.append(functional.linear(x, base.weight.to(x.dtype), bias))
        return outputs, inner

    def terms(self, inner: torch.Tensor | None, b: Tensors) -> list[Term | None]:
        """What the adapter of each layer adds to its product; None without one."""
        return [
            None if own_b is None or inner is None else Term(inner[:, part], own_b.t(), scaling)
            for own_b, part, scaling in zip(b, self.parts, self.scalings, strict=True)
        ]

    def forward(
        self, x: torch.Tensor, a: torch.Tensor | None, b: Tensors
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Outputs (n, out_i) of x (n, k), and x times `a` (n, sum of ranks); None without any adapter."""
        outputs, inner = self.products(x, a)
        for y, term in zip(outputs, self.terms(inner, b), strict=True):
            if term is not None:
                y.addmm_(term.left, term.right, alpha=term.scaling)
        return outputs, inner

    def backward(
        self,
        gradients: Sequence[torch.Tensor],
        x: torch.Tensor,
        inner: torch.Tensor | None,
        a: torch.Tensor | None,
        b: Tensors,
        *,
        wants_x: bool,
    ) -> tuple[torch.Tensor | None, Tensors, Tensors]:
        """Gradients of x, of each A and of each B."""
        dx: torch.Tensor | None = None
        dinner: list[torch.Tensor] = []
        db: list[torch.Tensor | None] = []
        for base, own_b, part, scaling, given in zip(self.bases, b, self.parts, self.scalings, gradients, strict=True):
            if wants_x:
                dx = _add_input_gradient(dx, base, given)
            if own_b is None or inner is None:
                db.append(None)
            else:
                dinner.append(given @ _times(own_b, scaling))
                db.append(_times(given.t() @ inner[:, part], scaling))
        if a is None:
            return dx, [None] * len(b), db
        stacked_dinner = dinner[0] if len(dinner) == 1 else torch.cat(dinner, dim=1)
        stacked_da = stacked_dinner.t() @ x
        if dx is not None:
            dx.addmm_(stacked_dinner, a)
        return dx, [stacked_da[part] if rank else None for part, rank in zip(self.parts, self.ranks, strict=True)], db


def _times(x: torch.Tensor, scaling: float) -> torch.Tensor:
    return x if scaling == 1.0 else x * scaling


def _add_input_gradient(dx: torch.Tensor | None, base: nn.Linear, gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(base, fp8.Linear):
        own = base.input_gradient(*fp8.quantize(gradient), gradient.dtype)
        return own if dx is None else dx.add_(own)
    weight = base.weight.to(gradient.dtype)
    return gradient @ weight if dx is None else dx.addmm_(gradient, weight)


class _Project(torch.autograd.Function):
    """The outputs of a group for x (..., k). `factors` are A and B of each layer in turn, None without an adapter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, *factors: Any) -> Any:
        a, b = group.factors(factors, x.dtype)
        outputs, inner = group.forward(_rows(x), a, b)
        ctx.group, ctx.dtype = group, _dtype(factors)
        ctx.save_for_backward(x, inner, a, *b)
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, inner, a, *b = ctx.saved_tensors
        given = [_rows(one) for one in gradients]
        dx, da, db = ctx.group.backward(given, _rows(x), inner, a, b, wants_x=ctx.needs_input_grad[0])
        return None if dx is None else dx.view_as(x), None, *_gradients(da, db, ctx.dtype)


class _Mlp(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)). Keeps gate(x) and up(x) without their adapters' part, and computes their product
    again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: Group, last: Group, *factors: Any) -> torch.Tensor:
        a, b = first.factors(factors[:4], x.dtype)
        last_a, last_b = last.factors(factors[4:], x.dtype)
        (gate, up), inner = first.products(_rows(x), a)
        h = silu_and_multiply(gate, up, *first.terms(inner, b))
        (y,), last_inner = last.forward(h, last_a, last_b)
        ctx.groups, ctx.dtype = (first, last), _dtype(factors)
        ctx.save_for_backward(x, gate, up, inner, last_inner, a, last_a, *b, *last_b)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, gate, up, inner, last_inner, a, last_a, *b, last_b = ctx.saved_tensors
        (first, last), scaling = ctx.groups, ctx.groups[1].scalings[0]
        dy = _rows(gradients[0])
        dh = _add_input_gradient(None, last.bases[0], dy)
        dinner = None if last_b is None else dy @ _times(last_b, scaling)
        dh_term = None if dinner is None else Term(dinner, last_a)
        gate_term, up_term = first.terms(inner, b)
        h, dgate, dup = silu_and_multiply_backward(gate, up, dh, gate_term, up_term, dh_term)
        last_da = last_db = None
        if dinner is not None:
            last_da, last_db = dinner.t() @ h, _times(dy.t() @ last_inner, scaling)
        del h, dh
        dx, da, db = first.backward((dgate, dup), _rows(x), inner, a, b, wants_x=ctx.needs_input_grad[0])
        grads = _gradients([*da, last_da], [*db, last_db], ctx.dtype)
        return None if dx is None else dx.view_as(x), None, None, *grads


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _dtype(factors: Tensors) -> torch.dtype | None:
    return next((one.dtype for one in factors if one is not None), None)


def _gradients(a: Tensors, b: Tensors, dtype: torch.dtype | None) -> list[torch.Tensor | None]:
    """The gradients of A and B of each layer in turn, in the parameters' `dtype`."""
    given = [one for pair in zip(a, b, strict=True) for one in pair]
    present = [one for one in given if one is not None]
    if not present or dtype is None or present[0].dtype == dtype:
        return given
    copies = [torch.empty_like(one, dtype=dtype) for one in present]
    torch._foreach_copy_(copies, present)
    rest = iter(copies)
    return [None if one is None else next(rest) for one in given]


def silu_and_multiply(
    gate: torch.Tensor, up: torch.Tensor, gate_term: Term | None = None, up_term: Term | None = None
) -> torch.Tensor:
    """silu(gate) * up, with a term added to each before; in one kernel on a GPU."""
    if gate.is_cuda:
        from finetune.engine import kernels

        return kernels.silu_and_multiply(gate, up, gate_term, up_term)
    return functional.silu(plus(gate, gate_term)) * plus(up, up_term)


def silu_and_multiply_backward(
    gate: torch.Tensor,
    up: torch.Tensor,
    dh: torch.Tensor,
    gate_term: Term | None = None,
    up_term: Term | None = None,
    dh_term: Term | None = None,
) -> tuple[torch.Tensor, ...]:
    """h = silu(gate) * up again, and the gradients of gate and up, with a term added to each of the three tensors
    before; in one kernel on a GPU."""
    if gate.is_cuda:
        from finetune.engine import kernels

        return kernels.silu_and_multiply_backward(gate, up, dh, gate_term, up_term, dh_term)
    gate, up, dh = plus(gate, gate_term), plus(up, up_term), plus(dh, dh_term)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return silu * up, dh * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * silu


# --- PEFT's layers ----------------------------------------------------------------------------------------------------


def project(x: torch.Tensor, layers: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The outputs of frozen layers, plain or with an adapter, for the same input x (..., k)."""
    x = fp8.in_compute_dtype(x)
    group, factors = _group(layers)
    return _Project.apply(x, group, *factors)  # type: ignore[no-any-return]


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of an MLP with gate_proj, up_proj, down_proj and SiLU."""
    layers = (module.gate_proj, module.up_proj, module.down_proj)
    if not all(map(computable, layers)):
        return module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
    x = fp8.in_compute_dtype(x)
    (first, factors), (last, more) = _group(layers[:2]), _group(layers[2:])
    return _Mlp.apply(x, first, last, *factors, *more)  # type: ignore[no-any-return]


def _query_key_value(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    layers = (module.q_proj, module.k_proj, module.v_proj)
    return project(x, layers) if all(map(computable, layers)) else tuple(layer(x) for layer in layers)


def _attention_output(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.o_proj(x)


def _lora_forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args or kwargs or not computable(layer):
        return type(layer).forward(layer, x, *args, **kwargs)
    return project(x, [layer])[0]


def _group(layers: Sequence[Any]) -> tuple[Group, list[torch.Tensor | None]]:
    """The layers as a group, and A and B of each in turn."""
    bases, scalings, ranks = [], [], []
    factors: list[torch.Tensor | None] = []
    for layer in layers:
        name = active_adapter(layer)
        pair = (None, None) if name is None else (layer.lora_A[name].weight, layer.lora_B[name].weight)
        bases.append(getattr(layer, "base_layer", layer))
        scalings.append(1.0 if name is None else layer.scaling[name])
        ranks.append(0 if pair[0] is None else pair[0].shape[0])
        factors += pair
    return Group(tuple(bases), tuple(scalings), tuple(ranks)), factors


def computable(layer: Any) -> bool:
    """Whether `project` computes what this layer would: a frozen one, plain or with one adapter of plain LoRA."""
    base = getattr(layer, "base_layer", layer)
    if type(base) not in (nn.Linear, fp8.Linear) or any(one.requires_grad for one in base.parameters()):
        return False
    if base is layer:
        return True
    name = active_adapter(layer)
    if layer.disable_adapters or layer.merged or name is None:
        return False
    drops = layer.training and not isinstance(layer.lora_dropout[name], nn.Identity)
    return not (drops or name in getattr(layer, "lora_variant", {}) or getattr(layer, "lora_bias", {}).get(name))


def active_adapter(layer: Any) -> str | None:
    """The one active adapter of a LoRA layer; None if there is none, or more than one."""
    active = [name for name in getattr(layer, "active_adapters", ()) if name in layer.lora_A]
    return active[0] if len(active) == 1 else None


# --- a model ----------------------------------------------------------------------------------------------------------


def install(model: nn.Module) -> int:
    """Compute the model's LoRA layers as this module does, and its MLPs and projections of one input together. Returns
    the number of layers that it changed."""
    from peft.tuners.lora import Linear

    layers = [one for one in model.modules() if isinstance(one, Linear) and computable(one)]
    for layer in layers:
        layer.forward = types.MethodType(_lora_forward, layer)  # type: ignore[method-assign]
    changed = set(map(id, layers))
    for module in model.modules():
        _together(module, lambda child: id(child) in changed or isinstance(child, fp8.Linear))
    return len(layers)


def _together(module: Any, ours: Callable[[Any], bool]) -> None:
    """Set what Unsloth's or transformers' attention and MLP modules call."""
    mine = {name for name, child in module.named_children() if ours(child)}
    own = vars(module)
    if {"gate_proj", "up_proj", "down_proj"} <= mine and _is_silu(getattr(module, "act_fn", None)):
        if "_unsloth_forward" not in own:  # a tiled MLP stays tiled
            module.forward = types.MethodType(_mlp, module)
    if "apply_qkv" in own and {"q_proj", "k_proj", "v_proj"} <= mine:
        module.apply_qkv = _query_key_value
    if "apply_o" in own and "o_proj" in mine:
        module.apply_o = _attention_output


def _is_silu(function: Any) -> bool:
    return isinstance(function, nn.SiLU) or type(function).__name__ == "SiLUActivation"
