"""The precision of the trained weights, so that no update is lost to rounding (`training.master_weights`).

A bfloat16 weight has 8 significant bits: an update below 0.2 % of the weight rounds away, which is most updates at the
learning rates of full fine-tuning. So trained weights are float32 and compute in `model.dtype` (autocast; in shards
FSDP2's mixed precision), or stay in bfloat16 and are rounded stochastically: up or down with probabilities that keep
the expected value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from finetune.config import Config
from finetune.config.rules import STOCHASTIC_OPTIMIZERS
from finetune.engine import multimodal
from finetune.engine.optimizer import rounding, state_bytes
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack, errors_only
from finetune.runtime.machine import hardware
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject, Model

FLOAT32, STOCHASTIC, NONE = "float32", "stochastic", "none"
# Share of the smallest GPU that float32 weights may take with their gradients and optimizer state: the rest is for
# activations, which checkpointing keeps small.
SHARE = 0.85


@dataclass(frozen=True, kw_only=True)
class WeightPrecision:
    """How trained weights are kept: float32, stochastic or none (rounded to nearest in 16 bits)."""

    kind: str
    reason: str


def choose(config: Config, stack: Stack, dtype: torch.dtype) -> WeightPrecision:
    """The configured precision of the trained weights; `auto` from the model's size and the smallest GPU of the run,
    never from the number of GPUs. Every rank calls it.

    Args:
        dtype: that the model computes in.

    Raises:
        UserError: `auto` needs stochastic rounding, which the optimizer does not have.
    """
    asked = config.training.master_weights
    instead = "" if asked in ("auto", FLOAT32) else f", so training.master_weights: {asked} does not apply"
    if dtype == torch.float32:
        return WeightPrecision(kind=FLOAT32, reason=f"the model computes in float32{instead}")
    if dtype == torch.float16:
        return WeightPrecision(kind=FLOAT32, reason=f"float16 gradients need float32 weights{instead}")
    if asked != "auto":
        return WeightPrecision(kind=asked, reason="set by training.master_weights")
    if stack.device == "cpu":
        return WeightPrecision(kind=FLOAT32, reason="on a CPU")
    if not config.model.full_finetuning:
        return WeightPrecision(kind=FLOAT32, reason="an adapter is small")
    memory = min(one for one in distributed.gather_objects(hardware.probe().memory_gib) if one is not None)
    return choose_by_size(config, memory, count_parameters(config))


def choose_by_size(config: Config, memory: float, count: int | None) -> WeightPrecision:
    """What `auto` chooses for full fine-tuning of a 16-bit model.

    Args:
        memory: of the smallest GPU, in GiB.
        count: the model's parameters, if that is known.

    Raises:
        UserError: it is stochastic rounding, which the optimizer does not have.
    """
    if count is None:
        return WeightPrecision(kind=FLOAT32, reason="the model's size is not known before it is loaded")
    # Itself, its gradient, the optimizer's state, and a copy in 16 bits that autocast keeps until the backward pass.
    each = state_bytes.held_per_weight(4, state_bytes.state_bytes_per_weight(config.training.optim, 4)) + 2
    needed = count * each / 2**30
    sizes = f"weights, gradients and optimizer state take {needed:.1f} of {memory:.1f} GiB in float32"
    if needed <= SHARE * memory:
        return WeightPrecision(kind=FLOAT32, reason=sizes)
    if config.training.optim not in STOCHASTIC_OPTIMIZERS:
        raise UserError(
            f"training.optim is {config.training.optim}, which cannot round stochastically, and {sizes}: more than "
            f"{SHARE:.0%} of the smallest GPU. Set training.optim to one of {', '.join(STOCHASTIC_OPTIMIZERS)}, or "
            "training.master_weights to float32 (with training.strategy: shard, each GPU holds a part), or to none, "
            "which loses small updates."
        )
    return WeightPrecision(kind=STOCHASTIC, reason=f"{sizes}, more than {SHARE:.0%} of the smallest GPU")


def resolve_auto(config: Config, memory: float | None, count: int) -> Config:
    """The configuration with what `auto` becomes on GPUs of `memory` GiB, for a model of `count` parameters."""
    training, model = config.training, config.model
    if training.master_weights != "auto":
        return config
    kind: Any = FLOAT32
    if model.full_finetuning and memory is not None and model.dtype not in ("float32", "float16"):
        kind = choose_by_size(config, memory, count).kind
    return replace(config, training=replace(training, master_weights=kind))


def count_parameters(config: Config) -> int | None:
    """Number of the model's parameters, tied ones once, from its configuration; None if it cannot be built from that
    alone."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    model = config.model
    remote = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    try:
        with errors_only(), init_empty_weights():
            shape = AutoConfig.from_pretrained(str(model.model_name_or_path), **remote)
            empty = multimodal.auto_class(shape).from_config(shape, trust_remote_code=model.trust_remote_code)
            empty.tie_weights()
    except Exception:  # loading the model reports what is wrong with it
        return None
    return sum(one.numel() for one in empty.parameters())


