"""A new LoRA adapter and its arguments."""

from __future__ import annotations

from typing import Any

from finetune.config import Config
from finetune.engine.model import adapter_targets, expert_targets, loaded_weights
from finetune.engine.model.load_errors import explain_adapter_error
from finetune.runtime.types import JsonObject

# The attention and MLP projections of the Llama, Qwen, Mistral and Gemma families: Unsloth's default targets.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_seed(config: Config) -> int:
    return config.training.seed if config.lora.random_state is None else config.lora.random_state


def add_adapter(model: Any, config: Config) -> Any:
    """The model with a new adapter of PEFT."""
    from peft import LoraConfig, get_peft_model

    transposed: JsonObject = {"fan_in_fan_out": True} if adapter_targets.is_transposed(model) else {}
    with explain_adapter_error(config):
        model = get_peft_model(
            model,
            LoraConfig(task_type="CAUSAL_LM", **(transposed | adapter_arguments(model, config))),
        )
    adapter_targets.check_patterns(model, config)
    return model


def load_adapter(model: Any, folder: str, **arguments: Any) -> Any:
    """The model with a saved adapter of PEFT.

    Raises:
        UserError: PEFT does not load all of it.
    """
    from peft import PeftModel

    with loaded_weights.require_all():
        return PeftModel.from_pretrained(model, folder, **arguments)


def adapter_arguments(model: Any, config: Config) -> JsonObject:
    """Arguments of a new adapter on a model, as PEFT and Unsloth name them."""
    lora = config.lora
    names = ("r", "lora_alpha", "lora_dropout", "modules_to_save", "use_rslora", "bias")
    return (
        {name: getattr(lora, name) for name in names}
        | expert_targets.resolve(model, config, adapter_target_modules(config))
        | lora.adapter_kwargs
    )


def adapter_target_modules(config: Config) -> list[str] | str | None:
    chosen = config.lora.target_modules
    if chosen is None and config.model.loader == "FastModel":
        return None  # it selects by its own switches (finetune_language_layers, ...), for models with several towers
    return list(PROJECTIONS) if chosen is None else chosen
