"""Checks that `lora.target_modules` and `lora.modules_to_save` match modules of the model, and measures how much of it
an adapter reaches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from finetune.config import Config
from finetune.errors import UserError
from finetune.runtime.types import Model

# PEFT takes these names for stacked experts if a model has them, so that they reach no layer beside the experts.
_EXPERT_NAMES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
MIN_SHARE = 0.9  # share of the linear weights, below which a run warns


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of the linear layers an adapter trains, the output embedding aside.

    share:      of their weights, from 0 to 1
    layers:     the last two parts of the names of linear layers without an adapter, the largest first
    parameters: the same of weights that `target_modules` cannot name: stacked experts, layers named as their parts
    """

    share: float
    layers: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def warning(self) -> str | None:
        """What has no adapter and how to give it one; None if that is little."""
        if self.share >= MIN_SHARE:
            return None
        bare = [*self.layers, *self.parameters]
        shown = ", ".join(bare[:8]) + (f" and {len(bare) - 8} more" if len(bare) > 8 else "")
        lines = ["lora.target_modules: all-linear"] if self.layers else []
        if self.parameters:
            lines.append(f"lora.adapter_kwargs: {{target_parameters: [{', '.join(self.parameters)}]}}")
        return (
            f"{1 - self.share:.0%} of the linear weights have no adapter: {shown}. To train them, set "
            f"{' and '.join(lines)} (in a script, the same arguments of LoraConfig)."
        )


def coverage(model: Model) -> Coverage | None:
    """Which linear weights of the language model have an adapter or are trained; None without an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not getattr(model, "peft_config", None):
        return None
    base = model.get_base_model()
    adapted = {
        id(getattr(module.get_base_layer(), getattr(module, "parameter_name", "weight"), None))
        for module in model.modules()
        if isinstance(module, BaseTunerLayer)
    }
    weights = list(_linear_weights(base))
    stacked = {name for name, weight, _ in weights if weight.ndim == 3}
    reached = 0
    bare: dict[str, int] = {}
    for name, weight, size in weights:
        if id(weight) in adapted or weight.requires_grad:
            reached += size
            continue
        as_parameter = stacked and name not in stacked and name.rpartition(".")[2] in _EXPERT_NAMES
        name = f"{name}.weight" if as_parameter else name
        bare[name] = bare.get(name, 0) + size
    largest = sorted(bare, key=lambda name: -bare[name])
    parameters = tuple(name for name in largest if name in stacked or name.endswith(".weight"))
    return Coverage(
        share=reached / (sum(size for _, _, size in weights) or 1),
        layers=tuple(name for name in largest if name not in parameters),
        parameters=parameters,
    )


def _linear_weights(base: Any) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Each weight that the language model multiplies by, with the last two parts of its name and its size unpacked."""
    from transformers.pytorch_utils import Conv1D

    decoder, head = base.get_decoder(), base.get_output_embeddings()
    for path, module in (decoder if isinstance(decoder, torch.nn.Module) else base).named_modules():
        parts = [part for part in path.split(".") if part not in ("base_layer", "modules_to_save", "default")]
        if module is head or "original_module" in parts or any(part.startswith("lora_") for part in parts):
            continue
        if isinstance(module, torch.nn.Linear):  # the weights of bitsandbytes' are packed
            yield ".".join(parts[-2:]), module.weight, module.in_features * module.out_features
        elif isinstance(module, Conv1D):
            yield ".".join(parts[-2:]), module.weight, module.weight.numel()
        elif not isinstance(module, torch.nn.modules.conv._ConvNd):
            for own, weight in module.named_parameters(recurse=False):
                if weight.ndim == 3:  # the experts of one layer
                    yield ".".join([*parts, own][-2:]), weight, weight.numel()


