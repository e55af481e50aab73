"""MLPs in slices of the sequence: of a long row, the intermediates of one tile exist at a time.

The intermediates of an MLP are several times as wide as the hidden states, and an MLP computes each token by itself.
So a row is cut into tiles. The backward pass computes each tile again, and adds up the gradients of the weights in
float32 before it returns them: each weight gets one gradient, which DDP and FSDP2 reduce once.

Whatever computes an MLP (PEFT's layers, `fused_lora`, Liger, Unsloth) computes the tiles. A block of routed experts is
left as it is, because which tokens an expert gets depends on all of them; its shared experts and the dense layers of
the model are tiled.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from finetune.engine.model import experts
from finetune.engine.sharding import shard
from finetune.errors import UserError
from finetune.runtime.types import Model

# The names of MLPs in transformers' layers, and of what each token passes beside the routed experts.
NAMES = ("mlp", "feed_forward", "ffn", "shared_expert", "shared_experts", "shared_mlp")
LEAST = 2048  # tokens: enough to keep a GPU's matrix products at full speed
INTERMEDIATES = 6  # tensors [tokens, intermediate size] that the backward pass of a gated MLP holds at once

Forward = Callable[..., torch.Tensor]


def mlps(model: Model) -> Iterator[nn.Module]:
    """The MLPs that can be tiled: of hidden states alone (BLOOM's and MPT's add a residual themselves)."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in NAMES and next(experts.stacks(module), None) is None and _inputs(module) == 1:
            yield module


def _inputs(module: nn.Module) -> int:
    """How many inputs the forward method of a module needs; 1 if it takes any number."""
    taken = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return max(1, sum(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in taken))


def set_tiled(model: Model, on: bool) -> None:
    """Compute the model's MLPs in tiles from now on, or whole.

    Raises:
        UserError: it has none that can be tiled.
    """
    found = list(mlps(model))
    if on and not found:
        kind = type(shard.base_model(model)).__name__
        raise UserError(
            f"model.tiled_mlp is set, and {kind} has no MLP that can be computed in slices (one input, "
            f"and named {', '.join(NAMES)}). Set it to false."
        )
    for module in found:
        forward = vars(module).get("forward", None)
        if on and not isinstance(forward, Tiled):
            module.forward = Tiled(module, forward)  # type: ignore[method-assign,assignment]
        elif not on and isinstance(forward, Tiled):
            del module.forward
            if forward.own is not None:
                module.forward = forward.own


def tile_length(tokens: int, hidden: int, intermediate: int) -> int:
    """Tokens of a tile: its intermediates take about as much memory as the hidden states of all `tokens`."""
    return max(LEAST, tokens * hidden // (INTERMEDIATES * intermediate))


class Tiled:
    """The forward method of an MLP, in tiles.

    Args:
        own: the forward method that was set on this module; None if it is that of its class.
    """

    def __init__(self, module: nn.Module, own: Forward | None) -> None:
        self.module, self.own = module, own
        widths = (getattr(one, "out_features", 0) for one in module.modules())
        self._intermediate = max((width for width in widths if isinstance(width, int)), default=0)

    def whole(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The MLP of all of x at once."""
        forward = self.own or types.MethodType(type(self.module).forward, self.module)
        return forward(x, *args, **kwargs)

    @torch.compiler.disable
    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        tokens, hidden = x.numel() // x.shape[-1], x.shape[-1]
        length = tile_length(tokens, hidden, max(self._intermediate, hidden))
        if args or kwargs or tokens <= length:
            return self.whole(x, *args, **kwargs)
        if not torch.is_grad_enabled():
            return _forward(self.whole, x, length)
        # First, and by itself: the recomputation of a layer ends with the last tensor that the layer saves. If that is
        # this one, the layer's recomputation does not compute the MLP, whose output nothing saves.
        keeper = _Keep.apply(torch.empty(0, requires_grad=True), x)
        return _Tiles.apply(self, length, [keeper], x, *_trained(self.module))


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _forward(whole: Forward, x: torch.Tensor, length: int) -> torch.Tensor:
    """The outputs of all tiles, [..., hidden size], without a graph. No view: a layer may add to it in place (Falcon,
    Llama 4), which autograd does not allow for a view that a function returns."""
    output: torch.Tensor | None = None
    rows = x.reshape(1, -1, x.shape[-1])
    for start in range(0, rows.shape[1], length):
        tile = whole(rows[:, start : start + length])
        if output is None:
            output = tile.new_empty((*x.shape[:-1], tile.shape[-1]))
        output.view(1, -1, tile.shape[-1])[:, start : start + length] = tile
    assert output is not None
    return output


class _Keep(torch.autograd.Function):
    """Saves x for the backward pass of another function."""

    @staticmethod
    def forward(ctx: Any, placeholder: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return placeholder.view_as(placeholder)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("nothing is computed from the placeholder")


class _Tiles(torch.autograd.Function):
    """An MLP in tiles of `length` tokens. `kept` is a list of what `_Keep` returned for x: as long as that exists, so
    does what it has saved. `parameters` are those that train."""

    @staticmethod
    def forward(ctx: Any, tiled: Tiled, length: int, kept: Any, x: torch.Tensor, *parameters: nn.Parameter) -> Any:
        kind = x.device.type
        ctx.tiled, ctx.length, ctx.kept = tiled, length, kept
        ctx.autocast = dict(enabled=torch.is_autocast_enabled(kind), dtype=torch.get_autocast_dtype(kind))
        ctx.random = torch.get_rng_state(), *checkpoint.get_device_states(x)
        return _forward(tiled.whole, x, length)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        kept = ctx.kept.pop()
        (x,) = kept.grad_fn.saved_tensors
        del kept
        rows, given = (one.reshape(1, -1, one.shape[-1]) for one in (x, gradients[0]))
        wants_x = ctx.needs_input_grad[3]
        dx = torch.empty_like(rows) if wants_x else None
        parameters = _trained(ctx.tiled.module)  # of a sharded model those that are gathered now
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        host, devices, states = ctx.random
        kind = x.device.type
        with (
            torch.random.fork_rng(devices, device_type=kind),
            torch.autocast(kind, **ctx.autocast),
            torch.enable_grad(),
        ):
            torch.set_rng_state(host)  # the dropout masks of the forward pass, tile by tile
            checkpoint.set_device_states(devices, states, device_type=kind)
            for start in range(0, rows.shape[1], ctx.length):
                tile = rows[:, start : start + ctx.length].detach().requires_grad_(wants_x)
                output = ctx.tiled.whole(tile)
                inputs = [tile, *parameters] if wants_x else parameters
                found = list(
                    torch.autograd.grad(output, inputs, given[:, start : start + ctx.length], allow_unused=True)
                )
                del output
                if dx is not None:
                    dx[:, start : start + ctx.length] = found.pop(0)
                _add(sums, found)
                del found
        own = [None if one is None else one.to(p.dtype) for one, p in zip(sums, parameters, strict=True)]
        return None, None, None, None if dx is None else dx.view_as(x), *own


def _add(sums: list[torch.Tensor | None], found: Sequence[torch.Tensor | None]) -> None:
    """Add the gradients of a tile, in float32: 16 bits would round after each tile."""
    for place, one in enumerate(found):
        if one is not None:
            total = sums[place]
            sums[place] = one.float() if total is None else total.add_(one)
