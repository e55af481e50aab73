"""A saved adapter is compared with what the ranks hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from finetune.engine.sharding import checkpoint_weights, shard
from finetune.errors import RunError


def test_an_adapter_with_rows_of_zeros_is_not_saved_whole() -> None:
    checkpoint_weights.check_adapter(80, 80)
    with pytest.raises(RunError, match="the ranks hold 80 nonzero elements, the file 10"):
        checkpoint_weights.check_adapter(80, 10)


def test_the_files_of_a_converted_model_have_tied_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the base's files, from which transformers makes the model's stacked experts and back."""
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=2, num_experts_per_tok=1, vocab_size=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "base")
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "base")
    monkeypatch.setattr(shard, "gather_full", torch.clone)  # a gathered tensor is a new one
    checkpoint_weights.save_model(model, tmp_path / "saved")
    base, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "saved"))
    assert saved.keys() == base.keys() and all(torch.equal(saved[name], base[name]) for name in base)
