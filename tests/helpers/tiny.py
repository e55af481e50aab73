"""A model, a tokenizer and data small enough for a test and real in every other way, made from a seed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
WORDS = "the cat dog runs over a red blue hill and sees seven small green birds that sing while rain falls".split()
VOCABULARY, EXPERTS, CHOSEN = 64, 4, 2
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": CHOSEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Mixtures of experts with the load-balancing loss of transformers.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 16},
    "Qwen2Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "Mixtral": {"num_local_experts": EXPERTS},
    "Olmoe": {"num_experts": EXPERTS},
    "GptOss": {"num_local_experts": EXPERTS, "head_dim": 16, "layer_types": ["full_attention"] * 2},
    "GraniteMoe": {"num_local_experts": EXPERTS},
    "GraniteMoeShared": {"num_local_experts": EXPERTS, "shared_intermediate_size": 16},
    "Ernie4_5_Moe": {"moe_num_experts": EXPERTS, "moe_k": CHOSEN, "moe_intermediate_size": 16},
}
_DEEPSEEK = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "moe_intermediate_size": 16, "topk_group": 1}
# Further ones, some with a dense layer first.
FURTHER: dict[str, dict[str, Any]] = {
    "Glm4Moe": _DEEPSEEK | {"first_k_dense_replace": 1, "n_group": 1, "head_dim": 16},
    "DeepseekV3": _DEEPSEEK
    | {"first_k_dense_replace": 1, "n_group": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    | {"qk_nope_head_dim": 4, "v_head_dim": 8},
    "Lfm2Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "num_dense_layers": 1}
    | {"layer_types": ["conv", "full_attention"]},
    "Llama4Text": {"num_local_experts": EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 16, "head_dim": 16},
    "Phimoe": {"num_local_experts": EXPERTS},
}

_DELTA_RULE: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
_DELTA_RULE |= {"linear_value_head_dim": 16, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
_MAMBA_2: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
# Layers that carry a state: short convolutions, gated delta rules, Mamba 2 and 1, linear recurrences.
RECURRENT: dict[str, dict[str, Any]] = {
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3_5Text": _DELTA_RULE,
    "Qwen3Next": _DELTA_RULE
    | {"num_experts": EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "OlmoHybrid": _DELTA_RULE,
    "GraniteMoeHybrid": _MAMBA_2
    | {"layer_types": ["mamba", "attention"], "num_local_experts": EXPERTS, "shared_intermediate_size": 16},
    "Bamba": _MAMBA_2 | {"attn_layer_indices": [1]},
    "FalconH1": _MAMBA_2 | {"mamba_d_ssm": 64, "mamba_n_groups": 1},
    "NemotronH": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16}
    | {"ssm_state_size": 16, "n_groups": 1, "head_dim": 16, "chunk_size": 16},
    "Zamba2": {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "n_mamba_heads": 4, "chunk_size": 16}
    | {"mamba_d_state": 16, "mamba_ngroups": 1, "mamba_headdim": 16, "num_mem_blocks": 1, "attention_head_dim": 32},
    "Mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "Mamba": {"state_size": 8},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1, "num_experts": EXPERTS}
    | {"use_mamba_kernels": False, "mamba_dt_rank": 4},
    "RecurrentGemma": {"lru_width": 32, "attention_window_size": 64},
    "Rwkv": {},
    "MiniMax": {"num_local_experts": EXPERTS, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    | {"block_size": 16},
}

_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2}
_QWEN_VISION |= {"out_hidden_size": 32}
_GEMMA = {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
# Models for images beside text: of the text model, and of the others by their names in the configuration.
MULTIMODAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        _GEMMA,
        {"vision_config": _VISION | {"image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4}
        | {"image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62},
    ),
    "Gemma4": (
        _GEMMA | {"global_head_dim": 32, "hidden_size_per_layer_input": 8},
        {"vision_config": _VISION | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}}
        | {"audio_config": _VISION | {"output_proj_dims": 32, "subsampling_conv_channels": [8, 4]}},
    ),
    "Mistral3": (
        {"head_dim": 16, "model_type": "ministral3"},
        {"vision_config": _VISION | {"model_type": "pixtral", "image_size": 32, "patch_size": 16}},
    ),
    "Qwen3_5": (
        {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": True}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        {"vision_config": _QWEN_VISION | {"num_position_embeddings": 16}, "tie_word_embeddings": True},
    ),
    "Qwen2_5_VL": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}},
        {"vision_config": _QWEN_VISION | {"fullatt_block_indexes": [0]}},
    ),
    "Qwen3VL": (
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
        {"vision_config": _QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}},
    ),
}


def make_tokenizer(folder: Path, vocab_size: int = 400):
    """A byte-level BPE with ChatML's special tokens, saved into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(folder: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2, **shape: Any) -> Path:
    """A Llama of about 100,000 parameters with random weights, with its tokenizer. `shape`: of LlamaConfig."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer: Any = make_tokenizer(folder)
    torch.manual_seed(seed)
    own = dict(vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers)
    own |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False)
    own |= dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    LlamaForCausalLM(LlamaConfig(**own | shape)).save_pretrained(folder)
    return folder


def make_moe(family: str, **changes: Any) -> Any:
    """A mixture of experts of a family, with random weights."""
    return make_text(family, (FAMILIES | FURTHER).get(family, {}) | changes, attn_implementation="eager")


def make_text(family: str, shape: dict[str, Any], **how: Any) -> Any:
    """A model of text of a family, with random weights."""
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(**SMALL | shape)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, **how).train()


def save_moe(family: str, folder: Path, **changes: Any) -> Path:
    """The same in a folder, with a tokenizer."""
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(folder)
    make_moe(family, vocab_size=len(tokenizer), **changes).save_pretrained(folder)
    return folder


def save_text(family: str, folder: Path) -> Path:
    """One of RECURRENT in a folder, with a tokenizer."""
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(folder)
    make_text(family, RECURRENT[family] | {"vocab_size": len(tokenizer)}).save_pretrained(folder)
    return folder


def make_multimodal(family: str, **changes: Any) -> Any:
    """A model for images and text of a family, with random weights."""
    import torch
    import transformers

    text, others = MULTIMODAL[family]
    torch.manual_seed(0)
    text = SMALL | text | changes
    text["vocab_size_per_layer_input"] = text["vocab_size"]
    config = getattr(transformers, f"{family}Config")(text_config=text, **others)
    return transformers.AutoModelForMultimodalLM.from_config(config).train()


def save_multimodal(family: str, folder: Path, **changes: Any) -> Path:
    """The same in a folder, with a tokenizer."""
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(folder)
    make_multimodal(family, vocab_size=len(tokenizer), **changes).save_pretrained(folder)
    return folder


def checkpoint_activations(model: Any) -> None:
    """Turn activation checkpointing on. transformers 5.24 deprecates the name that 5.17 has for it."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def make_rows(path: Path, count: int, *, seed: int = 0, longest: int = 40) -> Path:
    """Conversations of very different lengths, as JSON lines of `messages`."""
    rng = random.Random(seed)

    def say(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = [{"role": "user", "content": say(longest)}, {"role": "assistant", "content": say(longest)}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path