def check(model: Model, config: Config, targets: Sequence[str] | str | None, backend: str) -> None:
    """Check the names against a model that has no adapter yet.

    Args:
        targets: as in PEFT: names or their endings, a regular expression, "all-linear", or None for PEFT's default.
        backend: Unsloth trains an output embedding that is named as a target in full; PEFT does not.

    Raises:
        UserError: a name matches no module, or one that takes no adapter. PEFT accepts a list if any of its names
            matches.
    """
    from transformers.pytorch_utils import Conv1D

    modules = {name: module for name, module in model.named_modules() if name}
    names = list(modules)
    linear = [name for name, module in modules.items() if isinstance(module, (torch.nn.Linear, Conv1D))]
    given, saved = config.lora.target_modules, config.lora.modules_to_save or []
    if missing := [name for name in saved if not _matches(name, names)]:
        raise UserError(_missing_message("lora.modules_to_save", missing, names))
    if isinstance(targets, str):
        if targets == "all-linear":
            return
        matched = {targets: [modules[name] for name in names if _matches_regex(targets, name)]}
        if not matched[targets] and (listed := _as_list(targets, names)):
            raise UserError(
                f"lora.target_modules is the string `{targets}`, a regular expression for full names, which matches no "
                f"module. To name modules, give a list: [{listed}]."
            )
    elif targets and "all-linear" in targets:
        raise UserError("lora.target_modules has `all-linear` in a list. Give it alone, as a string: all-linear.")
    else:
        matched = {target: [modules[name] for name in names if _matches(target, [name])] for target in targets or ()}
    missing = [target for target, found in matched.items() if not found]
    if missing and (given is not None or len(missing) == len(matched)):
        raise UserError(_missing_message("lora.target_modules", missing, linear))
    _check_kinds(model, matched, backend)
    in_full = [module for name, module in modules.items() if any(_matches(one, [name]) for one in saved)]
    beneath = {id(part) for module in in_full for part in module.modules()}
    if matched and all(id(module) in beneath for found in matched.values() for module in found):
        raise UserError(
            f"lora.modules_to_save trains all of lora.target_modules in full ({', '.join(saved)}), so nothing is left "
            "for an adapter. Remove one of them, or set model.full_finetuning."
        )


def _check_kinds(model: Model, matched: dict[str, list[torch.nn.Module]], backend: str) -> None:
    """Check that the modules are layers on which PEFT can put an adapter."""
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, torch.nn.Embedding, torch.nn.MultiheadAttention, torch.nn.modules.conv._ConvNd, Conv1D)
    has_experts = any(weight.ndim == 3 for weight in model.parameters())
    head = model.get_output_embeddings()
    for target, found in matched.items():
        if backend != "unsloth" and head is not None and any(module is head for module in found):
            raise UserError(
                f"lora.target_modules has `{target}`, the output embedding: the loss reads its weights, past an "
                "adapter. Name it in lora.modules_to_save, or remove it."
            )
        wrong = sorted({type(module).__name__ for module in found if not isinstance(module, kinds)})
        if wrong and not (has_experts and target.rpartition(".")[2] in _EXPERT_NAMES):
            raise UserError(
                f"lora.target_modules has `{target}`, which matches {', '.join(wrong[:3])}: an adapter goes on linear "
                "layers and embeddings. Name the layers inside, or use all-linear."
            )


def is_transposed(model: Model) -> bool:
    """Whether the model's layers store their weights as GPT-2's do: inputs by outputs (`fan_in_fan_out`)."""
    from transformers.pytorch_utils import Conv1D

    return any(isinstance(module, Conv1D) for module in model.modules())


def _as_list(targets: str, names: list[str]) -> str:
    """The names of modules that a string lists, such as `q_proj, v_proj`; "" if it lists anything else."""
    parts = [part for part in re.split(r"[\s,;]+", targets) if part]
    return ", ".join(parts) if all(_matches(part, names) for part in parts) else ""


def _matches_regex(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise UserError(
            f"lora.target_modules is not a valid regular expression: `{pattern}` ({error}). Give a list of module "
            "names, a regular expression that matches full names, or all-linear."
        ) from None


def _matches(target: str, names: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def _missing_message(key: str, targets: list[str], names: list[str]) -> str:
    """The message, with the last parts of the model's module names, most similar first."""
    known = list(dict.fromkeys(part for part in (name.rpartition(".")[2] for name in names) if not part.isdigit()))
    near = {target: get_close_matches(target, known, n=len(known) or 1, cutoff=0.5) for target in targets}
    listed = list(dict.fromkeys([*(name for found in near.values() for name in found), *known]))[:20]
    shown = [f"`{target}`{f' (nearest is {found[0]})' if found else ''}" for target, found in near.items()]
    return f"{key} matches no module of the model: {', '.join(shown)}. The model has {', '.join(listed)}."
