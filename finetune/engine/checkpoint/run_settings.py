"""The settings that determine a training result, and how two runs' settings differ."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config import Batch, Config
from finetune.runtime import files
from finetune.runtime.types import JsonObject

CANNOT_CHANGE = frozenset(
    "model.full_finetuning lora.r lora.target_modules lora.target_parameters lora.modules_to_save lora.bias"
    " training.optim training.master_weights".split()
) | {"base weights", "model config"}
# Further SFTConfig fields that do not change the result. Any field not listed counts as changing it.
FREE_EXTRA = frozenset(
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor"
    " logging_first_step log_level log_level_replica log_on_each_node include_num_input_tokens_seen skip_memory_metrics"
    " torch_empty_cache_steps ddp_bucket_cap_mb ddp_backend ddp_find_unused_parameters ddp_broadcast_buffers"
    " gradient_checkpointing_kwargs save_only_model restore_callback_states_from_checkpoint"
    " torch_compile torch_compile_backend torch_compile_mode tf32 debug disable_tqdm run_name project".split()
)
Difference = tuple[str, object, object]  # the setting, what it was, what it is now
LENGTH = "total steps (training.max_steps, training.num_train_epochs)"
_MISSING = "not recorded"


def result_settings(config: Config, batch: Batch, dtype: str) -> JsonObject:
    """Everything except the data that determines the training result, as JSON-compatible values.

    Args:
        dtype: the resolved one, for example bfloat16.
    """
    training, lora, model = config.training, config.lora, config.model
    names = ("full_finetuning", "load_in_4bit", "load_in_8bit", "load_in_fp8", "loader", "loader_kwargs")
    found: JsonObject = {f"model.{name}": getattr(model, name) for name in names} | {"model.dtype": dtype}
    if not model.full_finetuning:
        names = ("r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "adapter_kwargs")
        found |= {f"lora.{name}": getattr(lora, name) for name in names}
        targets, saved, parameters = lora.target_modules, lora.modules_to_save, lora.target_parameters
        found["lora.target_modules"] = sorted(set(targets)) if isinstance(targets, list) else targets
        found["lora.target_parameters"] = parameters if parameters is None else sorted(set(parameters))
        found["lora.modules_to_save"] = sorted(set(saved)) if saved else None
    found |= {
        f"training.{name}": getattr(training, name)
        for name in ("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "optim", "max_grad_norm")
    }
    found["training"] = {name: value for name, value in training.extra.items() if name not in FREE_EXTRA}
    return files.to_json_types(found)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[Difference], list[str]]:
    """(key, was, now) of each setting that differs, key by key for mappings; and the keys that one side lacks."""
    found, unknown = [], []
    for key in [*was, *(key for key in now if key not in was)]:
        old, new = was.get(key, _MISSING), now.get(key, _MISSING)
        if key in ("base weights", "model config") and None in (old, new) or _MISSING in (old, new):
            if "model.full_finetuning" not in was or was["model.full_finetuning"] == now.get("model.full_finetuning"):
                unknown.append(key)
        elif isinstance(old, dict) and isinstance(new, dict):
            default = _sft_defaults() if key == "training" else {}
            for name in sorted({*old, *new}):
                pair = [side.get(name, default.get(name)) for side in (old, new)]
                if pair[0] != pair[1]:
                    found.append((f"{key}.{name}", *pair))
        elif old != new:
            found.append((key, old, new))
    return found, unknown


def _sft_defaults() -> JsonObject:
    """Default of each SFTConfig field: setting a field to its default is not a difference."""
    import trl

    return {
        item.name: files.to_json_types(item.default)
        for item in dataclasses.fields(trl.SFTConfig)
        if item.default is not dataclasses.MISSING
    }


def setting_name(key: str) -> str:
    return next((name for name in ("model config", "base weights") if key.startswith(name)), key)


def differences_message(checkpoint: Path | None, differing: list[Difference], allowed: bool, config: Config) -> str:
    fixed = [one for one in differing if setting_name(one[0]) in CANNOT_CHANGE]
    free = [] if allowed else [one for one in differing if one not in fixed]

    def lines(some: list[Difference]) -> str:
        return "".join(f"\n  - {key}: was {json.dumps(was)}, now {json.dumps(now)}" for key, was, now in some)

    text = f"{checkpoint} was trained with other settings. Nothing was started."
    if fixed:
        text += "\nThese cannot change in a resumed run. Restore them, or start a new run in another folder:"
        text += lines(fixed)
    if free:
        text += "\nThese change the result. Restore them, or apply them with training.resume_with_changes: true:"
        text += lines(free)
    if [key for key, _, _ in differing] == [LENGTH]:
        training = config.training
        by_steps = training.max_steps > 0
        text += "\nTo train the further steps: the same command with "
        text += further("max_steps", training.max_steps) if by_steps else further_epochs(training.num_train_epochs)
    return text


def further_epochs(count: float) -> str:
    """The options that train a finished run to `count` epochs."""
    return further("num_train_epochs", f"{count:g}")


def further(setting: str, value: object) -> str:
    """The options that train a run to another length than it was planned for."""
    changed = "--training.resume_from_checkpoint true --training.resume_with_changes true"
    return f"--training.{setting} {value} {changed}"


def depends_on_length(settings: Mapping[str, Any]) -> bool:
    """Whether a step's learning rate depends on the number of steps of the run."""
    name, warmup = settings.get("training.lr_scheduler_type"), settings.get("training.warmup_steps", 0)
    if any(str(key).startswith("warmup") for key in settings.get("training", {})):
        return True
    if name in ("constant", "reduce_lr_on_plateau", "greedy"):
        return False
    absolute = isinstance(warmup, int | float) and (warmup == 0 or warmup >= 1)
    return not (name in ("constant_with_warmup", "inverse_sqrt") and absolute)
