"""Forward and backward of four decoder layers with LoRA, by base: what a change of their kernels costs.

    PYTHONPATH=CHECKOUT python -m benchmarks.lora_layers [--tokens 4096,16384] [--bases lora,fp8,nf4]

Prints one JSON line per cell: the median of 20 passes in milliseconds and the peak memory. For a comparison, run it
from two checkouts in turn on one machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from benchmarks.processes import say

SIZES = {"1.2B": (2048, 8192), "8B": (4096, 14336)}  # widths of the model and of its MLP
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYERS, PASSES = 4, 20


def main() -> int:
    """Measure every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--bases", default="lora,fp8,nf4")
    given = parser.parse_args()
    for size, widths in SIZES.items():
        for base in given.bases.split(","):
            model = with_adapter(*widths, base)
            for tokens in map(int, given.tokens.split(",")):
                say(json.dumps({"size": size, "base": base, "tokens": tokens} | measured(model, tokens)))
    return 0


def with_adapter(width: int, inner: int, base: str) -> Any:
    """A Llama with random weights on the GPU, whose layers this package computes."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune.engine.kernels import fp8, fused_lora

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": LAYERS, "vocab_size": 1024}
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8)).bfloat16()
    model.requires_grad_(False)
    if base == "nf4":
        quantize(model)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS)).train()
    if base == "fp8":
        fp8.convert(model)
    fused_lora.install(model)
    return model.base_model.model.model


def quantize(model: Any) -> None:
    """Linear layers but the head in bitsandbytes' NF4."""
    import bitsandbytes as bnb
    import torch

    for module in [*model.model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, torch.nn.Linear):
                kind = {"quant_type": "nf4", "compress_statistics": True, "compute_dtype": torch.bfloat16}
                packed = bnb.nn.Linear4bit(child.in_features, child.out_features, bias=False, **kind)
                packed.load_state_dict(child.cpu().state_dict())
                setattr(module, name, packed.cuda())


def measured(backbone: Any, tokens: int) -> dict[str, float]:
    """Median milliseconds of a pass and GiB at its peak."""
    import torch

    x = torch.randn(1, tokens, backbone.config.hidden_size, device="cuda").bfloat16().requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(PASSES + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        y = backbone(inputs_embeds=x, use_cache=False).last_hidden_state
        y.backward(torch.ones_like(y))
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"median_ms": round(statistics.median(found[3:]), 2), "peak_gib": round(peak, 2)}


if __name__ == "__main__":
    raise SystemExit(main())
