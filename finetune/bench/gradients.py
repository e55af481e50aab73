"""Gradient sizes of a configuration's model, from its architecture: no weights are loaded."""

from __future__ import annotations

import torch

from finetune.config import Config


def trainable_bytes(config: Config) -> list[int]:
    """Bytes of the gradient of each trainable tensor, in the model's order.

    PEFT and Unsloth keep adapters in float32 on a 16-bit base; in full fine-tuning gradients have the dtype of the
    weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.engine.model import adapters, load_errors

    name = str(config.model.model_name_or_path)
    with load_errors.explain_load_error(name, "configuration"):
        shape = AutoConfig.from_pretrained(name, revision=config.model.revision)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(shape)
        built.tie_weights()
        if not config.model.full_finetuning:
            adapted = adapters.add_adapter(built, config)
            return [parameter.numel() * 4 for parameter in adapted.parameters() if parameter.requires_grad]
    width = {"float32": 4, "auto": 2 if torch.cuda.is_available() else 4}.get(config.model.dtype, 2)
    return [parameter.numel() * width for parameter in built.parameters()]
