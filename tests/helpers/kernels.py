"""What models with adapters compute with kernels of this package and without, and small mixtures of experts."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any

import torch

from finetune.engine.kernels import grouped_experts

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "v_proj"]
SMALL: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)


def model_of(kind: str, **given: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    settings = SMALL | {"moe_intermediate_size": 24, "num_experts_per_tok": 2} | given
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings))
    for name, one in model.named_parameters():  # initialized to zeros: all experts alike
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(one)
    return model.requires_grad_(False)


def with_adapter(model: Any, parameters: list[str], **given: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    settings = dict(r=4, lora_alpha=8, target_modules=ATTENTION, target_parameters=parameters) | given
    model = get_peft_model(model, LoraConfig(**settings))
    for name, one in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(one, std=0.3)
    return model.train()


def loss_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of one pass, and of all that is trained."""
    ids = torch.arange(3, 51, device=model.device).reshape(2, 24)
    torch.manual_seed(5)  # dropout
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return loss.detach(), found


def check_equal(model: Any, install: Callable[[Any], int]) -> int:
    """Compare a model with itself after `install`, and return how many layers that changed."""
    loss, gradients = loss_and_gradients(model)
    count = install(model)
    now, after = loss_and_gradients(model)
    torch.testing.assert_close(now, loss, rtol=1e-5, atol=1e-6)
    assert after.keys() == gradients.keys() and len(after) > 3
    for name, one in after.items():
        torch.testing.assert_close(one, gradients[name], rtol=1e-3, atol=1e-6, msg=name)
    return count


def check_experts(model: Any) -> int:
    """The same with `grouped_experts`, which computes as many layers as it changed."""
    with unittest.mock.patch.object(grouped_experts, "gated", wraps=grouped_experts.gated) as called:
        count = check_equal(model, grouped_experts.install)
    assert called.call_count == count == grouped_experts.installed(model)
    return count


KINDS = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


def surviving_share(y: torch.Tensor, without: torch.Tensor, part: torch.Tensor) -> float:
    """How much of an adapter's exact `part` of an output is in the computed one: 1 if nothing of it is rounded away."""
    y, without, part = (one.double() for one in (y, without, part))
    return float(((y - without) * part).sum() / (part * part).sum())
