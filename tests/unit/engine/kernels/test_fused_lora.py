"""Layers that are computed together, against PEFT's own forward and autograd on the same weights."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.engine.kernels import fused_lora
from tests.helpers import kernels, tiny
from tests.helpers.kernels import check_equal

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def model_with(path: Path, **lora: Any) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).requires_grad_(False)
    torch.manual_seed(0)
    settings = dict(r=4, lora_alpha=8, target_modules=EVERY, init_lora_weights=False) | lora
    return get_peft_model(model, LoraConfig(**settings)).train()


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
    assert check_equal(model_with(tiny_model, **lora), fused_lora.install) == changed


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
def test_layers_are_compiled_whole_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Unsloth compiles decoder layers: no adapter breaks one in pieces, and one layer's code serves all."""
    from peft import LoraConfig, get_peft_model
    from torch._dynamo.testing import CompileCounterWithBackend
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    compiled = CompileCounterWithBackend("aot_eager")

    def install(model: Any) -> int:
        whole = torch.compile(LlamaDecoderLayer.forward, backend=compiled, fullgraph=True)
        monkeypatch.setattr(LlamaDecoderLayer, "forward", whole)
        return fused_lora.install(model)

    adapters = LoraConfig(r=4, target_modules=EVERY, init_lora_weights=False)
    model = get_peft_model(kernels.model_of("llama", num_hidden_layers=4), adapters).train()
    model.config.use_cache = False
    assert check_equal(model, install) == 28
    assert compiled.frame_count == 2  # and the first layer, whose input has no gradient


