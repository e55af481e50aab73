"""Stock Unsloth and stock TRL as their users load a model, for `benchmarks.peers` and `benchmarks.quality`."""

from __future__ import annotations

import os
from typing import Any

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def load(
    request: dict[str, Any], mode: str, *, length: int, checkpointing: Any, seed: int, dtype: Any, **further: Any
) -> tuple[Any, Any, Any]:
    """A model, its tokenizer, and what TRL's trainer is given as `peft_config`.

    Args:
        request: "stack" (unsloth, which must be imported already, or trl) and "model", a folder or Hub name.
        mode: lora, qlora or full.
        length: longest row, in tokens.
        checkpointing: of Unsloth's adapters.
        dtype: of the weights without Unsloth, which chooses its own.
        further: arguments of Unsloth's loader.
    """
    if request["stack"] == "unsloth":
        from unsloth import FastLanguageModel

        model, tokenizer = FastLanguageModel.from_pretrained(
            request["model"],
            max_seq_length=length,
            dtype=None,
            load_in_4bit=mode == "qlora",
            full_finetuning=mode == "full",
            **further,
        )
        if mode != "full":
            model = FastLanguageModel.get_peft_model(
                model,
                r=16,
                lora_alpha=16,
                lora_dropout=0,
                target_modules=TARGETS,
                use_gradient_checkpointing=checkpointing,
                random_state=seed,
            )
        return model, tokenizer, None
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    quantized = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    alone = torch.cuda.is_available() and "RANK" not in os.environ  # else the trainer places it
    model = AutoModelForCausalLM.from_pretrained(
        request["model"],
        dtype=dtype,
        attn_implementation="sdpa",
        quantization_config=quantized if mode == "qlora" else None,
        **({"device_map": {"": 0}} if alone else {}),
    )
    adapters = LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
    if model.config.model_type == "mixtral":  # its experts have no layers of these names
        adapters.target_modules, adapters.target_parameters = TARGETS[:4], EXPERTS
    return model, AutoTokenizer.from_pretrained(request["model"]), None if mode == "full" else adapters
