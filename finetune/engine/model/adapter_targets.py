"""Checks that the targets of an adapter and `lora.modules_to_save` match modules and parameters of the model."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Sequence
from difflib import get_close_matches

import torch

from finetune.config import Config
from finetune.engine import multimodal
from finetune.engine.kernels import by_document
from finetune.engine.model import expert_targets
from finetune.engine.model.load_errors import explain_adapter_error
from finetune.errors import UserError
from finetune.runtime.types import Model


def check(model: Model, config: Config, targets: Sequence[str] | str | None, backend: str) -> None:
    """Check the names against a model that has no adapter yet.

    Args:
        targets: as in PEFT: names or their endings, a regular expression, "all-linear", or None for PEFT's default.
        backend: Unsloth trains an output embedding that is named as a target in full; PEFT does not.

    Raises:
        UserError: a name matches no module, or one that takes no adapter. PEFT accepts a list if any of its names
            matches.
    """
    if isinstance(targets, list) and "all-linear" in targets:
        raise UserError("lora.target_modules has `all-linear` in a list. Give it alone, as a string: all-linear.")
    _check_names(model, config, targets, backend)
    with explain_adapter_error(config):
        _check_excluded(model, config.lora.adapter_kwargs.get("exclude_modules") or ())
    expert_targets.resolve(model, config, targets)


def check_patterns(model: Model, config: Config) -> None:
    """Check that each pattern for a rank or an alpha matches a weight of a model with its new adapter. PEFT ignores one
    that matches none, and says so of those that match stacked experts.

    Raises:
        UserError: one does not.
    """
    names = expert_targets.adapted_names(model)
    for setting in ("rank_pattern", "alpha_pattern"):
        for key in config.lora.adapter_kwargs.get(setting) or ():
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in names):  # as PEFT matches it
                raise UserError(
                    _missing_message(f"{setting} of lora.adapter_kwargs", [key], names, "layer with an adapter")
                )


def _check_excluded(model: Model, excluded: Sequence[str] | str) -> None:
    """Check that `exclude_modules`, a list of endings or a regular expression, matches modules or stacked experts."""
    names = [name for name, _ in model.named_modules() if name]
    for one in [excluded] if isinstance(excluded, str) else excluded:
        given = one if isinstance(excluded, str) else [one]
        experts = any(expert_targets.names_stacked(path, given) for path in expert_targets.stacked_weights(model))
        if not experts and not any(map(expert_targets.matches(given), names)):
            raise UserError(_missing_message("exclude_modules of lora.adapter_kwargs", [one], names))


def _check_names(model: Model, config: Config, targets: Sequence[str] | str | None, backend: str) -> None:
    """Check that each name matches modules, or stacked experts by the names of the layers that they hold."""
    from transformers.pytorch_utils import Conv1D

    modules = multimodal.outside_towers(model)
    names, what = list(modules), f"module of the {'text model' if multimodal.towers(model) else 'model'}"
    linear = [name for name, module in modules.items() if isinstance(module, (torch.nn.Linear, Conv1D))]
    given, saved = config.lora.target_modules, config.lora.modules_to_save or []
    if missing := [name for name in saved if not any(map(expert_targets.matches([name]), names))]:
        raise UserError(_missing_message("lora.modules_to_save", missing, names, what))
    if targets == "all-linear":
        return
    stacked = expert_targets.stacked_weights(model)
    if isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise UserError(
                f"lora.target_modules is not a valid regular expression: `{targets}` ({error}). Give a list of module "
                "names, a regular expression that matches full names, or all-linear."
            ) from None
        matched = {targets: [module for name, module in modules.items() if pattern.fullmatch(name)]}
        experts = any(expert_targets.names_stacked(path, targets) for path in stacked)
        if not matched[targets] and not experts and (listed := _as_list(targets, names)):
            raise UserError(
                f"lora.target_modules is the string `{targets}`, a regular expression for full names, which matches no "
                f"module. To name modules, give a list: [{listed}]."
            )
        missing = [] if matched[targets] or experts else [targets]
    else:
        chosen = {target: filter(expert_targets.matches([target]), names) for target in targets or ()}
        matched = {target: [modules[name] for name in found] for target, found in chosen.items()}
        missing = [
            target
            for target, found in matched.items()
            if not found and not any(expert_targets.names_stacked(path, [target]) for path in stacked)
        ]
    if missing and (given is not None or len(missing) == len(matched)):
        raise UserError(_missing_message("lora.target_modules", missing, linear, what))
    _check_kinds(model, matched, backend, has_experts=bool(stacked))
    in_full = [module for name, module in modules.items() if expert_targets.matches(saved)(name)]
    beneath = {id(part) for module in in_full for part in module.modules()}
    found = [module for one in matched.values() for module in one]
    if found and all(id(module) in beneath for module in found):
        raise UserError(
            f"lora.modules_to_save trains all of lora.target_modules in full ({', '.join(saved)}), so nothing is left "
            "for an adapter. Remove one of them, or set model.full_finetuning."
        )


def _check_kinds(model: Model, matched: dict[str, list[torch.nn.Module]], backend: str, *, has_experts: bool) -> None:
    """Check that the modules are layers on which PEFT can put an adapter."""
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, torch.nn.Embedding, torch.nn.MultiheadAttention, torch.nn.modules.conv._ConvNd, Conv1D)
    head = model.get_output_embeddings()
    for target, found in matched.items():
        if backend != "unsloth" and head is not None and any(module is head for module in found):
            raise UserError(
                f"lora.target_modules has `{target}`, the output embedding: the loss reads its weights, past an "
                "adapter. Name it in lora.modules_to_save, or remove it."
            )
        wrong = sorted({type(module).__name__ for module in found if not isinstance(module, kinds)})
        if wrong and not (has_experts and target.rpartition(".")[2] in expert_targets.EXPERT_NAMES):
            raise UserError(
                f"lora.target_modules has `{target}`, which matches {', '.join(wrong[:3])}: an adapter goes on linear "
                "layers and embeddings. Name the layers inside, or use all-linear."
            )


def read_past_adapters(model: Model) -> list[str]:
    """Linear layers whose weights the recurrent layer around them reads itself, for a kernel, so that an adapter on
    them has no effect: in Mamba's mixers."""
    return [
        f"{name}.{leaf}"
        for name, layer in by_document.recurrent_layers(model).items()
        for leaf in _weights_read(type(layer))
        if isinstance(getattr(layer, leaf, None), torch.nn.Linear)
    ]