def stored_dtype(config: Config, dtype: torch.dtype) -> torch.dtype:
    """The dtype that the weights of the model are loaded in.

    Args:
        dtype: that it computes in.
    """
    in_float32 = config.model.full_finetuning and config.training.master_weights == FLOAT32
    return torch.float32 if in_float32 else dtype


def widen(model: Model, kind: str, full: bool) -> None:
    """Turn trained 16-bit weights into float32, if that is how they are kept. Adapters are already; what else may be
    trained beside them (`modules_to_save`, biases) is not. The kernels of norms take weights of one
    dtype, so a norm of which only the bias is trained becomes float32 as a whole.

    Autocast computes matrix products in 16 bits and leaves embeddings and norms in float32, which would double the
    memory of nearly all activations. They get a hook that returns what they would return in a 16-bit model.

    Args:
        full: whether all weights are trained, and so float32 already.
    """
    if kind != FLOAT32:
        return
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        trained = [one for one in own if one.requires_grad]
        narrow = [one for one in trained if one.dtype in (torch.bfloat16, torch.float16)]
        is_norm = all(one.ndim == 1 for one in own)
        if narrow:
            model.widened_from = narrow[0].dtype  # type: ignore[attr-defined]
        for parameter in own if narrow and is_norm else narrow:
            parameter.data = parameter.data.float()
        if (narrow or (full and trained)) and not isinstance(module, torch.nn.Linear):
            module.register_forward_hook(_in_autocast_dtype)


def autocast(model: Model) -> contextlib.AbstractContextManager[object]:
    """For the forward passes of a model outside the trainer, such as in generation: autocast if `widen` has changed a
    part of it, which would not accept the activations of the rest."""
    dtype = getattr(model, "widened_from", None)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype)


def _in_autocast_dtype(module: torch.nn.Module, given: object, output: object) -> torch.Tensor | None:
    """Forward hook: a float32 output in the dtype of autocast, where that is on."""
    if not (torch.is_tensor(output) and output.dtype == torch.float32):
        return None
    kind = output.device.type
    return output.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


