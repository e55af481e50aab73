"""Experts with adapters inside their grouped products, against PEFT's own forward and autograd on the same weights."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest
import torch
from transformers.integrations import moe

from finetune.engine.kernels import grouped_experts
from patches import transformers_grouped_mm_width
from tests.helpers.kernels import BOTH, KINDS, check_experts, loss_and_gradients, model_of, with_adapter


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_peft(kind: str) -> None:
    model = with_adapter(model_of(kind, **KINDS[kind]), BOTH)
    assert check_experts(model) == (1 if kind == "glm4_moe" else 2)


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        (BOTH[:1], {}),
        (BOTH[1:], {}),
        ([], {}),
        (BOTH, {"r": 16, "use_rslora": True}),
        (BOTH, {"r": 3}),
    ],
    ids=["gate and up", "down", "attention only", "rank 16", "rank 3"],
)
def test_any_adapter(parameters: list[str], given: dict[str, Any]) -> None:
    model = with_adapter(model_of("qwen3_moe", **KINDS["qwen3_moe"]), parameters, **given)
    assert check_experts(model) == 2


def test_what_it_does_not_compute_is_left_as_it_is() -> None:
    """Trained experts, and those of gpt-oss: with biases, transposed, and with a gate of their own."""
    trained = model_of("qwen3_moe", **KINDS["qwen3_moe"]).requires_grad_(True)
    assert grouped_experts.install(trained) == 0
    assert grouped_experts.install(model_of("gpt_oss", num_local_experts=4, head_dim=8)) == 0


def test_experts_of_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """17 numbers are not a multiple of 16 bytes: grouped products refused them in the first step."""
    name = transformers_grouped_mm_width.FUNCTION
    monkeypatch.setattr(moe, name, getattr(moe, name))
    transformers_grouped_mm_width.apply()
    model = with_adapter(model_of("qwen3_moe", **KINDS["qwen3_moe"], moe_intermediate_size=17), BOTH)
    assert grouped_experts.install(model) == 0
    found, gradients = loss_and_gradients(model)
    model.get_base_model().set_experts_implementation("eager")
    loss, wanted = loss_and_gradients(model)
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-6)
    for one, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[one], rtol=1e-3, atol=1e-6, msg=one)


def test_disabled_adapters_are_left_out() -> None:
    model = with_adapter(model_of("qwen3_moe", **KINDS["qwen3_moe"]), BOTH)
    ids = torch.arange(3, 51).reshape(2, 24)
    grouped_experts.install(model)
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        with model.disable_adapter():
            without = model(input_ids=ids).logits
    base = model_of("qwen3_moe", **KINDS["qwen3_moe"]).eval()
    torch.testing.assert_close(without, base(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert (adapted - without).abs().max() > 0.1


def test_experts_without_a_token_have_no_gradient() -> None:
    model = with_adapter(model_of("qwen3_moe", **KINDS["qwen3_moe"]), BOTH)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name.endswith("gate.weight"):  # all tokens to the first two experts
                one.zero_()
    _, gradients = loss_and_gradients(model)
    grouped_experts.install(model)
    _, found = loss_and_gradients(model)
    for name, one in gradients.items():
        torch.testing.assert_close(found[name], one, rtol=1e-3, atol=1e-6, msg=name)
    a = next(one for name, one in found.items() if "experts" in name and "lora_A" in name)
    used = a.view(8, 4, -1).abs().amax((1, 2)) > 0
    assert used.any() and not used.all()


@pytest.mark.parametrize(("loaded", "set_before", "after"), [(True, None, "0"), (True, "1", "1"), (False, None, None)])
def test_unsloth_does_not_try_to_compile_these_kernels(
    loaded: bool, set_before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_adapter(model_of("qwen3_moe", **KINDS["qwen3_moe"]), BOTH)
    monkeypatch.setenv("UNSLOTH_BLOCK_COMPILE", set_before or "")  # also restores what there was
    if set_before is None:
        del os.environ["UNSLOTH_BLOCK_COMPILE"]
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, "unsloth", types.ModuleType("unsloth"))
    assert grouped_experts.install(model) == 2
    assert os.environ.get("UNSLOTH_BLOCK_COMPILE") == after
