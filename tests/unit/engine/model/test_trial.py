"""What is tried before training, against PEFT's own arithmetic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.engine.kernels import fused_lora
from finetune.engine.model import trial

RATE = 2e-4


def with_adapter(path: Path, **lora: Any) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).requires_grad_(False)
    for name, one in model.named_parameters():
        if name.endswith("_proj.weight"):
            torch.nn.init.normal_(one, std=one.shape[1] ** -0.5)  # outputs as large as inputs, as in a trained model
    return get_peft_model(model.bfloat16(), LoraConfig(r=8, lora_alpha=8, target_modules="all-linear", **lora)).train()


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_the_part_of_an_adapter_that_rounding_leaves(tiny_model: Path, lora: dict[str, Any]) -> None:
    model = with_adapter(tiny_model, **lora)
    given = {name: one.clone() for name, one in model.named_parameters()}
    peft = trial.surviving_part(model, RATE, torch.bfloat16)
    assert peft is not None and 0.05 < peft < (0.9 if lora else 0.5)
    assert (fused_lora.install(model) == 0) == bool(lora)
    kept = trial.surviving_part(model, RATE, torch.bfloat16)
    assert kept == pytest.approx(peft if lora else 1, abs=0.1)
    assert model.training and all(torch.equal(one, given[name]) for name, one in model.named_parameters())
    if not lora:
        assert trial.surviving_part(model.float(), RATE, torch.float32) == pytest.approx(1, abs=1e-3)


def test_biases_are_no_part_of_an_adapter_and_nan_is_no_share(tiny_model: Path) -> None:
    model = with_adapter(tiny_model).float()
    mlps = [one for one in model.modules() if fused_lora.is_plain_mlp(one)]
    for mlp in mlps:
        mlp.down_proj.base_layer.bias = torch.nn.Parameter(torch.randn(mlp.down_proj.out_features), requires_grad=False)
    assert trial.surviving_part(model, RATE, torch.float32) == pytest.approx(1, abs=1e-3)
    mlps[0].up_proj.base_layer.weight[0, 0] = torch.nan
    share = trial.surviving_part(model, RATE, torch.float32)
    assert share is not None and math.isnan(share)


def test_what_an_mlp_rounds_away_is_found(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up are added to their parts within the MLP."""
    model = with_adapter(tiny_model)
    fused_lora.install(model)
    kept, exact = trial.surviving_part(model, RATE, torch.bfloat16), fused_lora.add_term
    monkeypatch.setattr(fused_lora, "add_term", lambda y, term, dtype: exact(y, term, dtype).to(y.dtype))
    rounded = trial.surviving_part(model, RATE, torch.bfloat16)
    assert kept is not None and rounded is not None and rounded < kept - 0.05


def test_without_an_adapter_there_is_no_part(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert trial.surviving_part(AutoModelForCausalLM.from_pretrained(tiny_model), RATE, torch.float32) is None