@functools.cache
def _weights_read(kind: type[torch.nn.Module]) -> list[str]:
    try:
        return sorted(set(re.findall(r"self\.(\w+)\.weight\b", inspect.getsource(kind))))
    except (OSError, TypeError):  # without a source
        return []


def _as_list(targets: str, names: list[str]) -> str:
    """The names of modules that a string lists, such as `q_proj, v_proj`; "" if it lists anything else."""
    parts = [part for part in re.split(r"[\s,;]+", targets) if part]
    return ", ".join(parts) if all(any(map(expert_targets.matches([part]), names)) for part in parts) else ""


def _missing_message(key: str, targets: list[str], names: list[str], what: str = "module of the model") -> str:
    """The message, with the last parts of the model's module names, most similar first."""
    known = list(dict.fromkeys(part for part in (name.rpartition(".")[2] for name in names) if not part.isdigit()))
    near = {target: get_close_matches(target, known, n=len(known) or 1, cutoff=0.5) for target in targets}
    listed = list(dict.fromkeys([*(name for found in near.values() for name in found), *known]))[:20]
    shown = [f"`{target}`{f' (nearest is {found[0]})' if found else ''}" for target, found in near.items()]
    return f"{key} matches no {what}: {', '.join(shown)}. The model has {', '.join(listed)}."
