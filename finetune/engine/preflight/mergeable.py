"""Which adapters and base models `finetune export` can merge, known before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping

# Ways to initialize an adapter that leave the base weights as they are.
_INITIAL = (True, False, "gaussian", "eva", "orthogonal")
# Fields of PEFT's LoraConfig that the merge applies, and those that do not change a finished adapter's function.
_APPLIED = frozenset(
    "r lora_alpha rank_pattern alpha_pattern use_rslora use_dora lora_bias fan_in_fan_out modules_to_save bias"
    " trainable_token_indices init_lora_weights ensure_weight_tying target_parameters peft_type".split()
)
_NEUTRAL = frozenset(
    "auto_mapping base_model_name_or_path revision task_type inference_mode peft_version"
    " lora_dropout target_modules exclude_modules layers_to_transform layers_pattern megatron_config megatron_core"
    " eva_config runtime_config qalora_group_size unsloth_version unsloth_fixed"
    " lora_B_layout unsloth_fused_expert_lora".split()  # adapter_files.is_in_older_order
)


def why_unmergeable(config: Mapping[str, object]) -> str | None:
    """The setting of an adapter that the merge does not compute, and why; None if it computes all."""
    if config.get("peft_type") != "LORA":
        return f"it is of type {config.get('peft_type')}, not LORA"
    initial = config.get("init_lora_weights", True)
    if initial not in _INITIAL:
        return f"init_lora_weights: {initial} changed the base weights before training"
    if config.get("ensure_weight_tying"):
        return "ensure_weight_tying is set"
    return next(
        (
            f"{name} is {value}"
            for name, value in config.items()
            if value and name not in _APPLIED and name not in _NEUTRAL
        ),
        None,
    )


def quantization(config: Mapping[str, object]) -> str | None:
    """The format of a base model's stored weights if an adapter cannot be merged into it, by its config.json."""
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return None
    method = str(found.get("quant_method", "bitsandbytes"))
    stored_in_4_bits = found.get("load_in_4bit", found.get("_load_in_4bit"))
    return None if method == "bitsandbytes" and stored_in_4_bits else method


def warning(adapter: Mapping[str, object], base: Mapping[str, object]) -> str | None:
    """What a run prints before it trains an adapter that will have no merged export; None if it will have one.

    Args:
        adapter: PEFT's configuration of it.
        base: config.json of the base model; empty if it is not known.
    """
    if why := why_unmergeable(adapter):
        return (
            f"This adapter cannot be exported as a merged model or a GGUF file: {why}. `finetune export --to adapter` "
            "works."
        )
    if method := quantization(base):
        return (
            f"The base model's weights are stored as {method}. A merged or GGUF export needs the 16-bit model, with "
            "--base; `finetune export --to adapter` works without."
        )
    return None
