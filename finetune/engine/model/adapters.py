"""A new LoRA adapter and its arguments."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from finetune.config import Config
from finetune.engine import multimodal
from finetune.engine.model import adapter_targets, expert_targets, loaded_weights
from finetune.engine.model.load_errors import explain_adapter_error
from finetune.engine.preflight import adapter_files, model_files
from finetune.runtime import files
from finetune.runtime.command import print_line
from finetune.runtime.types import JsonObject

# The attention and MLP projections of the Llama, Qwen, Mistral and Gemma families: Unsloth's default targets.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_seed(config: Config) -> int:
    return config.training.seed if config.lora.random_state is None else config.lora.random_state


def add_adapter(model: Any, config: Config) -> Any:
    """The model with a new adapter of PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    # GPT-2's layers store their weights as inputs by outputs.
    transposed: JsonObject = {"fan_in_fan_out": True} if any(isinstance(one, Conv1D) for one in model.modules()) else {}
    with explain_adapter_error(config):
        model = get_peft_model(
            model,
            LoraConfig(task_type="CAUSAL_LM", **(transposed | adapter_arguments(model, config))),
        )
    adapter_targets.check_patterns(model, config)
    return model


def load_adapter(model: Any, folder: str, **arguments: Any) -> Any:
    """The model with a saved adapter of PEFT, its stacked experts in PEFT's order.

    Raises:
        UserError: PEFT does not load all of it.
    """
    from peft import PeftModel

    kind = model.config.get_text_config().model_type
    with loaded_weights.require_all():
        model = PeftModel.from_pretrained(model, folder, **arguments)
    local = Path(folder) / model_files.ADAPTER
    file = local if local.is_file() else model_files.cached_file(folder, model_files.ADAPTER, None)
    if file is None or not adapter_files.is_in_older_order(files.read_json(file), kind):
        return model
    if "unsloth" not in sys.modules:  # which has done it
        _reorder_experts(model)
    model.peft_config["default"].auto_mapping = dict(adapter_files.PEFTS_ORDER)  # the next save has it
    print_line(
        f"note: {folder} is an adapter of Unsloth before 2026.9.6, which ordered the columns of lora_B of stacked "
        "experts in another way. They are converted to PEFT's order. If it was trained with UNSLOTH_MOE_LORA_MERGED=1, "
        f'it has that order already: add "lora_B_layout": "rank_major" to its {model_files.ADAPTER} and start again.',
        style="yellow",
    )
    return model


def _reorder_experts(model: Any) -> None:
    """From columns expert by expert to those in which experts are the fastest dimension."""
    for module in model.modules():
        experts = getattr(module, "num_experts", 1) if hasattr(module, "parameter_name") else 1
        if experts > 1:
            weight = module.lora_B["default"].weight
            weight.data = weight.data.view(len(weight), experts, -1).transpose(1, 2).reshape(weight.shape)


def adapter_arguments(model: Any, config: Config) -> JsonObject:
    """Arguments of a new adapter on a model, as PEFT and Unsloth name them."""
    lora = config.lora
    names = ("r", "lora_alpha", "lora_dropout", "modules_to_save", "use_rslora", "bias")
    targets = adapter_target_modules(config)
    excluded = excluded_modules(model, targets, lora.adapter_kwargs.get("exclude_modules"))
    return (
        {name: getattr(lora, name) for name in names}
        | expert_targets.resolve(model, config, targets)
        | lora.adapter_kwargs
        | ({"exclude_modules": excluded} if excluded else {})
    )


def excluded_modules(model: Any, targets: Collection[str] | str | None, given: Any) -> Any:
    """PEFT's `exclude_modules` of a new adapter on these targets: those that are given, towers, and layers on which it
    has no effect, which are printed."""
    chosen = expert_targets.matches("(?s).*" if targets == "all-linear" else targets or ())
    unreachable = list(filter(chosen, adapter_targets.read_past_adapters(model)))
    if unreachable:
        kinds = ", ".join(dict.fromkeys(".".join(name.split(".")[-2:]) for name in unreachable))
        print_line(f"The adapter leaves out {kinds}: kernels of these layers read the weights past an adapter")
    return multimodal.excluding_towers(model, given, unreachable)


def adapter_target_modules(config: Config) -> list[str] | str | None:
    chosen = config.lora.target_modules
    if chosen is None and config.model.loader == "FastModel":
        return None  # it selects by its own switches (finetune_language_layers, ...), for models with several towers
    return list(PROJECTIONS) if chosen is None else chosen
