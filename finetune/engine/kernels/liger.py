"""Liger's kernels in transformers' own layers: RMSNorm, rotary positions and the gate of an MLP.

transformers computes each of them with several kernels that read and write whole activations. Liger has one for each
direction. Unsloth's layers have their own. Liger's loss is not used: the trainer computes it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.config import Config
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack
from finetune.runtime.machine import hardware
from finetune.runtime.types import Model

if TYPE_CHECKING:
    import torch

NOT_INSTALLED = "liger-kernel is not installed: pip install 'finetune-multigpu[liger]'"
# Loss and gradients with Liger's kernels and without: tests/gpu. For Llama also whole runs, in full and with adapters:
# benchmarks/results/LOG.md.
VALIDATED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
LIGER = "Liger"
ROTARY = "apply_rotary_pos_emb"  # what transformers' modules call for rotary positions
_HEAD = {"cross_entropy": False, "fused_linear_cross_entropy": False}


@dataclass(frozen=True, kw_only=True)
class LayerKernels:
    """The kernels of the layers, as run.json has them: Liger, transformers or Unsloth."""

    kernels: str
    reason: str


def why_unavailable(device: str) -> str | None:
    """Why Liger's kernels cannot run here; None if they can."""
    if device != "cuda":
        return "there is no GPU"
    return NOT_INSTALLED if importlib.util.find_spec("liger_kernel") is None else None


def backend_kernels(stack: Stack) -> str:
    """Whose kernels the layers have without Liger's."""
    return "Unsloth" if stack.backend == "unsloth" else "transformers"


def why_excluded(stack: Stack) -> str | None:
    """Why no model can use Liger's kernels in this run; None if some can."""
    return "Unsloth's layers have kernels of their own" if stack.backend == "unsloth" else why_unavailable(stack.device)


def why_not(stack: Stack, kind: str, otherwise: str | None = None) -> str | None:
    """Why the layers of a type of model cannot use Liger's kernels; None if they can.

    Args:
        otherwise: another reason not to use them; if there is one, Liger is not imported.
    """
    return why_excluded(stack) or otherwise or why_unsupported(kind)


def check(config: Config, stack: Stack) -> None:
    """Check what does not depend on the model, before anything is loaded.

    Raises:
        UserError: model.layer_kernels is liger, and this run cannot use it.
    """
    if config.model.layer_kernels == "liger" and (refusal := why_excluded(stack)) is not None:
        raise _cannot_use(refusal)


def choose(config: Config, stack: Stack, model: Model) -> LayerKernels:
    """Which kernels the model's layers use; the same answer before and after it is sharded or has an adapter.

    Raises:
        UserError: model.layer_kernels is liger, and this run cannot use it.
    """
    wanted = config.model.layer_kernels
    if wanted == "torch":
        return LayerKernels(kernels=backend_kernels(stack), reason="set by model.layer_kernels")
    kind = model.config.model_type
    refusal = why_not(stack, kind, _why_not_validated(config, kind) if wanted == "auto" else None)
    if refusal is None:
        return LayerKernels(kernels=LIGER, reason="set by model.layer_kernels" if wanted == "liger" else "installed")
    if wanted == "liger":
        raise _cannot_use(refusal)
    return LayerKernels(kernels=backend_kernels(stack), reason=refusal)


def _cannot_use(reason: str) -> UserError:
    return UserError(
        f"model.layer_kernels is liger (training.use_liger_kernel: true sets it), which this run cannot use: {reason}. "
        "Remove the setting."
    )


def _why_not_validated(config: Config, kind: str) -> str | None:
    """Why nothing shows that Liger's kernels compute the same in this run; None if they were compared."""
    if config.training.extra.get("torch_compile"):
        return "torch.compile fuses the layers itself"
    if config.model.load_in_8bit or config.model.load_in_fp8:
        case = "with 8-bit weights"
    elif config.model.dtype == "float16" or config.model.dtype == "auto" and not hardware.has_bfloat16("cuda"):
        case = "in float16"
    elif config.model.trust_remote_code:
        case = "for models that may bring their own code"
    elif kind not in VALIDATED_TYPES:
        case = f"for {kind}"
    else:
        return None
    return f"Liger's kernels were not compared {case}; model.layer_kernels: liger uses them"


def why_unsupported(kind: str) -> str | None:
    """Why Liger has no kernels for a type of model; None if it has."""
    try:
        from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
            MODEL_TYPE_TO_APPLY_LIGER_FN,
        )
    except ImportError as error:
        return f"liger-kernel cannot be imported: {error}"
    return None if kind in MODEL_TYPE_TO_APPLY_LIGER_FN else f"Liger has none for {kind}"


def install(model: Model) -> None:
    """Let this model's layers use Liger's kernels. Other models of the process keep their classes.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
    """
    from transformers.integrations.liger import apply_liger_kernel

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    module = sys.modules[next(one for one in type(base).__mro__ if "forward" in vars(one)).__module__]
    before = dict(vars(module))
    gate = getattr(base.config.get_text_config(), "hidden_act", None)
    # Liger's MLP computes silu, whatever the model has.
    apply_liger_kernel(base, _HEAD if gate in ("silu", "swish") else _HEAD | {"swiglu": False, "geglu": False})
    for name, value in before.items():
        if isinstance(value, type) and vars(module)[name] is not value:
            setattr(module, name, value)
    if before.get(ROTARY) is not vars(module).get(ROTARY):
        setattr(module, ROTARY, _on_gpus(vars(module)[ROTARY], before[ROTARY]))


def _on_gpus(fused: Callable[..., object], plain: Callable[..., object]) -> Callable[..., object]:
    """`fused` for tensors on a GPU, and `plain` for others."""

    @functools.wraps(plain)
    def rotary(query: torch.Tensor, key: torch.Tensor, *given: object, **named: object) -> object:
        return (fused if query.is_cuda else plain)(query, key, *given, **named)

    return rotary
