"""Layers that are computed together, against PEFT's own forward and autograd on the same weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from finetune.engine import adapted

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def model_with(path: Path, **lora: Any) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).requires_grad_(False)
    torch.manual_seed(0)
    settings = dict(r=4, lora_alpha=8, target_modules=EVERY, init_lora_weights=False) | lora
    return get_peft_model(model, LoraConfig(**settings)).train()


def loss_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.arange(3, 51).reshape(2, 24)
    torch.manual_seed(5)  # dropout
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return loss.detach(), found


def check_equal(model: Any) -> int:
    """Compare a model with itself after `install`, and return how many layers that changed."""
    loss, gradients = loss_and_gradients(model)
    count = adapted.install(model)
    now, after = loss_and_gradients(model)
    torch.testing.assert_close(now, loss, rtol=1e-5, atol=1e-6)
    assert after.keys() == gradients.keys() and len(after) > 3
    for name, one in after.items():
        torch.testing.assert_close(one, gradients[name], rtol=1e-3, atol=1e-6, msg=name)
    return count


@pytest.mark.parametrize(
    ("lora", "changed"),
    [
        ({}, 14),
        ({"target_modules": ["q_proj", "up_proj"]}, 4),
        ({"rank_pattern": {"k_proj": 2, "up_proj": 6}, "use_rslora": True}, 14),
        ({"modules_to_save": ["lm_head"]}, 14),
        ({"use_dora": True}, 0),
        ({"lora_dropout": 0.3}, 0),
        pytest.param({"lora_bias": True}, 0, marks=pytest.mark.filterwarnings("ignore:.*merging LoRA weights")),
        ({"bias": "all"}, 14),
    ],
    ids=lambda value: " ".join(value) or "every projection" if isinstance(value, dict) else "",
)
def test_loss_and_gradients_are_those_of_peft(tiny_model: Path, lora: dict[str, Any], changed: int) -> None:
    assert check_equal(model_with(tiny_model, **lora)) == changed


def test_an_mlp_without_a_gpu_adds_its_adapters() -> None:
    from finetune.engine.low_rank import Term

    torch.manual_seed(0)
    gate, up, dh = (torch.randn(5, 12, dtype=torch.float64) for _ in range(3))
    terms = [Term(torch.randn(5, 3).double(), torch.randn(3, 12).double(), scaling) for scaling in (0.5, 2.0, -1.0)]
    g, u, d = (y + t.scaling * t.left @ t.right for y, t in zip((gate, up, dh), terms, strict=True))
    g, u = g.requires_grad_(), u.requires_grad_()
    h = nn.functional.silu(g) * u
    expected = [h, h, *torch.autograd.grad(h, (g, u), d)]
    kept = gate.clone()
    found = [adapted.silu_and_multiply(gate, up, *terms[:2]), *adapted.silu_and_multiply_backward(gate, up, dh, *terms)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(gate, kept)  # it is computed with again


def test_with_biases_and_checkpointing() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    config = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for name, one in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(one)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=EVERY, init_lora_weights=False)).train()
    assert check_equal(peft) == 14


def test_what_peft_switches_goes_on_working(tiny_model: Path) -> None:
    from peft import LoraConfig

    plain, model = model_with(tiny_model), model_with(tiny_model)
    adapted.install(model)
    ids = torch.arange(3, 51).reshape(2, 24)

    def logits(one: Any) -> torch.Tensor:
        with torch.no_grad():
            return one(input_ids=ids).logits

    with plain.disable_adapter(), model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(plain))
    for one in (plain, model):
        torch.manual_seed(1)
        one.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        one.base_model.set_adapter(["default", "second"])
    torch.testing.assert_close(logits(model), logits(plain))
    for one in (plain, model):
        one.base_model.set_adapter("default")
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data.mul_(1.5)
    torch.testing.assert_close(logits(model), logits(plain))  # the copy's layers are its own
    torch.testing.assert_close(logits(model.merge_and_unload()), logits(plain), rtol=1e-4, atol=1e-4)


def test_bfloat16_and_autocast_give_their_dtype(tiny_model: Path) -> None:
    model = model_with(tiny_model)
    adapted.install(model)
    ids = torch.arange(3, 51).reshape(2, 24)
    exact = model(input_ids=ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    assert all(one.grad.dtype == one.dtype for one in model.parameters() if one.requires_grad)
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(1, layer.in_features)).dtype == torch.bfloat16
