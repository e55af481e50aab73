"""Models of real sizes with random weights, for machines that reach no hub. The loading code is the real one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# Shapes of published models; Llama-3.2-1B's is 1.236 billion parameters with its tied vocabulary of 128,256,
# Llama-3.2-3B's 3.213 billion and Llama-3.1-8B's 8.030 billion; SmolLM2-360M's is 0.362 billion. The two smallest are
# for CPU ranks; 20.6 billion are of no published model: trained in full, its weights, gradients and Adam's states are
# 165 GB in bfloat16.
SHAPES = {
    "llama-1m": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=8192,
        tie_word_embeddings=False,
    ),
    "qwen3-moe-1m": dict(
        model_type="qwen3_moe",
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=8192,
        tie_word_embeddings=False,
    ),
    "llama-190m": dict(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=8192,
        tie_word_embeddings=True,
    ),
    "llama-360m": dict(
        hidden_size=960,
        intermediate_size=2560,
        num_hidden_layers=32,
        num_attention_heads=15,
        num_key_value_heads=5,
        vocab_size=49152,
        tie_word_embeddings=True,
        rope_theta=100000.0,
    ),
    "llama-1.2b": dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        tie_word_embeddings=True,
        rope_theta=500000.0,
    ),
    "llama-8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=False,
        rope_theta=500000.0,
    ),
    "llama-3b": dict(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=True,
        rope_theta=500000.0,
    ),
    # Qwen3-30B-A3B with all of its 48 layers, with 16 and with 4.
    **{
        name: dict(
            model_type="qwen3_moe",
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=False,
            rope_theta=1000000.0,
        )
        for name, layers in (("qwen3-moe-30b", 48), ("qwen3-moe-16", 16), ("qwen3-moe-4", 4))
    },
    # Trained in full, each of the next two needs more than one GPU has: an H100, an H200.
    "llama-11b": dict(
        hidden_size=5120,
        intermediate_size=14336,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=49152,
        tie_word_embeddings=True,
        rope_theta=500000.0,
    ),
    # In 4 bits it needs more than a GPU of 40 GiB has. In 16 bits its file would be 141 GB: write it in 4 ("-nf4").
    "llama-70b": dict(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=False,
        rope_theta=500000.0,
    ),
    "llama-20b": dict(
        hidden_size=6144,
        intermediate_size=16384,
        num_hidden_layers=52,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=49152,
        tie_word_embeddings=True,
        rope_theta=500000.0,
    ),
}
SHAPES["llama-1.2m"] = SHAPES["llama-1m"] | {"num_hidden_layers": 6}  # enough layers to be measured in slices
# For rows that are longer than Llama 3.1's 131,072 tokens.
SHAPES["llama-8b-long"] = SHAPES["llama-8b"] | {"max_position_embeddings": 1048576}
# Families whose layers carry a state, or whose heads have two widths. Qwen3.5-2B, LFM2-1.2B and Granite-4.0-H-Micro;
# Gemma 4 E2B, whose embeddings of each layer are those of the 8,192 tokens in use. "-1m" are for CPU ranks.
_TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
_TINY |= dict(vocab_size=8192, tie_word_embeddings=True)
_QWEN = dict(model_type="qwen3_5_text")
_GRANITE = dict(model_type="granitemoehybrid", num_local_experts=0, mamba_d_head=64)
FAMILIES = {
    "qwen3.5-2b": _QWEN
    | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=8, head_dim=256)
    | dict(num_key_value_heads=2, linear_num_value_heads=16, vocab_size=248320, tie_word_embeddings=True),
    "gemma4-2b": dict(model_type="gemma4_text", hidden_size=1536, intermediate_size=6144, num_hidden_layers=35)
    | dict(num_attention_heads=8, num_key_value_heads=1, num_kv_shared_layers=20, use_double_wide_mlp=True)
    | dict(vocab_size_per_layer_input=8192, layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7),
    "lfm2-1.2b": dict(model_type="lfm2", hidden_size=2048, intermediate_size=12288, num_hidden_layers=16)
    | dict(num_attention_heads=32, num_key_value_heads=8, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    "granite4-3b": _GRANITE
    | dict(hidden_size=2048, shared_intermediate_size=8192, num_hidden_layers=40, num_attention_heads=32)
    | dict(num_key_value_heads=8, mamba_n_heads=64, mamba_d_state=128, vocab_size=100352, tie_word_embeddings=True)
    | dict(embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.015625)
    | dict(layer_types=["attention" if layer % 10 == 5 else "mamba" for layer in range(40)]),
    "qwen3.5-1m": _TINY
    | _QWEN
    | dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
    | dict(head_dim=16, layer_types=["linear_attention", "full_attention"]),
    "lfm2-1m": _TINY | dict(model_type="lfm2", layer_types=["conv", "full_attention"]),
    "granite4-1m": _TINY
    | _GRANITE
    | dict(mamba_n_heads=2, mamba_d_state=16, shared_intermediate_size=128, layer_types=["mamba", "attention"]),
}
SHAPES |= FAMILIES
IN_PARTS = ("qwen3-moe-30b",)  # written piece by piece: no GPU holds them and what saving takes
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(folder: Path, shape: str, corpus: Path) -> Path:
    """Write a model of `shape` in bfloat16, a Llama unless it names a type, and a byte-level BPE of 8,192 tokens
    trained on `corpus` (JSON lines). With "-nf4" after the shape, the linear layers are in bitsandbytes' 4 bits, and
    never whole in memory.

    Another process does, unless it is there: what a model leaves on a GPU would be missing where runs are measured.
    """
    if not (folder / "config.json").is_file():
        root = Path(__file__).parent.parent
        command = [sys.executable, "-m", "benchmarks.models", folder.resolve(), shape, corpus.resolve()]
        subprocess.run(command, check=True, cwd=root)
    return folder


def write(folder: Path, shape: str, corpus: Path) -> None:
    """What `build` does, in this process."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        " ".join(str(value) for value in json.loads(line).values())
        for line in corpus.read_text(encoding="utf-8").splitlines()
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **({"model_type": "llama", "max_position_embeddings": 32768} | SHAPES[shape.removesuffix("-nf4")]),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if shape in IN_PARTS or shape.endswith("-nf4"):
        write_in_parts(folder, config, device, nf4=shape.endswith("-nf4"))
        return
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def write_in_parts(folder: Path, config: Any, device: Any, *, nf4: bool) -> None:
    """A model that is never whole in memory: in bfloat16, or with linear layers that are quantized already, as
    bitsandbytes and transformers would save it. Experts are stacked."""
    import torch
    from bitsandbytes.functional import quantize_4bit
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors: dict[str, Any] = {}
    names: dict[str, str] = {}
    used = written = 0

    def flush() -> None:
        nonlocal tensors, used, written
        file = f"model-{written:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(tensors, file))
        tensors, used, written = {}, 0, written + 1

    for name, one in model.named_parameters():
        weight = torch.randn(one.shape, dtype=torch.bfloat16, device=device) * 0.02
        if nf4 and one.dim() > 1 and ".layers." in name:
            packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
            made = {name: packed} | {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        else:
            made = {name: torch.ones_like(weight) if one.dim() == 1 else weight}
        tensors |= {key: value.cpu().contiguous() for key, value in made.items()}
        used += sum(value.nbytes for value in made.values())
        if used > 2**31:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    if nf4:
        config.quantization_config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ).to_dict()
    config.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
