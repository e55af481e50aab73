"""Tests of finetune/export/merged.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from finetune.errors import UserError
from finetune.export.adapter import Adapter
from finetune.export.merged import Merge
from finetune.export.weights import Weights
from tests.helpers.export import WARNINGS, load, make_adapter, make_base, merge, shrink, tensors

pytestmark = WARNINGS

IDS = torch.tensor([[5, 9, 30, 77, 120, 8, 3]])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3, all linear": ("qwen3", {"target_modules": "all-linear"}),
    "gemma, tied": ("gemma", {}),
    "gpt2, transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gpt2, DoRA": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    "rsLoRA": ("llama", {"use_rslora": True}),
    "DoRA, and an embedding": ("llama", {"use_dora": True, "target_modules": ["o_proj", "embed_tokens"]}),
    "patterns": ("llama", {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 3}}),
    "modules trained in full": ("llama", {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "tokens": ("llama", {"trainable_token_indices": [7, 3]}),
    "biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_bias": True}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_merged_weights_are_those_of_peft(name: str, tmp_path: Path) -> None:
    kind, lora = VARIANTS[name]
    base = make_base(tmp_path / "base", kind)
    peft = make_adapter(tmp_path / "adapter", base, **lora)
    unmerged = logits(peft)
    wanted = peft.merge_and_unload().state_dict()
    found = merge(tmp_path / "adapter", base, tmp_path / "out", shard=60_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    own = tensors(tmp_path / "out")
    assert own.keys() == Weights(base).entries.keys() and found.changed > 0
    for key, tensor in own.items():
        assert tensor.dtype == torch.bfloat16
        exact = wanted[key]
        assert ((tensor.float() - exact).abs() <= 2**-7 * exact.abs() + 1e-7).all(), key  # up or down, not the nearest
        if not key.endswith(tuple(f"{path}.{part}" for path in found.adapter.changes for part in ("weight", "bias"))):
            assert torch.equal(tensor, tensors(base)[key]), key
    reloaded = logits(load(tmp_path / "out"))
    assert (reloaded - unmerged).abs().max() < 0.02 * unmerged.abs().max()
    assert not torch.allclose(reloaded, logits(load(base)), atol=0.02 * float(unmerged.abs().max()))


TIED: dict[str, tuple[dict[str, Any], bool]] = {
    "head trained": ({"modules_to_save": ["lm_head"]}, False),
    "embedding trained": ({"modules_to_save": ["embed_tokens"]}, False),
    "LoRA on the head": ({"target_modules": ["q_proj", "lm_head"]}, False),
    "LoRA on the embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    "resized": ({"resize": 328}, True),
    "neither": ({}, True),
}


@pytest.mark.parametrize("name", TIED)
def test_tied_embeddings_compute_what_was_trained(name: str, tmp_path: Path) -> None:
    """PEFT's merge would change both; the unmerged model is the reference."""
    lora, stays_tied = TIED[name]
    base = make_base(tmp_path / "base", "gemma", torch.float32)
    wanted = logits(make_adapter(tmp_path / "adapter", base, **lora))
    merge(tmp_path / "adapter", base, tmp_path / "out")
    model = load(tmp_path / "out")
    assert torch.allclose(logits(model), wanted, atol=1e-4)
    assert model.config.tie_word_embeddings is stays_tied
    assert ("lm_head.weight" in tensors(tmp_path / "out")) is not stays_tied
    assert model.config.vocab_size == lora.get("resize", 320)


def test_a_base_stored_in_4_bits_is_dequantized(tmp_path: Path, check: ModuleType) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    base = make_base(tmp_path / "base")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "nf4")
    make_adapter(tmp_path / "adapter", base)
    merge(tmp_path / "adapter", tmp_path / "nf4", tmp_path / "out")
    job = {"base": tmp_path / "nf4", "adapter": tmp_path / "adapter", "exported": tmp_path / "out"}
    wanted = check.load_with_adapter(job, tmp_path / "adapter", torch.float32)
    found = check.compare_tensors(wanted, {}, tmp_path / "out")
    assert found == {"compared": 21, "changed": 6, "not_compared": [], "wrong": []}
    assert {one.dtype for one in tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert not torch.equal(*(tensors(f)["model.layers.0.mlp.up_proj.weight"] for f in (tmp_path / "out", base)))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    make_adapter(tmp_path / "adapter", make_base(tmp_path / "base"))
    other = make_base(tmp_path / "other", intermediate_size=32)
    with pytest.raises(UserError, match="does not fit the base model.*down_proj.*--base"):
        merge(tmp_path / "adapter", other, tmp_path / "out")
    make_adapter(tmp_path / "biased", make_base(tmp_path / "base"), lora_bias=True)
    with pytest.raises(UserError, match="the base has no tensor `.*bias`"):
        merge(tmp_path / "biased", tmp_path / "base", tmp_path / "out2")


def test_small_updates_survive_the_rounding(tmp_path: Path, check: ModuleType) -> None:
    """To nearest, most of them would be lost. The same whatever the size of the files."""
    base = make_base(tmp_path / "base")
    peft = make_adapter(tmp_path / "adapter", base)
    shrink(tmp_path / "adapter", 1e-2)
    found = merge(tmp_path / "adapter", base, tmp_path / "out")
    assert found.update_kept == pytest.approx(1, abs=0.1)
    merge(tmp_path / "adapter", base, tmp_path / "shards", shard=10_000)
    own, again = tensors(tmp_path / "out"), tensors(tmp_path / "shards")
    assert all(torch.equal(own[name], again[name]) for name in own)

    (tmp_path / "exact").mkdir()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    exact = Merge(base, Adapter(tmp_path / "adapter", config), torch.float32)
    exact.write(tmp_path / "exact")
    assert exact.update_kept is None
    model = load(tmp_path / "exact")
    assert model.config.dtype == torch.float32
    peft.load_adapter(tmp_path / "adapter", "shrunk")
    peft.set_adapter("shrunk")
    assert torch.allclose(logits(model), logits(peft), atol=1e-5)

    nearest = {name: one.bfloat16() for name, one in tensors(tmp_path / "exact").items()}
    save_file(nearest, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    found = check.compare_tensors(peft, {}, tmp_path / "out")
    assert len(found["wrong"]) == 6 and "q_proj.weight is off by more than a rounding" in " ".join(found["wrong"])