def saved_dtype(model: Model, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor in the files of a model in `dtype`: that, unless transformers keeps it in float32 (such as
    the correction of a router's scores) or it has no fractions."""
    in_float32 = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    keeps = not tensor.is_floating_point() or any(part in name.split(".") for part in in_float32)
    return tensor.dtype if keeps else dtype


def saved_state(model: Model, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a model in `dtype`, on the host, rounded as `rounding` does; what is one tensor in the model stays
    one."""
    made: dict[tuple[object, ...], torch.Tensor] = {}
    found = {}
    for name, one in model.state_dict().items():
        place = one.data_ptr(), one.shape, one.dtype
        if place not in made:
            made[place] = rounding.round_to(one.cpu(), saved_dtype(model, name, one, dtype), name)
        found[name] = made[place]
    return found


def count_rounded(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Number of trained weights that have 16 bits."""
    sixteen = (torch.bfloat16, torch.float16)
    return sum(one.numel() for one in parameters if one.requires_grad and one.dtype in sixteen)


# --- stochastic rounding ----------------------------------------------------------------------------------------------


def rounding_optimizer(kind: type, settings: JsonObject) -> tuple[type, JsonObject]:
    """The class and arguments of the optimizer that rounds stochastically, for those of torch's AdamW or of torchao's
    AdamW8bit.

    Raises:
        UserError: torchao is missing.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f"training.master_weights is stochastic, which needs torchao ({error}). Install it with `pip install "
            "torchao`, or set training.master_weights to float32 or none."
        ) from None
    if issubclass(kind, AdamW8bit):
        return kind, settings | {"bf16_stochastic_round": True}
    settings = {name: value for name, value in settings.items() if name not in ("fused", "foreach")}
    return _rounding_adamw(), settings | {"bf16_stochastic_round": True}


def _rounding_adamw() -> type:
    from torchao.optim.adam import _AdamW

    class RoundingAdamW(_AdamW):
        """torchao's AdamW with states in float32: in bfloat16 the second moment would stop moving, because it changes
        by a thousandth per step."""

        def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
            return torch.zeros_like(p, dtype=torch.float32)

        def load_state_dict(self, state_dict: JsonObject) -> None:
            groups = [
                {**one, "lr": torch.as_tensor(one["lr"])} for one in state_dict["param_groups"]
            ]  # as torchao asks
            super().load_state_dict({**state_dict, "param_groups": groups})  # casts states to the type of their weights
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
                for parameter, key in zip(group["params"], saved["params"], strict=True):
                    for name, value in state_dict["state"].get(key, {}).items():
                        if name != "step":
                            self.state[parameter][name] = value.to(device=parameter.device, dtype=torch.float32)

    return RoundingAdamW


def seed_rounding(optimizer: torch.optim.Optimizer, seed: int, step: Callable[[], int]) -> None:
    """Round with random numbers that depend on the seed and the step alone: all ranks of DDP round alike, a resumed run
    as the first one, and dropout draws the numbers that it would draw without rounding.

    Args:
        step: returns the number of optimizer steps so far.
    """
    kept: list[Any] = []

    def before(*_: object) -> None:
        kept[:] = [torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None]
        torch.manual_seed((seed * 1_000_003 + step()) % 2**32)  # the generator of a CPU ignores higher bits

    def after(*_: object) -> None:
        torch.set_rng_state(kept[0])
        if kept[1] is not None:
            torch.cuda.set_rng_state(kept[1])

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


# --- updates that are lost --------------------------------------------------------------------------------------------

SAMPLED_TENSORS, SAMPLED_NUMBERS = 16, 2**14  # at most, and of each; a few kernels per tensor at logging steps


class WeightSample:
    """A sample of the trained weights just before an optimizer step, to count those that the step leaves unchanged.
    Weights without a gradient, such as the embeddings of absent tokens, are not counted. Stays on the device."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        trained = [one for one in parameters if one.grad is not None and _local(one).numel()]
        kept = trained[:: max(-(-len(trained) // SAMPLED_TENSORS), 1)]
        self._before = [(one, _strided(one.detach()).clone(), _strided(one.grad) != 0) for one in kept]

    def unchanged(self) -> torch.Tensor | None:
        """(weights that are as before, weights compared), int64 [2]; None without any."""
        pairs = [
            torch.stack([((_strided(one.detach()) == was) & moves).sum(), moves.sum()])
            for one, was, moves in self._before
        ]
        return torch.stack(pairs).sum(0) if pairs else None


def _strided(tensor: Any) -> torch.Tensor:
    """Evenly spaced numbers of this rank's part of a tensor."""
    flat = _local(tensor).reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLED_NUMBERS)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- what a run says about it -----------------------------------------------------------------------------------------


def lost_updates_warning(model: Model, choice: WeightPrecision, learning_rate: float) -> str | None:
    """A sentence if updates are lost: trained weights in 16 bits that are rounded to nearest."""
    if choice.kind != NONE or not (count := count_rounded(model.parameters())):
        return None
    return (
        f"{count:,} trained weights have 16 bits and are rounded to nearest (master_weights: none; {choice.reason}). "
        f"At a learning rate of {learning_rate:.1e}, the updates of weights larger than {learning_rate * 2**9:.1e} "
        "are mostly lost. Set training.master_weights to float32 or stochastic; in a script, load the model with "
        "dtype=torch.float32 and set bf16=True."
    )
