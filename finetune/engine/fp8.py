"""Frozen weights in FP8 (`model.load_in_fp8`): their matrix products run on FP8 tensor cores, forward and backward.

A frozen linear layer y = x W^T is computed as torch._scaled_mm of e4m3 values, with one scale for each token of x and
one for each row of W ("rowwise"), the sum in float32. The gradient of x is a product with W too, over its other
dimension, so each weight is kept twice: W and its transpose, with scales for their own rows. That is the memory of
bfloat16. Weights are quantized once, after loading; x and the gradient in every step, by one kernel each.

Scales belong to single tokens, so the result does not depend on the batch, on packing or on the number of GPUs. The
adapter and its gradients stay exact: they see x and the gradient as they are, not their FP8 form.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from finetune.errors import UserError

FORMAT = torch.float8_e4m3fn
LARGEST = 448.0  # torch.finfo(FORMAT).max
SMALLEST = 1e-12  # of a row's largest value, so that the scale of a row of zeros is not 0
MULTIPLE = 16  # torch._scaled_mm needs both dimensions of a weight to be multiples of this


def check(device: str, dtype: torch.dtype) -> None:
    """Check by a small product that this device multiplies FP8 with rowwise scales and writes `dtype`.

    Raises:
        UserError: it does not.
    """
    try:
        rows, scales = quantize(torch.ones(MULTIPLE, MULTIPLE, device=device))
        multiply(rows, scales, rows, scales, dtype)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        name = torch.cuda.get_device_name() if device == "cuda" else "this CPU"
        raise UserError(
            f"model.load_in_fp8 is set, but {name} with torch {torch.__version__} does not multiply FP8 into "
            f"{str(dtype).removeprefix('torch.')} ({str(error).splitlines()[0][:200]}). It needs NVIDIA Ada, Hopper or "
            "newer and bfloat16. Set it to false, or use model.load_in_4bit for less memory."
        ) from None


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (n, k) in e4m3, and the float32 scale (n, 1) of each: its largest magnitude becomes 448."""
    if x.is_cuda:
        from finetune.engine import fp8_kernels

        return fp8_kernels.quantize(x)
    scales = x.float().abs().amax(-1, keepdim=True).clamp_min(SMALLEST) / LARGEST
    return (x.float() / scales).to(FORMAT), scales


