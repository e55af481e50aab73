"""FP8 weights against products of rounded numbers in float32, written out here; no kernel of the package is reused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from finetune.config import ConfigError, load
from finetune.engine.kernels import fp8, fused_lora
from finetune.errors import UserError


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Each row rounded to e4m3 with its own scale."""
    scale = x.abs().max(dim=-1, keepdim=True).values / 448
    scale[scale == 0] = 1
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def frozen(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


@pytest.mark.fp8
def test_products_and_gradients_are_those_of_rounded_numbers() -> None:
    torch.manual_seed(0)
    layers = [frozen(64, 96, bias=True), frozen(64, 32)]
    a = [torch.randn(4, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)]
    b = [torch.randn(96, 4, requires_grad=True), torch.randn(32, 8, requires_grad=True)]
    x, scalings = torch.randn(2, 7, 64, requires_grad=True), [0.5, 2.0]
    given = [torch.randn(2, 7, 96), torch.randn(2, 7, 32)]
    converted = [fp8.Linear(layer) for layer in layers]
    pairs = [one for pair in zip(a, b, strict=True) for one in pair]
    got = fused_lora._Project.apply(x, fused_lora.Group(tuple(converted), tuple(scalings), (4, 8)), *pairs)
    torch.autograd.backward(got, given)
    for index, layer in enumerate(layers):
        expected = rounded(x) @ rounded(layer.weight).t() + scalings[index] * (x @ a[index].t()) @ b[index].t()
        expected = expected if layer.bias is None else expected + layer.bias
        torch.testing.assert_close(got[index], expected, rtol=1e-5, atol=1e-5)
    dx = torch.zeros_like(x)
    for index, layer in enumerate(layers):
        g, s = given[index], scalings[index]
        dx += rounded(g) @ rounded(layer.weight.t().contiguous()).t() + s * (g @ b[index]) @ a[index]
        da = s * (g @ b[index]).flatten(0, 1).t() @ x.flatten(0, 1)
        db = s * g.flatten(0, 1).t() @ (x @ a[index].t()).flatten(0, 1)
        torch.testing.assert_close(a[index].grad, da, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(b[index].grad, db, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad, dx, rtol=1e-4, atol=1e-4)


@pytest.mark.fp8
def test_a_token_does_not_depend_on_its_neighbors() -> None:
    torch.manual_seed(1)
    layer, x = fp8.Linear(frozen(64, 96)), torch.randn(9, 64)
    x[3] *= 1000
    whole = layer(x)
    for row in range(9):
        torch.testing.assert_close(layer(x[row]), whole[row], rtol=1e-5, atol=1e-6 * float(x[row].norm()))


@pytest.mark.fp8
def test_rows_of_zeros_and_the_weight_that_others_read() -> None:
    layer = frozen(32, 16)
    layer.weight[2] = 0
    converted = fp8.Linear(layer)
    assert torch.equal(converted(torch.zeros(3, 32)), torch.zeros(3, 16))
    assert torch.equal(converted.weight[2], torch.zeros(32))
    assert (converted.weight - layer.weight).norm() / layer.weight.norm() < 0.04
    assert converted.weight.dtype == torch.float32 and "weight" not in dict(converted.named_parameters())


def with_adapter(model_path: Path, **lora: Any) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path).requires_grad_(False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **lora)
    return get_peft_model(model, config)


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    return {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and "lora_" not in name}


@pytest.mark.fp8
@pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"lora_dropout": 0.5}], ids=["plain", "DoRA", "dropout"])
def test_a_model_computes_what_rounded_layers_compute(tiny_model: Path, lora: dict[str, Any]) -> None:
    """Against PEFT's own layers on a model whose linear layers round their numbers in float32."""

    class Rounded(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Round.apply(x, self.weight)

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(weight)
            return rounded(x) @ rounded(weight).t()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            (weight,) = ctx.saved_tensors
            return rounded(gradients[0]) @ rounded(weight.t().contiguous()).t(), None

    reference, converted = with_adapter(tiny_model, **lora).train(), with_adapter(tiny_model, **lora).train()
    for name, layer in linear_layers(reference).items():
        if not any(kept in name for kept in ("lm_head", "v_proj", "o_proj")):
            layer.__class__ = Rounded
    count = fp8.convert(converted)
    assert (fused_lora.install(converted) == 0) == bool(lora)
    assert count == sum(type(layer) is Rounded for layer in linear_layers(reference).values()) > 7
    ids = torch.arange(48).reshape(2, 24)
    losses = []
    for model in (reference, converted):
        torch.manual_seed(5)  # dropout
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    close = 0.99 if "use_dora" in lora else 0.999  # DoRA divides by the norm of the weight, which is rounded here
    gradients = {name: one.grad for name, one in reference.named_parameters() if one.requires_grad}
    for name, one in converted.named_parameters():
        if one.requires_grad:
            assert torch.nn.functional.cosine_similarity(one.grad.flatten(), gradients[name].flatten(), dim=0) > close
            assert one.grad.norm() / gradients[name].norm() == pytest.approx(1, rel=0.02 if close > 0.99 else 0.05)
    with converted.disable_adapter(), reference.disable_adapter():
        torch.testing.assert_close(converted(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=0, atol=1e-3)


def test_the_size_counts_each_weight_once_and_the_head_stays(tiny_model: Path) -> None:
    from finetune.engine.job import model_size

    model = with_adapter(tiny_model)
    before = model_size(model)
    fp8.convert(model)
    assert model_size(model) == before
    assert not isinstance(model.get_output_embeddings(), fp8.Linear)


def test_the_ends_of_a_deep_model_stay_in_16_bits() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=12)).requires_grad_(False)
    assert fp8.convert(model) == 9 * 5
    found = {name for name, one in model.named_modules() if isinstance(one, fp8.Linear)}
    assert {name.split(".")[2] for name in found} == {str(layer) for layer in range(1, 10)}
    assert {name.split(".")[-1] for name in found} == {"q_proj", "k_proj", "gate_proj", "up_proj", "down_proj"}


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--model.load_in_fp8", "true", "--model.load_in_4bit", "true", "--model.model_name_or_path", "x",
              "--data.train_file", "y"], command="train")  # fmt: skip
    assert "load_in_4bit and load_in_fp8 exclude each other" in str(caught.value)
    with pytest.raises(UserError, match="no frozen linear layer"):
        from transformers import LlamaConfig, LlamaForCausalLM

        fp8.convert(LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=20, intermediate_size=20,
                                                 num_hidden_layers=1, num_attention_heads=2)))  # fmt: skip

    def absent(*arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0")

    monkeypatch.setattr(torch, "_scaled_mm", absent)
    with pytest.raises(UserError, match="does not multiply FP8 into bfloat16 .*Set it to false"):
        fp8.check("cpu", torch.bfloat16)
