"""Rates and operations, against numbers worked out by hand or counted by torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from finetune.engine.job import model_size
from finetune.engine.monitoring import metrics
from finetune.engine.monitoring.metrics import ModelSize
from tests.helpers import tiny


def size(*, matmul: int, trained: int, layers: int = 0, hidden: int = 0) -> ModelSize:
    """Of a dense model without an embedding of its own."""
    return ModelSize(
        parameters=matmul, active_parameters=matmul, matmul_parameters=matmul, trainable_parameters=trained,
        active_trainable_parameters=trained, layers=layers, hidden=hidden, attention=hidden,
    )  # fmt: skip


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
    model_size = size(matmul=weights, trained=weights, layers=2, hidden=32)
    linear = metrics.training_flops(model_size, tokens=length, squared_lengths=0)
    attention = metrics.training_flops(model_size, tokens=0, squared_lengths=length**2)
    rotary = counter.get_total_flops() - linear - 2 * attention
    assert 0 <= rotary < 0.01 * linear  # the rotary table's tiny product is all that is left


@pytest.mark.parametrize("trained", [True, False], ids=["full", "frozen experts"])
def test_flops_of_experts_equal_those_torch_counts(trained: bool) -> None:
    """Eager experts compute only the tokens that are routed to them."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings: Any = dict(
        vocab_size=64, hidden_size=32, moe_intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=12, num_experts=8, num_experts_per_tok=2, attn_implementation="eager",
        experts_implementation="eager",
    )  # fmt: skip
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained or ".experts." not in name)
    length = 24
    ids = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    found = model_size(model)
    norms = sum(one.numel() for name, one in model.named_parameters() if "norm" in name)
    no_products = 6 * norms + 2 * model.model.embed_tokens.weight.numel()  # for torch; the embedding is a lookup
    linear = metrics.training_flops(found, tokens=length, squared_lengths=0) - no_products * length
    attention = metrics.training_flops(found, tokens=0, squared_lengths=length**2)
    rotary = counter.get_total_flops() - linear - 2 * attention
    assert 0 <= rotary < 0.01 * linear


@pytest.mark.parametrize("family", ["Qwen3_5", "Gemma4", "Lfm2", "NemotronH"])
def test_flops_count_what_multiplies_a_token(family: str) -> None:
    """The linear layers, convolutions and head, neither tables nor towers; attention in the layers that have it."""
    multimodal = family in tiny.MULTIMODAL
    model = tiny.make_multimodal(family) if multimodal else tiny.make_text(family, tiny.RECURRENT[family])
    found, decoder = model_size(model), model.get_decoder()
    multiplied = set(decoder.parameters()) - {
        one.weight for one in decoder.modules() if isinstance(one, torch.nn.Embedding)
    }
    multiplied |= {model.get_output_embeddings().weight}
    assert found.matmul_parameters == sum(one.numel() for one in multiplied)
    assert found.attention * found.layers == 2 * (16 + 32 if family == "Gemma4" else 16)  # of two heads


def test_frozen_weights_cost_two_thirds() -> None:
    frozen, full = size(matmul=900, trained=0), size(matmul=900, trained=900)
    count = dict(tokens=10, squared_lengths=0)
    assert metrics.training_flops(frozen, **count) / metrics.training_flops(full, **count) == pytest.approx(2 / 3)


def test_loads_of_experts_in_units_of_even_use() -> None:
    layers = [np.array([10.0, 30.0, 0.0, 0.0]), np.array([5.0, 5.0, 5.0, 25.0])]
    assert metrics.expert_loads(layers).tolist() == [1.0, 3.0, 0.0, 0.0, 0.5, 0.5, 0.5, 2.5]
    assert metrics.expert_load_summary(layers) == {
        "expert_load_max": 2.75,
        "expert_load_max_worst": 3.0,
        "expert_load_min": 0.25,
        "expert_load_min_worst": 0.0,
        "experts_unused": 0.25,
    }
    assert metrics.expert_load_summary([]) == {}


@pytest.mark.parametrize(
    ("total", "active", "text"),
    [
        (30_532_122_624, 3_353_032_704, "30.5 B parameters, 3.35 B active per token"),
        (1_235_814_400, 1_235_814_400, "1.24 B parameters"),
        (671_026_419_200, 37_552_297_984, "671 B parameters, 37.6 B active per token"),
        (13_900, 13_900, "13.9 K parameters"),
        (999_999_999, 999_999_999, "1 B parameters"),
        (12, 12, "12 parameters"),
    ],
)
def test_numbers_of_parameters_in_words(total: int, active: int, text: str) -> None:
    assert metrics.parameters_text(total, active) == text


def test_rates_of_nothing_are_unknown() -> None:
    assert metrics.rate(10, 0) is None
    assert metrics.median([]) is None
    assert metrics.mfu(1e12, 1.0, 1, None) is None
    assert metrics.mfu(500e12, 1.0, 2, 1000) == pytest.approx(0.25)