def multiply(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x (n, k) times weight (m, k) transposed, both quantized by rows, as (n, m) of `dtype`."""
    return torch._scaled_mm(
        x, weight.t(), scale_a=x_scales, scale_b=scales.t(), out_dtype=dtype, use_fast_accum=x.is_cuda
    )


class Linear(nn.Linear):
    """A frozen linear layer in FP8. Reading `weight` gives the rounded weight in the original dtype."""

    def __init__(self, original: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        self.dtype = original.weight.dtype
        self.bias = original.bias
        with torch.no_grad():
            self.values, self.scales = self._stored(original.weight)
            self.transposed, self.transposed_scales = self._stored(original.weight.t().contiguous())
        self.transposed.counted = False  # type: ignore[attr-defined]  # the same weights again

    @staticmethod
    def _stored(rows: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter]:
        """As parameters, which DDP copies to the other ranks once. As bytes, because NCCL and gloo copy no FP8."""
        values, scales = quantize(rows)
        stored = tuple(nn.Parameter(one, requires_grad=False) for one in (values.view(torch.uint8), scales))
        stored[1].counted = False  # type: ignore[attr-defined]
        return stored  # type: ignore[return-value]

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """(out_features, in_features), rounded; for generation and for code that looks at its dtype and device."""
        return (self.values.view(FORMAT).float() * self.scales).to(self.dtype)

    def product(self, x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Quantized x (n, in_features) to (n, out_features), with the bias."""
        y = multiply(x, scales, self.values.view(FORMAT), self.scales, dtype)
        return y if self.bias is None else y.add_(self.bias.to(dtype))

    def input_gradient(self, gradient: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Quantized gradient (n, out_features) to (n, in_features)."""
        return multiply(gradient, scales, self.transposed.view(FORMAT), self.transposed_scales, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return project(x, [self])[0]


class _Project(torch.autograd.Function):
    """Several linear layers of one input, each with its adapter: y_i = x W_i^T + s_i (x A_i^T) B_i^T.

    One kernel quantizes x for all of them, and the A_i are multiplied together. The adapter's part is added by the
    matrix product itself, without a pass over y.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bases: list[Linear], scalings: list[float], *factors: Any) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        quantized, scales = quantize(rows)
        a, b = factors[::2], factors[1::2]
        parts = _split([0 if one is None else one.shape[0] for one in a])
        stacked = _stacked(a)
        inner = None if stacked is None else rows @ stacked.t()
        outputs = []
        for base, own_b, part, scaling in zip(bases, b, parts, scalings, strict=True):
            y = base.product(quantized, scales, x.dtype)
            if own_b is not None and inner is not None:
                y.addmm_(inner[:, part], own_b.t(), alpha=scaling)
            outputs.append(y.view(*x.shape[:-1], base.out_features))
        ctx.bases, ctx.scalings, ctx.parts = bases, scalings, parts
        ctx.save_for_backward(x, inner, *factors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, inner, *factors = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        a, b = factors[::2], factors[1::2]
        wants_x = ctx.needs_input_grad[0]
        dx, inner_gradients, db = None, [], []
        for base, own_b, part, scaling, given in zip(ctx.bases, b, ctx.parts, ctx.scalings, gradients, strict=True):
            gradient = given.reshape(-1, base.out_features)
            if wants_x:
                own = base.input_gradient(*quantize(gradient), x.dtype)
                dx = own if dx is None else dx.add_(own)
            if own_b is None:
                db.append(None)
                continue
            inner_gradients.append(gradient @ (own_b * scaling))
            db.append((gradient.t() @ inner[:, part]).mul_(scaling))
        da: list[torch.Tensor | None] = [None] * len(a)
        if inner_gradients:
            inner_gradient = torch.cat(inner_gradients, dim=1)
            stacked_gradient = inner_gradient.t() @ rows
            da = [None if one is None else stacked_gradient[part] for one, part in zip(a, ctx.parts, strict=True)]
            if dx is not None:
                dx.addmm_(inner_gradient, _stacked(a))
        pairs = (one for pair in zip(da, db, strict=True) for one in pair)
        return None if dx is None else dx.view_as(x), None, None, *pairs


def _split(ranks: Sequence[int]) -> list[slice]:
    """The columns of each adapter's part in the product with the stacked A."""
    ends = [sum(ranks[: index + 1]) for index in range(len(ranks))]
    return [slice(end - rank, end) for end, rank in zip(ends, ranks, strict=True)]


def _stacked(a: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [one for one in a if one is not None]
    return None if not present else present[0] if len(present) == 1 else torch.cat(present)


def project(x: torch.Tensor, layers: Sequence[nn.Module]) -> tuple[torch.Tensor, ...]:
    """The outputs of several layers for the same input x (..., k): `Linear` itself, or PEFT's LoRA layers on it."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    bases, scalings, factors = [], [], []
    for layer in layers:
        name = None if isinstance(layer, Linear) else active_adapter(layer)
        bases.append(layer if isinstance(layer, Linear) else layer.base_layer)
        scalings.append(1.0 if name is None else layer.scaling[name])  # type: ignore[index]
        pair = (None, None) if name is None else (layer.lora_A[name].weight, layer.lora_B[name].weight)  # type: ignore[index]
        factors += [None if one is None else one.to(x.dtype) for one in pair]
    return _Project.apply(x, bases, scalings, *factors)  # type: ignore[no-any-return]


def fusible(layer: Any) -> bool:
    """Whether `project` computes what this layer would: an FP8 layer, plain or with one adapter of plain LoRA."""
    if isinstance(layer, Linear):
        return True
    if not isinstance(getattr(layer, "base_layer", None), Linear) or layer.disable_adapters or layer.merged:
        return False
    name = active_adapter(layer)
    if name is None:
        return False
    dropout = layer.lora_dropout[name]
    drops = layer.training and not isinstance(dropout, nn.Identity)
    return not (drops or name in getattr(layer, "lora_variant", {}) or getattr(layer, "lora_bias", {}).get(name))


def active_adapter(layer: Any) -> str | None:
    """The one active adapter of a LoRA layer; None if there is none or more than one."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    return active[0] if len(active) == 1 else None


# --- a model's layers -------------------------------------------------------------------------------------------------


def convert(model: nn.Module) -> int:
    """Put the frozen linear layers of the model, but not its output head, into FP8, in place. Returns their number.

    Call it once the adapter is attached: its layers are then computed together with their adapters.

    Raises:
        UserError: no layer can be converted.
    """
    from peft.tuners.lora import LoraLayer

    head = model.get_output_embeddings()  # type: ignore[operator]
    found = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear and child is not head and _frozen(child) and not _belongs_to_adapter(module)
    ]
    for module, name, child in found:
        setattr(module, name, Linear(child).train(child.training))
    if not found:
        raise UserError(
            "model.load_in_fp8 is set, but the model has no frozen linear layer whose sizes are multiples of "
            f"{MULTIPLE}. Set it to false."
        )
    for module in list(model.modules()):
        if isinstance(module, LoraLayer) and isinstance(getattr(module, "base_layer", None), Linear):
            module.forward = types.MethodType(_lora_forward, module)  # type: ignore[method-assign,union-attr]
        _fuse(module)
    return len(found)


def _frozen(layer: nn.Linear) -> bool:
    sizes = layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
    return sizes and not any(parameter.requires_grad for parameter in layer.parameters())


def _belongs_to_adapter(module: nn.Module) -> bool:
    """Whether the module holds an adapter's own layers, or copies of a layer that is trained in full."""
    return isinstance(module, nn.ModuleDict)


def _lora_forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args or kwargs or not fusible(layer):
        return type(layer).forward(layer, x, *args, **kwargs)
    return project(x, [layer])[0]


def _fuse(module: Any) -> None:
    """Compute layers of one input together, in place of Unsloth's functions for 16-bit weights or of separate calls."""
    mine = {name: child for name, child in module.named_children() if isinstance(_base(child), Linear)}
    if {"gate_proj", "up_proj", "down_proj"} <= set(mine):
        module.__dict__.pop("forward", None)  # Unsloth's, of 16-bit weights
        if _is_silu(getattr(module, "act_fn", None)):
            module.forward = types.MethodType(_mlp, module)
    if "apply_qkv" in module.__dict__ and {"q_proj", "k_proj", "v_proj"} <= set(mine):
        module.apply_qkv = _query_key_value
    if "apply_o" in module.__dict__ and "o_proj" in mine:
        module.apply_o = _attention_output


def _base(layer: Any) -> Any:
    return getattr(layer, "base_layer", layer)


def _is_silu(function: Any) -> bool:
    return isinstance(function, nn.SiLU) or type(function).__name__ == "SiLUActivation"


def _together(x: torch.Tensor, layers: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    if all(fusible(layer) for layer in layers):
        return project(x, layers)
    return tuple(layer(x) for layer in layers)


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = _together(x, (module.gate_proj, module.up_proj))
    return module.down_proj(silu_and_multiply(gate, up))


def _query_key_value(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _together(x, (module.q_proj, module.k_proj, module.v_proj))


def _attention_output(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.o_proj(x)


def silu_and_multiply(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, in one kernel each way on a GPU."""
    if not gate.is_cuda:
        return nn.functional.silu(gate) * up
    from finetune.engine import fp8_kernels

    return fp8_kernels.SiluAndMultiply.apply(gate, up)  # type: ignore[no-any-return]
