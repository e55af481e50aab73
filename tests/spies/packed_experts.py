"""Gradients of an adapter on experts that Unsloth's code for GPUs has packed into 4 bits, under DDP with a row on each
of two ranks; and on the same experts unpacked, computed by transformers for both rows. Rank 0 prints the largest
difference over the norm, for each folder of a model."""

from __future__ import annotations

import sys
from typing import Any

import torch


def gradients(model: Any, rank: int | None = None) -> dict[str, torch.Tensor]:
    """Of the loss of a rank's row, averaged over ranks; None: of both rows."""
    from peft import LoraConfig, get_peft_model

    from finetune.engine.model import adapter_coverage, expert_targets

    names = sorted({expert_targets.short_name(path) for path in expert_targets.stacked_weights(model)})
    model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=[], target_parameters=names))
    covered = adapter_coverage.coverage(model)
    assert covered is not None and covered.experts.keys() == set(names)
    torch.manual_seed(0)
    for name, one in model.named_parameters():
        if "lora_" in name:
            one.data.normal_(std=0.1)
    ids = torch.arange(3, 35).view(2, 16)
    forward: Any = model.train()
    if rank is not None:
        forward, ids = torch.nn.parallel.DistributedDataParallel(model), ids[rank : rank + 1]
    forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def main(*folders: str) -> None:
    import unsloth  # noqa: F401
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from finetune.engine.model import adapter_coverage, expert_targets, experts

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for folder in folders:
        bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["self_attn", "lm_head"]
        )
        packed = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, device_map={"": "cpu"}, quantization_config=bits
        )
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
        stored = expert_targets.stacked_weights(packed)
        assert adapter_coverage.unquantized_experts(packed) is None
        assert experts.count(packed).total == experts.count(whole).total
        assert experts.summary(packed) == experts.summary(whole)
        assert "stay in float32" in str(adapter_coverage.unquantized_experts(whole))
        for path, one in expert_targets.stacked_weights(whole).items():
            four: Any = stored[path]
            assert four.numel() * 2 == one.numel() and experts.unpacked_shape(four) == one.shape
            one.data.copy_(dequantize_4bit(four.data, four.quant_state).view(one.shape))
        found, expected = gradients(packed, rank), gradients(whole)
        worst = max(float((found[name] - one).norm() / one.norm()) for name, one in expected.items())
        if rank == 0:
            sys.stdout.write(f"{folder} {len(expected)} {worst}\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