@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_layer_rounds_once(tiny_model: Path, autocast: bool) -> None:
    model = model_with(tiny_model)
    fused_lora.install(model if autocast else model.bfloat16())
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    x = torch.randn(2, 7, layer.in_features).to(layer.weight.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)(x)
        assert found.dtype == torch.bfloat16 and torch.equal(found, layer(x))
        copied = copy.deepcopy(layer)  # with a weight of its own
        copied.weight.data.mul_(2)
        found = torch.compile(copied.forward, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(found, copied(x)) and not torch.equal(found, layer(x))


def test_unsloths_projections_are_compiled_whole(tiny_model: Path) -> None:
    model = model_with(tiny_model)
    attention = model.get_base_model().model.layers[0].self_attn
    attention.apply_qkv = None  # as Unsloth sets it
    fused_lora.install(model)
    x = torch.randn(2, 7, attention.q_proj.in_features)
    compiled = torch.compile(attention.apply_qkv, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(attention, x), attention.apply_qkv(attention, x))


def test_an_mlp_without_a_gpu_adds_its_adapters() -> None:
    from finetune.engine.kernels.low_rank import LowRankTerm

    torch.manual_seed(0)
    gate, up, dh, down = (torch.randn(n, 12, dtype=torch.float64) for n in (5, 5, 5, 3))
    terms = [
        LowRankTerm(torch.randn(5, 3).double(), torch.randn(3, 12).double(), scaling) for scaling in (0.5, 2.0, -1.0)
    ]
    g, u, d = (y + t.scaling * t.left @ t.right for y, t in zip((gate, up, dh), terms, strict=True))
    g, u = g.requires_grad_(), u.requires_grad_()
    h = nn.functional.silu(g) * u
    dg, du = torch.autograd.grad(h, (g, u), d)
    products = [0.5 * dg.T @ terms[0].left, 2.0 * du.T @ terms[1].left, -terms[2].left.T @ h]
    kept = gate.clone()
    *gradients, found = fused_lora.silu_and_multiply_backward(gate, up, dh, *terms)
    h_found, _, inner = fused_lora.silu_and_multiply(gate, up, *terms[:2], down)
    found = [h_found, inner, *gradients, *found]
    for one, other in zip(found, [h, h @ down.T, dg, du, *products], strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(gate, kept)  # it is computed with again


@pytest.mark.parametrize(("scale", "plain"), [(1.0, True), (0.5, False)])
def test_an_mlp_that_does_more_keeps_its_forward(scale: float, plain: bool) -> None:
    """Falcon-H1's scales gate and output, where its configuration says so."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import FalconH1Config
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP

    torch.manual_seed(0)
    config = FalconH1Config(hidden_size=32, intermediate_size=64, mlp_multipliers=[scale, scale])
    model: Any = torch.nn.ModuleDict({"mlp": FalconH1MLP(config)}).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=list(fused_lora.MLP), init_lora_weights=False), model)
    x = torch.randn(3, 32)
    before = model["mlp"](x)
    assert fused_lora.install(model) == 3 and ("forward" in vars(model["mlp"])) == plain
    torch.testing.assert_close(model["mlp"](x), before)


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
    tiny.checkpoint_activations(model)
    model.enable_input_require_grads()
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=EVERY, init_lora_weights=False)).train()
    assert check_equal(peft, fused_lora.install) == 14


@pytest.mark.parametrize("targets", [["down_proj"], EVERY], ids=["one layer", "an MLP"])
def test_an_output_can_be_changed_in_place(tiny_model: Path, targets: list[str]) -> None:
    """As Llama 4 adds its experts to the output of its shared expert: it refused, on any CPU or GPU."""
    model = model_with(tiny_model, target_modules=targets)
    mlp = model.base_model.model.model.layers[0].mlp
    x = torch.randn(5, 64, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        y = mlp(x)
        y.mul_(2.0).add_(x)
        return list(torch.autograd.grad(y.sum(), [x, *(one for one in mlp.parameters() if one.requires_grad)]))

    plain = gradients()
    assert fused_lora.install(model) > 0
    for one, other in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_what_peft_switches_goes_on_working(tiny_model: Path) -> None:
    from peft import LoraConfig

    plain, model = model_with(tiny_model), model_with(tiny_model)
    fused_lora.install(model)
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
    fused_lora.install(model)
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


class Kernels(TorchDispatchMode):
    """Counts what would be launched on a GPU, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("adapters", "scaling"), [((4, 8, 2), 1.0), ((4, 0, 2), 0.5)])
def test_adapters_in_float32_are_cast_by_one_kernel_each_way(adapters: tuple[int, ...], scaling: float) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 24, bias=False).to(torch.bfloat16).requires_grad_(False) for _ in adapters]
    pairs = [(torch.randn(r, 32), torch.randn(24, r)) if r else (None, None) for r in adapters]
    factors = [None if one is None else one.requires_grad_() for pair in pairs for one in pair]
    x = torch.randn(2, 5, 32, dtype=torch.bfloat16, requires_grad=True)
    given = [torch.randn(2, 5, 24, dtype=torch.bfloat16) for _ in layers]
    group = fused_lora.Group(tuple(layers), (scaling,) * len(layers), adapters)
    with Kernels() as kernels:
        found = fused_lora._Project.apply(x, group, *factors)
        torch.autograd.backward(found, given)
    assert kernels.counted["_foreach_copy_"] == 2
    assert "_to_copy" not in kernels.counted
    assert kernels.counted["cat"] == 1  # of the gradients of x A^T
    assert kernels.counted["mul"] == (0 if scaling == 1.0 else 3 * sum(map(bool, adapters)))

    inputs = [one for one in (x, *factors) if one is not None]
    got = [one.grad for one in inputs]
    outputs = [
        layer(x) + (scaling * (x @ a.to(x.dtype).t()) @ b.to(x.dtype).t() if a is not None else 0)
        for layer, (a, b) in zip(layers, zip(factors[::2], factors[1::2], strict=True), strict=True)
    ]
    expected = torch.autograd.grad(outputs, inputs, given)
    for one, other in zip([*found, *got], [*outputs, *expected], strict=True):
        assert one is not None and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-1)  # bfloat16 rounds at other places
