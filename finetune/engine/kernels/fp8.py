"""Frozen weights in FP8 (`model.load_in_fp8`): their matrix products run on FP8 tensor cores, forward and backward.

A frozen linear layer y = x W^T is computed by torch._scaled_mm on e4m3 values, with one scale for each token of x and
one for each row of W ("rowwise"), and sums in float32. The gradient of x is a product with W too, over its other
dimension, so each weight is kept twice: W and its transpose, with scales for their own rows. That is the memory of
bfloat16. Weights are quantized once, after loading; x and the gradient in every step, by one kernel each.

The attention's values and outputs stay in 16 bits, and so do the first layer and the last two of a deep model: they
cause most of the loss that rounding costs and are a small part of the work. So do small layers on a GPU, which FP8
would make slower (docs/fp8.md).

Scales belong to single tokens, so the result does not depend on the batch, on packing or on the number of GPUs. The
adapter and its gradients stay exact: they see x and the gradient as they are (`fused_lora`).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from finetune.errors import UserError
from finetune.runtime.types import Model

FORMAT = torch.float8_e4m3fn
LARGEST = 448.0  # torch.finfo(FORMAT).max
SMALLEST = 1e-12  # of a row's largest value, so that the scale of a row of zeros is not 0
KEPT_IN_16_BITS = ("v_proj", "o_proj")  # in 16 bits, in every layer
FIRST, LAST = 1, 2  # layers that stay in 16 bits as a whole,
DEEP = 12  # in a model of at least so many
FASTER_FROM = 2**23  # weights of a layer: on an H200, smaller ones took 1.0 to 5 times as long in FP8 as in bfloat16
COST = "held-out loss +0.05 to +0.10% where it was measured (1.5 B parameters, docs/fp8.md)"
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
        from finetune.engine.kernels import triton_kernels

        return triton_kernels.quantize(x, FORMAT, LARGEST, SMALLEST)
    scales = x.float().abs().amax(-1, keepdim=True).clamp_min(SMALLEST) / LARGEST
    return (x.float() / scales).to(FORMAT), scales


def multiply(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x (n, k) times weight (m, k) transposed, both quantized by rows, as (n, m) of `dtype`."""
    # On a CPU it is made of products that autocast would round.
    with contextlib.nullcontext() if x.is_cuda else torch.autocast("cpu", enabled=False):
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
        stored, kept = (nn.Parameter(one, requires_grad=False) for one in (values.view(torch.uint8), scales))
        kept.counted = False  # type: ignore[attr-defined]
        return stored, kept

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _Product.apply(in_compute_dtype(x), self)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """A frozen layer by itself, for x (..., in_features)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        ctx.layer = layer
        y = layer.product(*quantize(x.reshape(-1, x.shape[-1])), x.dtype)
        return y.view(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (given,) = gradients
        dx = ctx.layer.input_gradient(*quantize(given.reshape(-1, given.shape[-1])), given.dtype)
        return dx.view(*given.shape[:-1], ctx.layer.in_features), None


def in_compute_dtype(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype that autocast would give a matrix product; x itself where it is off."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def convert(model: Model) -> int:
    """Put the frozen linear layers of the model into FP8, in place: not its output head, nor what `_is_kept`. Returns
    their number.

    Raises:
        UserError: no layer can be converted.
    """
    head = model.get_output_embeddings()
    depth = int(model.config.get_text_config().num_hidden_layers)
    found = [
        (module, name, child)
        for place, module in model.named_modules()
        if not isinstance(module, nn.ModuleDict)  # an adapter's own layers, or copies that are trained in full
        for name, child in module.named_children()
        if type(child) is nn.Linear and child is not head and _can_be_converted(child)
        if not _is_kept(f"{place}.{name}".split("."), depth)
    ]
    for module, name, child in found:
        setattr(module, name, Linear(child).train(child.training))
    if not found:
        raise UserError(
            "model.load_in_fp8 is set, but the model has no frozen linear layer that is faster in FP8: one between the "
            f"first and the last, other than {' and '.join(KEPT_IN_16_BITS)}, with sizes that are multiples of "
            f"{MULTIPLE} and at least {FASTER_FROM:,} weights. FP8 does not save memory. Set it to false."
        )
    return len(found)


def summary(model: Model) -> str:
    """How much of the model is in FP8, and what that costs."""
    frozen = [
        one
        for one in model.modules()
        if isinstance(one, nn.Linear) and not any(parameter.requires_grad for parameter in one.parameters())
    ]
    count = sum(isinstance(one, Linear) for one in frozen)
    return f"{count} of {len(frozen)} frozen linear layers, {COST}"


def _is_kept(words: list[str], depth: int) -> bool:
    """Whether a linear layer stays in 16 bits, by the words of its name and the model's number of layers."""
    layer = next((int(word) for word in words if word.isdigit()), None)
    at_an_end = layer is not None and depth >= DEEP and not FIRST <= layer < depth - LAST
    return at_an_end or any(word in KEPT_IN_16_BITS for word in words)


def _can_be_converted(layer: nn.Linear) -> bool:
    fits = layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
    fits = fits and not (layer.weight.is_cuda and layer.weight.numel() < FASTER_FROM)  # a CPU is for trying it out
    return fits and not any(parameter.requires_grad for parameter in layer.parameters())
