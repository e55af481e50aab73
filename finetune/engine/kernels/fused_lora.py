"""Fused LoRA: one product for all adapters that share an input (q, k and v; gate and up).

    y_i = x W_i^T + s_i (x A_i^T) B_i^T        for the layers i of one input x: q, k, v; or gate and up

The A_i are stacked, so that all x A_i^T are one product, and so are all gradients of A_i.

Each y_i is rounded once. In 16 bits an adapter's part is often smaller than half of the last place of x W^T: rounded
before the sum, or added to a rounded product, it would be lost. cuBLAS rounds its product even before it adds a matrix
to it. So one product has [x, x A^T] and [W, s B], whose accumulator holds both (`frozen`). An FP8 product, whose scales
do not suit B, stays in float32 until the part is added. Inside an MLP, whose activations are its widest tensors, the
kernels of silu(gate) * up add the adapters' parts in float32, and multiply what they compute by the adapters' small
factors while they have it. An MLP keeps gate and up without the adapters' parts for the backward pass.

`install` puts this in place of the forward methods of PEFT's layers and of Unsloth's functions for them. Whatever it
does not compute (dropout, DoRA, several adapters, merged weights) goes through PEFT as before, and is rounded twice.

Unsloth compiles the decoder layers of many families as a whole. torch.compile cannot follow the columns beside a weight
and would break such a layer in pieces at each adapter, so there a LoRA layer is an operator that it does not look into.
"""

from __future__ import annotations

import copy
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from finetune.engine.kernels import fp8, frozen
from finetune.engine.kernels.low_rank import LowRankTerm, aligned
from finetune.runtime.types import Model

