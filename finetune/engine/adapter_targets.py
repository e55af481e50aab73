"""Checks that `lora.target_modules` and `lora.modules_to_save` match modules of the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch

from finetune.config import Config
from finetune.errors import UserError


def check_by_config(config: Config) -> None:
    """Check the names against the model's architecture, built without weights, so that a typo is found before loading.
    Models that cannot be built this way (remote code, several towers, adapters) are left to `check`, after loading.

    Raises:
        UserError: a name matches no module.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    lora, model = config.lora, config.model
    named = isinstance(lora.target_modules, list) or lora.modules_to_save
    if not named or isinstance(lora.target_modules, str) or model.full_finetuning or lora.continue_adapter:
        return
    if model.loader or model.loader_kwargs or model.trust_remote_code:
        return
    try:
        shape = AutoConfig.from_pretrained(str(model.model_name_or_path), revision=model.revision)
        if shape is not shape.get_text_config():
            return
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(shape)
    except Exception:  # loading the model reports the error better
        return
    check(skeleton, config, lora.target_modules)


def check(model: Any, config: Config, targets: Sequence[str] | str | None) -> None:
    """Check the names against a model that has no adapter yet.

    Args:
        targets: as in PEFT: names or their endings, a regular expression, "all-linear", or None for PEFT's default.

    Raises:
        UserError: a name matches no module. PEFT accepts a list if any of its names matches.
    """
    names = [name for name, _ in model.named_modules() if name]
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    given = config.lora.target_modules
    if isinstance(targets, str):
        if targets != "all-linear" and not _matches_regex(targets, names):
            raise UserError(_missing("lora.target_modules", [targets], linear))
    elif targets:
        missing = [target for target in targets if not _found(target, names)]
        if missing and (given is not None or len(missing) == len(targets)):
            raise UserError(_missing("lora.target_modules", missing, linear))
    if missing := [name for name in config.lora.modules_to_save or [] if not _found(name, names)]:
        raise UserError(_missing("lora.modules_to_save", missing, names))


def is_transposed(model: Any) -> bool:
    """Whether the model's layers store their weights as GPT-2's do: inputs by outputs (`fan_in_fan_out`)."""
    from transformers.pytorch_utils import Conv1D

    return any(isinstance(module, Conv1D) for module in model.modules())


def _matches_regex(pattern: str, names: list[str]) -> bool:
    try:
        return any(re.fullmatch(pattern, name) for name in names)
    except re.error as error:
        raise UserError(
            f"lora.target_modules is not a valid regular expression: `{pattern}` ({error}). Give a list of module "
            "names, a regular expression that matches full names, or all-linear."
        ) from None


def _found(target: str, names: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def _missing(key: str, targets: list[str], names: list[str]) -> str:
    """The message, with the last parts of the model's module names, most similar first."""
    known = list(dict.fromkeys(part for part in (name.rpartition(".")[2] for name in names) if not part.isdigit()))
    near = {target: get_close_matches(target, known, n=len(known) or 1, cutoff=0.5) for target in targets}
    listed = list(dict.fromkeys([*(name for found in near.values() for name in found), *known]))[:20]
    shown = [f"`{target}`{f' (nearest is {found[0]})' if found else ''}" for target, found in near.items()]
    return f"{key} matches no module of the model: {', '.join(shown)}. The model has {', '.join(listed)}."
