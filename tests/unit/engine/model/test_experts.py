"""Counts of parameters, against what model cards say and sums worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from finetune.config import load
from finetune.engine.model import experts, loading
from finetune.runtime.bootstrap import Stack

HIDDEN, INNER, EXPERTS, CHOSEN, LAYERS, VOCABULARY = 32, 16, 8, 2, 2, 64
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
}
STACK = EXPERTS * 3 * HIDDEN * INNER  # gate, up and down of a layer's experts


def qwen3_moe(**settings: Any) -> Any:
    return transformers.Qwen3MoeConfig(**settings)


def tiny(**changes: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(qwen3_moe(**SMALL | changes))


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        pytest.param(  # Qwen3, arXiv 2505.09388: 30.5 B and 3.3 B
            qwen3_moe(
                vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, head_dim=128,
                num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
            ),
            30.5, 3.3, id="Qwen3-30B-A3B",
        ),
        # Mistral's announcement: 46.7 B and 12.9 B
        pytest.param(transformers.MixtralConfig(), 46.7, 12.9, id="Mixtral-8x7B"),
        # OpenAI's model card, table 1: 116.83 B and 5.13 B without the input embedding of 0.58 B
        pytest.param(transformers.GptOssConfig(), 116.8, 5.7, id="gpt-oss-120b"),
        # arXiv 2412.19437: 671 B and 37 B; its first three layers are dense, the others have a shared expert
        pytest.param(transformers.DeepseekV3Config(), 671.0, 37.6, id="DeepSeek-V3"),
    ],
)  # fmt: skip
def test_known_models(config: Any, total: float, active: float) -> None:
    with torch.device("meta"):
        found = experts.count(transformers.AutoModelForCausalLM.from_config(config))
    assert found.total / 1e9 == pytest.approx(total, abs=0.05)
    assert found.active / 1e9 == pytest.approx(active, abs=0.06)


def test_a_dense_model_is_active_as_a_whole() -> None:
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
    )
    found = experts.count(model)
    assert found.total == found.active == found.trainable == found.active_trainable == model.num_parameters()


def test_dense_layers_and_shared_experts_count_in_full() -> None:
    """One layer of two is dense, and Qwen2's other layers have a shared expert beside those that are routed."""
    model = tiny(mlp_only_layers=[0])
    found = experts.count(model)
    assert found.total - found.active == STACK * (EXPERTS - CHOSEN) // EXPERTS
    settings: Any = SMALL | {"shared_expert_intermediate_size": 24}
    shared = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2MoeConfig(**settings))
    found = experts.count(shared)
    assert found.total == shared.num_parameters()
    assert found.total - found.active == LAYERS * STACK * (EXPERTS - CHOSEN) // EXPERTS


def test_adapters_of_stacked_experts_count_by_the_experts_that_are_used() -> None:
    rank = 4
    model: Any = peft.get_peft_model(
        tiny(),
        peft.LoraConfig(
            r=rank, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
        ),
    )
    found = experts.count(model)
    attention = LAYERS * rank * (HIDDEN + 32)
    one = rank * (HIDDEN + 2 * INNER) + rank * (INNER + HIDDEN)  # of an expert
    assert found.trainable == attention + LAYERS * EXPERTS * one
    assert found.active_trainable == attention + LAYERS * CHOSEN * one
    assert found.total == sum(one.numel() for one in model.parameters())


def test_experts_in_a_list_and_a_number_for_each_layer() -> None:
    """As code on the Hub has them, and HunYuan's configuration."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(HIDDEN, INNER, bias=False) for _ in range(EXPERTS))
            self.shared_experts = nn.ModuleList([nn.Linear(HIDDEN, INNER, bias=False)] * 1)

    class ModelOfTheHub(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            self.config = transformers.PretrainedConfig()
            self.config.moe_topk = [1, 3]

    model: Any = ModelOfTheHub()
    found = experts.count(model)
    assert found.total == LAYERS * (EXPERTS + 1) * HIDDEN * INNER
    assert found.active == (1 + 3 + LAYERS) * HIDDEN * INNER


def test_quantized_stacks_count_unpacked() -> None:
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    model = tiny()
    plain = experts.count(model)
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(layer.mlp.experts, name)
    assert sum(one.numel() for one in model.parameters()) < plain.total
    found = experts.count(model)
    assert (found.total, found.active) == (plain.total, plain.active)


def test_a_bias_of_the_choice_is_frozen_in_full_fine_tuning(tmp_path: Path) -> None:
    """transformers makes it trainable in loading; it has no gradient, for which DDP would wait."""
    sizes: Any = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    config = transformers.Ernie4_5_MoeConfig(
        **sizes, num_hidden_layers=2, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=1
    )
    transformers.Ernie4_5_MoeForCausalLM(config).save_pretrained(tmp_path)
    stack = Stack(backend="transformers", reason="a test", device="cpu", local_rank=0, patches=())
    words = ["--model.model_name_or_path", str(tmp_path), "--data.train_file", "x", "--model.full_finetuning", "true"]
    model = loading.load(load(words, command="train"), stack, row_length=64)
    ids = torch.arange(1, 33)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    named = dict(model.named_parameters())
    assert [name for name, one in named.items() if one.requires_grad and one.grad is None] == []
    assert not named["model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"].requires_grad