Tensors = Sequence[torch.Tensor | None]
MLP = ("gate_proj", "up_proj", "down_proj")


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
        ends = list(itertools.accumulate(self.ranks))
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

    def products(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x (n, k) times each W (n, out_i), without any adapter."""
        return self.outputs(x, None, None, [None] * len(self.bases))

    def terms(self, inner: torch.Tensor | None, b: Tensors) -> list[LowRankTerm | None]:
        """What the adapter of each layer adds to its product; None without one."""
        return [
            None if own_b is None or inner is None else LowRankTerm(inner[:, part], own_b.t(), scaling)
            for own_b, part, scaling in zip(b, self.parts, self.scalings, strict=True)
        ]

    def forward(
        self, x: torch.Tensor, a: torch.Tensor | None, b: Tensors
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Outputs (n, out_i) of x (n, k), and x times `a` (n, sum of ranks); None without any adapter."""
        if a is None:
            return self.products(x), None
        if not self.is_wide:
            inner = x @ a.t()
            return self.outputs(x, None, inner, b), inner
        wide, inner = widened_rows(x, a)
        return self.outputs(x, wide, inner, b), inner

    @property
    def is_wide(self) -> bool:
        """Whether an adapter's part comes from the product of [x, inner], as of all weights but those in FP8."""
        return any(rank and not isinstance(base, fp8.Linear) for base, rank in zip(self.bases, self.ranks, strict=True))

    def outputs(
        self, x: torch.Tensor, wide: torch.Tensor | None, inner: torch.Tensor | None, b: Tensors
    ) -> list[torch.Tensor]:
        """Outputs (n, out_i) of x (n, k), given x times `a`; if `is_wide`, both side by side (n, k + sum of ranks)."""
        form = fp8.quantize(x) if any(isinstance(base, fp8.Linear) for base in self.bases) else None
        outputs = []
        for base, part, term in zip(self.bases, self.parts, self.terms(inner, b), strict=True):
            if isinstance(base, fp8.Linear) and form is not None:
                y = base.product(*form, x.dtype if term is None else torch.float32)
                outputs.append(y if term is None else add_term(y, term, x.dtype))
                continue
            bias = None if base.bias is None else base.bias.to(x.dtype)
            if term is None or wide is None:
                outputs.append(functional.linear(x, frozen.weight(base, x.dtype), bias))
                continue
            both = frozen.widened(base, sum(self.ranks), x.dtype)
            write_columns(base, both, part, term)
            outputs.append(functional.linear(wide, both, bias))
        return outputs

    def backward(
        self,
        gradients: Sequence[torch.Tensor],
        x: torch.Tensor,
        inner: torch.Tensor | None,
        a: torch.Tensor | None,
        b: Tensors,
        *,
        wants_x: bool,
        db: Tensors | None = None,
    ) -> tuple[torch.Tensor | None, Tensors, Tensors]:
        """Gradients of x, of each A and of each B; `db` passes in those of B that are already computed."""
        dinner = [
            given @ _scale(own_b, scaling)
            for own_b, scaling, given in zip(b, self.scalings, gradients, strict=True)
            if own_b is not None
        ]
        stacked_dinner = None if a is None else dinner[0] if len(dinner) == 1 else torch.cat(dinner, dim=1)
        dx: torch.Tensor | None = None
        if wants_x:
            in_fp8 = any(isinstance(base, fp8.Linear) for base in self.bases)
            if a is not None and stacked_dinner is not None and not in_fp8:
                dx = stacked_dinner @ a  # first: the large products add to it without a pass of their own
            for base, given in zip(self.bases, gradients, strict=True):
                dx = _add_input_gradient(dx, base, given)
            if a is not None and stacked_dinner is not None and in_fp8 and dx is not None:
                dx = add_term(dx, LowRankTerm(stacked_dinner, a), dx.dtype)
        if db is None:
            db = [
                None if own_b is None or inner is None else _scale(given.t() @ inner[:, part], scaling)
                for own_b, part, scaling, given in zip(b, self.parts, self.scalings, gradients, strict=True)
            ]
        if stacked_dinner is None:
            return dx, [None] * len(b), db
        stacked_da = stacked_dinner.t() @ x
        return dx, [stacked_da[part] if rank else None for part, rank in zip(self.parts, self.ranks, strict=True)], db


def _scale(x: torch.Tensor, scaling: float) -> torch.Tensor:
    return x if scaling == 1.0 else x * scaling


def _add_input_gradient(dx: torch.Tensor | None, base: nn.Linear, gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(base, fp8.Linear):
        own = base.input_gradient(*fp8.quantize(gradient), gradient.dtype)
        return own if dx is None else dx.add_(own)
    weight = frozen.weight(base, gradient.dtype)
    return gradient @ weight if dx is None else dx.addmm_(gradient, weight)


class _Project(torch.autograd.Function):
    """The outputs of a group for x (..., k). `factors` are A and B of each layer in turn, None without an adapter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, *factors: Any) -> Any:
        a, b = group.factors(factors, x.dtype)
        outputs, inner = group.forward(_rows(x), a, b)
        ctx.group, ctx.dtype = group, _dtype(factors)
        ctx.save_for_backward(x, inner, a, *b)
        return tuple(_in_shape_of(x, y) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, inner, a, *b = ctx.saved_tensors
        given = [_rows(one) for one in gradients]
        dx, da, db = ctx.group.backward(given, _rows(x), inner, a, b, wants_x=ctx.needs_input_grad[0])
        return None if dx is None else dx.view_as(x), None, *_gradients(da, db, ctx.dtype)


class _Mlp(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)). Keeps gate(x) and up(x), without their adapters' part if the kernels add it, and
    computes their product again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: Group, last: Group, *factors: Any) -> torch.Tensor:
        a, b = first.factors(factors[:4], x.dtype)
        last_a, last_b = last.factors(factors[4:], x.dtype)
        ctx.whole = not fits_in_kernels(first.ranks, x)
        if ctx.whole:
            (gate, up), inner = first.forward(_rows(x), a, b)
            gate_term = up_term = None
        else:
            gate, up = first.products(_rows(x))
            inner = None if a is None else _rows(x) @ a.t()
            gate_term, up_term = first.terms(inner, b)
        h, wide, last_inner = silu_and_multiply(gate, up, gate_term, up_term, last_a, widens=last.is_wide)
        (y,) = last.outputs(h, wide, last_inner, last_b)
        ctx.groups, ctx.dtype = (first, last), _dtype(factors)
        ctx.save_for_backward(x, gate, up, inner, last_inner, a, last_a, *b, *last_b)
        return _in_shape_of(x, y)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, gate, up, inner, last_inner, a, last_a, *b, last_b = ctx.saved_tensors
        (first, last), scaling = ctx.groups, ctx.groups[1].scalings[0]
        dy = _rows(gradients[0])
        dh = _add_input_gradient(None, last.bases[0], dy)
        dinner = None if last_b is None else dy @ _scale(last_b, scaling)
        dh_term = None if dinner is None else LowRankTerm(dinner, last_a)
        gate_term, up_term = (None, None) if ctx.whole else first.terms(inner, b)
        dgate, dup, (*db, last_da) = silu_and_multiply_backward(gate, up, dh, gate_term, up_term, dh_term)
        db = None if ctx.whole else db
        last_db = None if dinner is None else _scale(dy.t() @ last_inner, scaling)
        del dh
        dx, da, db = first.backward((dgate, dup), _rows(x), inner, a, b, wants_x=ctx.needs_input_grad[0], db=db)
        grads = _gradients([*da, last_da], [*db, last_db], ctx.dtype)
        return None if dx is None else dx.view_as(x), None, None, *grads


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _in_shape_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows (n, out) of an x (..., k) as (..., out). Not a view: autograd refuses to change a view from inside a
    function in place, as Llama 4 changes the output of its shared expert."""
    return torch.ops.aten._unsafe_view(rows, [*x.shape[:-1], rows.shape[-1]])


def _dtype(factors: Tensors) -> torch.dtype | None:
    return next((one.dtype for one in factors if one is not None), None)


def _gradients(a: Tensors, b: Tensors, dtype: torch.dtype | None) -> list[torch.Tensor | None]:
    """The gradients of A and B of each layer in turn, in the parameters' `dtype`."""
    given = [one for pair in zip(a, b, strict=True) for one in pair]
    others = [one for one in given if one is not None and one.dtype != dtype]
    if not others or dtype is None:
        return given
    copies = [torch.empty_like(one, dtype=dtype) for one in others]
    torch._foreach_copy_(copies, others)
    rest = iter(copies)
    return [one if one is None or one.dtype == dtype else next(rest) for one in given]


def fits_in_kernels(ranks: Sequence[int], x: torch.Tensor) -> bool:
    """Whether the kernels of silu(gate) * up can add adapters of these ranks."""
    if not x.is_cuda:
        return True
    from finetune.engine.kernels import triton_kernels

    return max(ranks) <= triton_kernels.largest_rank(x)


def widened_rows(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[x, inner] (n, k + rank) and inner = x a^T (n, rank) for x (n, k) and a (rank, k). In one kernel on a GPU."""
    if x.is_cuda:
        from finetune.engine.kernels import triton_kernels

        return triton_kernels.widened_rows(x, a)
    wide = aligned(x.shape[0], x.shape[1] + a.shape[0], x, x.dtype)
    inner = x @ a.t()
    wide[:, : x.shape[1]], wide[:, x.shape[1] :] = x, inner
    return wide, inner


def add_term(y: torch.Tensor, term: LowRankTerm | None, dtype: torch.dtype) -> torch.Tensor:
    """y (n, m) with the term added in float32 or more, as `dtype`."""
    if term is None:
        return y.to(dtype)
    if y.is_cuda:
        from finetune.engine.kernels import triton_kernels

        return triton_kernels.add_term(y, term, dtype)
    return term.added_to(y, dtype)


def write_columns(base: Any, both: torch.Tensor, part: slice, term: LowRankTerm) -> None:
    """Write a layer's columns of s B beside its weight in `both` (out, k + sum of ranks), zeros outside its own part.
    In the weight's own room those zeros are still there unless its layer was last computed with others."""
    columns, own = both[:, base.in_features :], (part.start, part.stop, both.shape[1])
    if base.weight.untyped_storage().data_ptr() != both.untyped_storage().data_ptr():
        columns.zero_()
    elif getattr(base, "columns_in_room", None) != own:
        columns.zero_()
        base.columns_in_room = own
    columns[:, part] = _scale(term.right.t(), term.scaling)


def silu_and_multiply(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_term: LowRankTerm | None = None,
    up_term: LowRankTerm | None = None,
    down: torch.Tensor | None = None,
    *,
    widens: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """h = silu(gate) * up (n, m), with a term added to each before in float32; [h, inner] (n, m + rank) if it `widens`;
    and inner = h times `down` (rank, m), None without it. In one kernel on a GPU."""
    if gate.is_cuda:
        from finetune.engine.kernels import triton_kernels

        return triton_kernels.silu_and_multiply(gate, up, gate_term, up_term, down, widens=widens)
    precise = torch.promote_types(gate.dtype, torch.float32)
    h = functional.silu(add_term(gate, gate_term, precise)).to(gate.dtype) * add_term(up, up_term, precise)
    h = h.to(gate.dtype)
    if down is None:
        return h, None, None
    if not widens:
        return h, None, h @ down.t()
    return h, *widened_rows(h, down)


def silu_and_multiply_backward(
    gate: torch.Tensor,
    up: torch.Tensor,
    dh: torch.Tensor,
    gate_term: LowRankTerm | None = None,
    up_term: LowRankTerm | None = None,
    dh_term: LowRankTerm | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """Gradients of gate and up (n, m) from that of h, with a term added to each of the three before; in one kernel on a
    GPU. Also the products with the terms' left factors (n, rank): dgate^T left and dup^T left (m, rank), and
    left^T h (rank, m), times the term's scaling; None without the term. On a GPU these are in float32."""
    if gate.is_cuda:
        from finetune.engine.kernels import triton_kernels

        return triton_kernels.silu_and_multiply_backward(gate, up, dh, gate_term, up_term, dh_term)
    dtype, precise = gate.dtype, torch.promote_types(gate.dtype, torch.float32)
    gate, up, dh = (
        add_term(*pair, precise) for pair in zip((gate, up, dh), (gate_term, up_term, dh_term), strict=True)
    )
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    h, dgate, dup = silu.to(dtype) * up, dh * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * silu
    h, dgate, dup = h.to(dtype), dgate.to(dtype), dup.to(dtype)
    products = [
        None if gate_term is None else _scale(dgate.t() @ gate_term.left, gate_term.scaling),
        None if up_term is None else _scale(dup.t() @ up_term.left, up_term.scaling),
        None if dh_term is None else _scale(dh_term.left.t() @ h, dh_term.scaling),
    ]
    return dgate, dup, products


# --- PEFT's layers ----------------------------------------------------------------------------------------------------


def project(x: torch.Tensor, layers: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The outputs of frozen layers, plain or with an adapter, for the same input x (..., k)."""
    x = fp8.in_compute_dtype(x)
    group, factors = _group(layers)
    return _Project.apply(x, group, *factors)  # type: ignore[no-any-return]


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of an MLP with gate_proj, up_proj, down_proj and SiLU."""
    layers = (module.gate_proj, module.up_proj, module.down_proj)
    if torch.compiler.is_compiling() or not all(map(is_supported, layers)):
        return module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
    x = fp8.in_compute_dtype(x)
    (first, factors), (last, more) = _group(layers[:2]), _group(layers[2:])
    return _Mlp.apply(x, first, last, *factors, *more)  # type: ignore[no-any-return]


def _query_key_value(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    layers = (module.q_proj, module.k_proj, module.v_proj)
    together = not torch.compiler.is_compiling() and all(map(is_supported, layers))
    return project(x, layers) if together else tuple(layer(x) for layer in layers)


def _attention_output(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.o_proj(x)


def _lora_forward(layer: Any, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    if args or kwargs or not is_supported(layer):
        return type(layer).forward(layer, x, *args, **kwargs)
    if not torch.compiler.is_compiling():
        return project(x, [layer])[0]
    name = active_adapter(layer)
    pair = layer.lora_A[name].weight, layer.lora_B[name].weight
    return _compiled(fp8.in_compute_dtype(x), *pair, layer.lora_number.value)[0]


_numbered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # LoRA layers
_numbers = itertools.count()


class _Number:
    """By which an operator finds its layer: int64 on the host. A number that is no tensor is a constant of the compiled
    code, which would then be compiled for each decoder layer."""

    def __init__(self, layer: Any) -> None:
        number = next(_numbers)
        self.value, self._layer = torch.tensor(number, device="cpu"), weakref.ref(layer)
        _numbered[number] = layer

    def __deepcopy__(self, memo: dict[int, Any]) -> _Number:
        return _Number(memo[id(self._layer())])  # the copy of the layer, which is being made


@torch.library.custom_op("finetune::lora", mutates_args=())
def _compiled(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, number: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`project` of one layer for torch.compile, and x times A, for the backward pass."""
    group, _ = _group([_numbered[int(number)]])
    (y,), inner = group.forward(_rows(x), *group.factors((a, b), x.dtype))
    assert inner is not None
    return _in_shape_of(x, y), inner


@_compiled.register_fake
def _(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(*x.shape[:-1], b.shape[0]), x.new_empty(_rows(x).shape[0], a.shape[0])


@torch.library.custom_op("finetune::lora_gradients", mutates_args=())
def _gradients_compiled(
    gradient: torch.Tensor, x: torch.Tensor, inner: torch.Tensor, a: torch.Tensor, b: torch.Tensor, number: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `_compiled`'s x, a and b."""
    group, _ = _group([_numbered[int(number)]])
    own = group.factors((a, b), x.dtype)
    dx, da, db = group.backward([_rows(gradient)], _rows(x), inner, *own, wants_x=True)
    da, db = _gradients(da, db, a.dtype)
    assert dx is not None and da is not None and db is not None
    return dx.view_as(x), da, db


@_gradients_compiled.register_fake
def _(
    gradient: torch.Tensor, x: torch.Tensor, inner: torch.Tensor, a: torch.Tensor, b: torch.Tensor, number: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), a.new_empty(a.shape), b.new_empty(b.shape)


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, a, b, number = inputs
    ctx.save_for_backward(x, output[1], a, b, number)


def _differentiate(ctx: Any, gradient: torch.Tensor, *_: object) -> tuple:
    return *_gradients_compiled(gradient, *ctx.saved_tensors), None


_compiled.register_autograd(_differentiate, setup_context=_keep)


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


def is_supported(layer: Any) -> bool:
    """Whether `project` computes what this layer would: a frozen one, plain or with one adapter of plain LoRA."""
    base = getattr(layer, "base_layer", layer)
    if type(base) not in (nn.Linear, fp8.Linear) and not frozen.bits(base):
        return False
    if any(one.requires_grad for one in base.parameters()):
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


def install(model: Model, *, roomy: bool = True) -> int:
    """Compute the model's LoRA layers as this module does, and its MLPs and projections of one input together. Returns
    the number of layers that it changed.

    Args:
        roomy: whether the frozen weights may be stored with room for the adapters' columns, as `frozen.make_room` does.
            FSDP2 shards no such weights.
    """
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [one for one in model.modules() if isinstance(one, LoraLayer) and is_supported(one)]
    for layer in layers:
        layer.forward = types.MethodType(_lora_forward, layer)
        layer.lora_number = _Number(layer)
    changed = set(map(id, layers))
    columns = {id(layer): sum(_group([layer])[0].ranks) for layer in layers}
    for module in model.modules():
        for together in _fuse_module(module, lambda child: id(child) in changed or isinstance(child, fp8.Linear)):
            columns |= dict.fromkeys(map(id, together), sum(_group(together)[0].ranks))
    if roomy:
        uses = Counter(id(one) for module in model.modules() for one in module._parameters.values())
        for layer in layers:
            base: Any = layer.base_layer
            if type(base) is nn.Linear and uses[id(base.weight)] == 1:  # an embedding's may be the head's too
                frozen.make_room(base, columns[id(layer)])
    return len(layers)


def _fuse_module(module: Any, ours: Callable[[Any], bool]) -> list[list[Any]]:
    """Set what Unsloth's or transformers' attention and MLP modules call. Returns the layers whose products have the
    columns of all their adapters."""
    mine = {name for name, child in module.named_children() if ours(child)}
    own = vars(module)
    if set(MLP) <= mine and is_plain_mlp(module):
        if "_unsloth_forward" not in own:  # a tiled MLP stays tiled
            module.forward = types.MethodType(_mlp, module)
    if "apply_o" in own and "o_proj" in mine:
        module.apply_o = _attention_output
    if "apply_qkv" in own and {"q_proj", "k_proj", "v_proj"} <= mine:
        module.apply_qkv = _query_key_value
        return [[module.q_proj, module.k_proj, module.v_proj]]
    return []


def is_plain_mlp(module: Any) -> bool:
    """Whether the class's forward method is down(silu(gate(x)) * up(x)): found by running it on stand-ins for the three
    layers, because some MLPs scale, clamp or normalize in between (Falcon-H1, DeepSeek-V4, BitNet)."""
    if not is_silu(getattr(module, "act_fn", None)) or not set(MLP) <= module._modules.keys():
        return False
    probe = copy.copy(module)
    probe._modules = module._modules | {name: _Line(factor) for name, factor in zip(MLP, (1.0, 2.0, 3.0), strict=True)}
    device = next(module.parameters()).device
    x = torch.linspace(-99, 99, 64, dtype=torch.float32, device="cpu" if device.type == "meta" else device)[None]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found = type(module).forward(probe, x)
    except (TypeError, RuntimeError, ValueError, AttributeError):  # of another shape, or with more arguments
        return False
    return isinstance(found, torch.Tensor) and torch.allclose(found, 6 * functional.silu(x) * x)


class _Line(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


def is_silu(function: object) -> bool:
    return isinstance(function, nn.SiLU) or type(function).__name__ == "SiLUActivation"
