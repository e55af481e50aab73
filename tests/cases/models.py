"""The tiny random models that a case can name: one for each kind of model on which something went wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers import tiny

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
CONV_LAYERS = ["conv", "conv", "full_attention", "conv"]
# kind: (configuration class, its arguments). Kinds that differ in their files or tokenizer alone are Llamas.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA),
    "bfloat16": ("LlamaConfig", LLAMA),
    "base_chatml": ("LlamaConfig", LLAMA),
    "gemma_like": ("LlamaConfig", LLAMA),
    "bad_generation_config": ("LlamaConfig", LLAMA),
    "no_eos": ("LlamaConfig", LLAMA),
    "adds_eos": ("LlamaConfig", LLAMA),
    "glm_like": ("LlamaConfig", LLAMA),
    "one_missing": ("LlamaConfig", LLAMA),
    "tokenizer_of_v4": ("LlamaConfig", LLAMA),
    "backtracking_tokenizer": ("LlamaConfig", LLAMA),
    "moe": ("Qwen3MoeConfig", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    "gpt_oss_mxfp4": ("GptOssConfig", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "phi3": ("Phi3Config", LLAMA),
    "lfm2": ("Lfm2Config", LLAMA | {"num_hidden_layers": 4, "layer_types": CONV_LAYERS}),
    "tied": ("Qwen3Config", LLAMA | {"head_dim": 16, "tie_word_embeddings": True}),
    "opt": (
        "OPTConfig",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64}
        | {"max_position_embeddings": 64, "tie_word_embeddings": False},
    ),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}


def make(kind: str, folder: Path) -> Path:
    """Write a model of the kind, with its tokenizer, into `folder`."""
    import torch
    import transformers

    folder.mkdir(parents=True)
    tokenizer = tiny.make_tokenizer(folder)
    _change_tokenizer(kind, tokenizer)
    tokenizer.save_pretrained(folder)
    name, arguments = ARCHITECTURES[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, name)(
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **arguments,
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        (model.bfloat16() if kind == "bfloat16" else model).save_pretrained(folder)
    _change_files(kind, folder)
    return folder


def _change_tokenizer(kind: str, tokenizer: Any) -> None:
    if kind == "gemma_like":  # turns end in a token that is not the tokenizer's EOS
        from finetune.data.templates.chat_templates import TEMPLATES

        tokenizer.add_special_tokens({"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"})
        tokenizer.add_special_tokens({"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
        tokenizer.chat_template = TEMPLATES["gemma"].lstrip()
    elif kind == "no_eos":  # and no pad token
        tokenizer.eos_token = tokenizer.pad_token = None
    elif kind == "adds_eos":
        from tokenizers.processors import TemplateProcessing

        end = (tokenizer.eos_token, tokenizer.eos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"$A {end[0]}", pair=f"$A {end[0]} $B {end[0]}", special_tokens=[end]
        )
    elif kind == "glm_like":  # the next role's token ends a turn, and <|user|> is EOS
        roles = ["<|assistant|>", "<|system|>", "<|observation|>"]
        tokenizer.add_special_tokens({"additional_special_tokens": roles, "eos_token": "<|user|>"})
        tokenizer.chat_template = (
            "{%- for m in messages -%}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endfor -%}"
            "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
        )
    elif kind == "base_chatml":  # ChatML's tokens, but EOS is <|endoftext|>, as in Qwen's base models
        tokenizer.add_special_tokens({"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})


def _to_mxfp4(folder: Path) -> None:
    """Write the experts as gpt-oss's files have them: blocks of 32 numbers in 4 bits, each with a power of 2."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width, outputs = weight.shape
            tensors[f"{name}_blocks"] = (
                torch.arange(experts * outputs * width // 2).view(experts, outputs, -1, 16).byte()
            )
            tensors[f"{name}_scales"] = torch.full((experts, outputs, width // 32), 121).byte()
        else:
            tensors[name] = weight.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantized = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantized))


def _change_files(kind: str, folder: Path) -> None:
    if kind == "bad_generation_config":  # transformers loads it, and refuses to save it
        file = folder / "generation_config.json"
        sampling = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}
        file.write_text(json.dumps(json.loads(file.read_text()) | sampling))
    elif kind == "one_missing":
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif kind == "gpt_oss_mxfp4":
        _to_mxfp4(folder)
    elif kind == "tokenizer_of_v4":  # tokenizer_config.json as transformers 4 writes it
        added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        config = {
            "added_tokens_decoder": {str(token.pop("id")): token for token in added},
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "model_max_length": 1024,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    elif kind == "backtracking_tokenizer":  # its regular expression takes 2**n steps on n times a, followed by a b
        file = folder / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        split = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
        both = [split, tokenizer["pre_tokenizer"]]
        file.write_text(json.dumps(tokenizer | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": both}}))
