"""Which activations a layer keeps for the backward pass, where, and which are computed again instead.

    false       all are kept
    selective   a layer's input and the output of its attention are kept; the rest is computed again
    true        a layer's input is kept
    offload     a layer's input is kept, in pinned host memory
    unsloth     Unsloth's own form of offload, on its backend

Each kind trains the same model: what is computed again is what was computed before, with the same dropout masks.
`apply` is the one place that turns a kind on or off, at any time between two steps.

Import it after `bootstrap.start`, like everything that uses transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch.utils import checkpoint

from finetune.config import Config
from finetune.config.rules import AUTO, LOADED_AS, OFFLOAD, SELECTIVE, checkpointing_kinds
from finetune.engine.sharding import shard
from finetune.engine.training import tiled_mlp
from finetune.engine.training.host_activations import HostActivations
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack
from finetune.runtime.machine import flash
from finetune.runtime.types import Model

# The values of training.gradient_checkpointing; `auto` becomes one of them.
KINDS = ("unsloth", "offload", "selective", True, False)


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """What a run computes again in the backward pass.

    kind:       one of KINDS
    tiled_mlp:  whether each MLP is computed in slices of the sequence
    options:    arguments of torch.utils.checkpoint, and transformers' `every_n_layers`
    """

    kind: str | bool
    tiled_mlp: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def summary(self, stack: Stack) -> str | None:
        """What the start of a run says about it; None if there is nothing to say."""
        if self.kind == AUTO:
            return "Activations: how they are kept is measured before the first step"
        kind, tiled = resolve(self.kind, stack.backend), self.tiled_mlp
        if stack.device == "cpu":
            named = [f"gradient_checkpointing: {kind}"] if kind in (OFFLOAD, SELECTIVE) else []
            named += ["tiled_mlp"] if tiled else []
            return f"{' and '.join(named)}: on a CPU this changes nothing but the code path" if named else None
        return f"Activations: {_KEPT[kind]}{'; MLPs in tiles' if tiled else ''}"


_KEPT = {
    False: "all are kept",
    SELECTIVE: "layers' inputs and attention's outputs are kept, the rest is computed again",
    True: "layers' inputs are kept, the rest is computed again",
    OFFLOAD: "layers' inputs are kept in CPU memory, the rest is computed again",
    "unsloth": "layers' inputs are kept in CPU memory, by Unsloth; the rest is computed again",
}
EVERYTHING_KEPT = Recomputation(kind=False)


def configured(config: Config) -> Recomputation:
    """What a configuration asks for."""
    return Recomputation(
        kind=config.training.gradient_checkpointing,
        tiled_mlp=config.model.tiled_mlp,
        options=config.training.extra.get("gradient_checkpointing_kwargs") or {},
    )


def resolve(kind: str | bool, backend: str) -> str | bool:
    """The kind that a run on this backend uses: "unsloth", the default, is true on the other one, and so is `auto`
    until it is decided.

    Raises:
        UserError: the backend does not have it.
    """
    kind = LOADED_AS if kind == AUTO else kind
    if kind == "unsloth" and backend != "unsloth":
        return True
    if kind not in (known := checkpointing_kinds(backend)):
        raise UserError(
            f"training.gradient_checkpointing is {kind}, which the {backend} backend does not have. Set it to "
            f"{', '.join(str(one).lower() for one in known)}, or set model.backend: transformers."
        )
    return kind


def apply(model: Model, recomputation: Recomputation, stack: Stack) -> None:
    """Compute these activations again in the backward pass, from the next forward pass on.

    Args:
        model: with its adapter, sharded or not; not DDP's wrapper around it.

    Raises:
        UserError: the backend does not have this kind, or the model has no layers that can be recomputed.
    """
    kind = resolve(recomputation.kind, stack.backend)
    tiled_mlp.set_tiled(model, recomputation.tiled_mlp)
    flash.pause(kind == SELECTIVE)
    options = {"use_reentrant": False} | dict(recomputation.options)  # the reentrant kind fails under DDP
    every = options.pop("every_n_layers", 1)
    if stack.backend == "unsloth":
        _set_unsloth(model, kind, options, stack.device == "cuda")
        return
    base = shard.base_model(model)
    if kind and not base.supports_gradient_checkpointing:
        raise UserError(
            f"{type(base).__name__} cannot recompute its activations. Set training.gradient_checkpointing: false."
        )
    if kind:
        base._set_gradient_checkpointing(True, _function(kind, options), every)
    elif any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
        base._set_gradient_checkpointing(False)
    # Reentrant checkpointing yields no gradients for a layer whose input requires none.
    wanted, owner = bool(kind) and hasattr(model, "peft_config"), cast(Any, model)
    if wanted != getattr(model, "inputs_require_gradients", False):
        (owner.enable_input_require_grads if wanted else owner.disable_input_require_grads)()
        owner.inputs_require_gradients = wanted


def _function(kind: str | bool, options: dict[str, Any]) -> Callable[..., Any]:
    """What a layer calls with its forward method and its inputs."""
    if kind == SELECTIVE:
        keep_attention = functools.partial(checkpoint.create_selective_checkpoint_contexts, _keep_attention)
        return functools.partial(checkpoint.checkpoint, context_fn=keep_attention, **options)
    if kind == OFFLOAD:
        return functools.partial(HostActivations(), **options)
    return functools.partial(checkpoint.checkpoint, **options)


# Operators that compute attention, by the start of their names.
_ATTENTION = ("aten::_scaled_dot_product_", "torch_attn::_varlen_attn")


def _keep_attention(context: Any, operator: Any, *inputs: Any, **options: Any) -> checkpoint.CheckpointPolicy:
    """Keep what an operator of attention returns: its output and the logarithms of its sums. One with dropout is
    computed again: skipped, it would not draw its masks, and those of the layer's other dropouts would be others."""
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, inputs, strict=False)) | options
    kept = operator.name().startswith(_ATTENTION) and not given.get("dropout_p")
    return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def _set_unsloth(model: Any, kind: str | bool, options: dict[str, Any], on_gpu: bool) -> None:
    """The same with Unsloth's functions. A model is loaded with the kind of its run; on a GPU, "unsloth" replaces
    torch's function for the whole process."""
    changed = getattr(model, "recomputes", kind) != kind
    model.recomputes = kind
    if changed and on_gpu:
        from unsloth.models._utils import apply_unsloth_gradient_checkpointing

        dtype = model.get_input_embeddings().weight.dtype
        kind = apply_unsloth_gradient_checkpointing(kind, model.max_seq_length, dtype)
    if changed or not hasattr(model, "_unsloth_gradient_checkpointing"):
        model._unsloth_gradient_checkpointing = kind  # which Unsloth restores when training starts
    if kind:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    elif changed:
        model.gradient_checkpointing_disable()
