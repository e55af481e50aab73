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
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from finetune.engine import fp8
from finetune.engine.low_rank import Term, plus

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Group:
    """The layers of one input: frozen weights and scalings; their A and B are arguments, as they get gradients."""

    bases: tuple[nn.Linear, ...]
    scalings: tuple[float, ...]

    def products(self, x: torch.Tensor, a: Tensors) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """x (n, k) times each W (n, out_i), and x times the stacked A (n, sum of ranks); None without any adapter."""
        stacked = _stacked(a)
        inner = None if stacked is None else x @ stacked.t()
        form = fp8.quantize(x) if any(isinstance(base, fp8.Linear) for base in self.bases) else None
        outputs = []
        for base in self.bases:
            if isinstance(base, fp8.Linear) and form is not None:
                outputs.append(base.product(*form, x.dtype))
            else:
                bias = None if base.bias is None else base.bias.to(x.dtype)
                outputs.append(functional.linear(x, base.weight.to(x.dtype), bias))
        return outputs, inner

    def terms(self, inner: torch.Tensor | None, a: Tensors, b: Tensors) -> list[Term | None]:
        """What the adapter of each layer adds to its product; None without one."""
        return [
            None if own_b is None or inner is None else Term(inner[:, part], own_b.t(), scaling)
            for own_b, part, scaling in zip(b, _parts(a), self.scalings, strict=True)
        ]

    def forward(self, x: torch.Tensor, a: Tensors, b: Tensors) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Outputs (n, out_i) of x (n, k), and x times the stacked A (n, sum of ranks); None without any adapter."""
        outputs, inner = self.products(x, a)
        for y, term in zip(outputs, self.terms(inner, a, b), strict=True):
            if term is not None:
                y.addmm_(term.left, term.right, alpha=term.scaling)
        return outputs, inner

    def backward(
        self,
        gradients: Sequence[torch.Tensor],
        x: torch.Tensor,
        inner: torch.Tensor | None,
        a: Tensors,
        b: Tensors,
        *,
        wants_x: bool,
    ) -> tuple[torch.Tensor | None, Tensors, Tensors]:
        """Gradients of x, of each A and of each B."""
        dx: torch.Tensor | None = None
        dinner: list[torch.Tensor] = []
        db: list[torch.Tensor | None] = []
        for base, own_b, part, scaling, given in zip(self.bases, b, _parts(a), self.scalings, gradients, strict=True):
            if wants_x:
                dx = _add_input_gradient(dx, base, given)
            if own_b is None or inner is None:
                db.append(None)
            else:
                dinner.append(given @ (own_b * scaling))
                db.append((given.t() @ inner[:, part]).mul_(scaling))
        if not dinner:
            return dx, [None] * len(a), db
        stacked_dinner = dinner[0] if len(dinner) == 1 else torch.cat(dinner, dim=1)
        stacked_da = stacked_dinner.t() @ x
        if dx is not None:
            dx.addmm_(stacked_dinner, _stacked(a))  # type: ignore[arg-type]
        return dx, [None if one is None else stacked_da[part] for one, part in zip(a, _parts(a), strict=True)], db


def _add_input_gradient(dx: torch.Tensor | None, base: nn.Linear, gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(base, fp8.Linear):
        own = base.input_gradient(*fp8.quantize(gradient), gradient.dtype)
        return own if dx is None else dx.add_(own)
    weight = base.weight.to(gradient.dtype)
    return gradient @ weight if dx is None else dx.addmm_(gradient, weight)


def _parts(a: Tensors) -> list[slice]:
    """The columns of each adapter in the product with the stacked A."""
    found, end = [], 0
    for one in a:
        found.append(slice(end, end + (0 if one is None else one.shape[0])))
        end = found[-1].stop
    return found


def _stacked(a: Tensors) -> torch.Tensor | None:
    present = [one for one in a if one is not None]
    return None if not present else present[0] if len(present) == 1 else torch.cat(present)


class _Project(torch.autograd.Function):
    """The outputs of a group for x (..., k). `factors` are A and B of each layer in turn, None without an adapter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, *factors: Any) -> Any:
        outputs, inner = group.forward(_rows(x), factors[::2], factors[1::2])
        ctx.group = group
        ctx.save_for_backward(x, inner, *factors)
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, inner, *factors = ctx.saved_tensors
        a, b = factors[::2], factors[1::2]
        given = [_rows(one) for one in gradients]
        dx, da, db = ctx.group.backward(given, _rows(x), inner, a, b, wants_x=ctx.needs_input_grad[0])
        return None if dx is None else dx.view_as(x), None, *_alternating(da, db)


class _Mlp(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)). Keeps gate(x) and up(x) without their adapters' part, and computes their product
    again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: Group, last: Group, *factors: Any) -> torch.Tensor:
        a, b = factors[::2], factors[1::2]
        (gate, up), inner = first.products(_rows(x), a[:2])
        h = silu_and_multiply(gate, up, *first.terms(inner, a[:2], b[:2]))
        (y,), last_inner = last.forward(h, a[2:], b[2:])
        ctx.groups = first, last
        ctx.save_for_backward(x, gate, up, inner, last_inner, *factors)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, gate, up, inner, last_inner, *factors = ctx.saved_tensors
        a, b = factors[::2], factors[1::2]
        first, last = ctx.groups
        dy = _rows(gradients[0])
        dh = _add_input_gradient(None, last.bases[0], dy)
        own_a, own_b = a[2], b[2]
        dinner = None if own_b is None else dy @ (own_b * last.scalings[0])
        dh_term = None if dinner is None else Term(dinner, own_a)
        gate_term, up_term = first.terms(inner, a[:2], b[:2])
        h, dgate, dup = silu_and_multiply_backward(gate, up, dh, gate_term, up_term, dh_term)
        last_da = last_db = None
        if dinner is not None:
            last_da, last_db = dinner.t() @ h, (dy.t() @ last_inner).mul_(last.scalings[0])
        del h, dh
        dx, da, db = first.backward((dgate, dup), _rows(x), inner, a[:2], b[:2], wants_x=ctx.needs_input_grad[0])
        grads = _alternating([*da, last_da], [*db, last_db])
        return None if dx is None else dx.view_as(x), None, None, *grads


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _alternating(a: Tensors, b: Tensors) -> list[torch.Tensor | None]:
    return [one for pair in zip(a, b, strict=True) for one in pair]


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
    group, factors = _group(layers, x.dtype)
    return _Project.apply(x, group, *factors)  # type: ignore[no-any-return]


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of an MLP with gate_proj, up_proj, down_proj and SiLU."""
    layers = (module.gate_proj, module.up_proj, module.down_proj)
    if not all(map(computable, layers)):
        return module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
    x = fp8.in_compute_dtype(x)
    (first, factors), (last, more) = _group(layers[:2], x.dtype), _group(layers[2:], x.dtype)
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


def _group(layers: Sequence[Any], dtype: torch.dtype) -> tuple[Group, list[torch.Tensor | None]]:
    """The layers as a group, and A and B of each in turn, in `dtype`."""
    bases, scalings, factors = [], [], []
    for layer in layers:
        name = active_adapter(layer)
        bases.append(getattr(layer, "base_layer", layer))
        scalings.append(1.0 if name is None else layer.scaling[name])
        pair = (None, None) if name is None else (layer.lora_A[name].weight, layer.lora_B[name].weight)
        factors += [None if one is None else one.to(dtype) for one in pair]
    return Group(tuple(bases), tuple(scalings)), factors


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
