"""Rates and operations, against numbers worked out by hand or counted by torch."""

from __future__ import annotations

import pytest
import torch

from finetune.engine.monitoring import metrics
from finetune.engine.monitoring.metrics import ModelSize


def test_flops_of_full_training_equal_those_torch_counts() -> None:
    """A forward and backward pass of a Llama under torch's own counter; its attention is not causal, so twice ours."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    length = 24
    ids = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    weights = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel() - norms
    size = ModelSize(matmul_parameters=weights, trainable_parameters=weights, layers=2, hidden=32)
    linear = metrics.training_flops(size, tokens=length, squared_lengths=0)
    attention = metrics.training_flops(size, tokens=0, squared_lengths=length**2)
    rotary = counter.get_total_flops() - linear - 2 * attention
    assert 0 <= rotary < 0.01 * linear  # the rotary table's tiny product is all that is left


def test_frozen_weights_cost_two_thirds() -> None:
    frozen = ModelSize(matmul_parameters=900, trainable_parameters=0, layers=0, hidden=0)
    full = ModelSize(matmul_parameters=900, trainable_parameters=900, layers=0, hidden=0)
    count = dict(tokens=10, squared_lengths=0)
    assert metrics.training_flops(frozen, **count) / metrics.training_flops(full, **count) == pytest.approx(2 / 3)


def test_rates_of_nothing_are_unknown() -> None:
    assert metrics.rate(10, 0) is None
    assert metrics.median([]) is None
    assert metrics.mfu(1e12, 1.0, 1, None) is None
    assert metrics.mfu(500e12, 1.0, 2, 1000) == pytest.approx(0.25)
