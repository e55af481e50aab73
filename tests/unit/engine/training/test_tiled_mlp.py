"""MLPs in tiles: the gradients of whole MLPs, each weight's once, with no tile computed more often than needed."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch

from finetune.engine.kernels import fused_lora
from finetune.engine.sharding import shard
from finetune.engine.training import recompute, tiled_mlp
from finetune.engine.training.recompute import Recomputation
from finetune.errors import UserError
from tests.helpers.tiny import make_moe
from tests.unit.engine.training.test_recompute import IDS, STACK, Operators, gradients, llama

LAYERS, TILE = 3, 25


@pytest.fixture(autouse=True)
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the last is shorter."""
    monkeypatch.setattr(tiled_mlp, "tile_length", lambda tokens, hidden, intermediate: TILE)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the tokens that MLPs compute, and the calls."""
    counts: Counter[str] = Counter()
    original = tiled_mlp.Tiled.whole

    def whole(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counts["tokens"] += x.shape[1]
        counts["longest"] = max(counts["longest"], x.shape[1])
        return original(self, x, *args, **kwargs)

    monkeypatch.setattr(tiled_mlp.Tiled, "whole", whole)
    yield counts


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.allclose(found[name], one, rtol=1e-4, atol=2e-6 * float(one.abs().max())), name


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("kind", ["offload", "selective", False])
def test_the_gradients_are_those_of_whole_mlps(kind: str | bool, adapter: bool, computed: Counter[str]) -> None:
    """And a tile is computed twice with any kind of recomputation: a layer's recomputation ends before its MLP."""
    model = llama(adapter)
    expected = gradients(copy.deepcopy(model))
    recompute.apply(model, Recomputation(kind=kind, tiled_mlp=True), STACK)
    assert_equal(gradients(model), expected)
    assert computed == {"tokens": 2 * IDS.numel() * LAYERS, "longest": TILE}
    recompute.apply(model, Recomputation(kind=kind), STACK)
    found = gradients(model)
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_the_masks_of_dropout_are_those_of_the_forward_pass() -> None:
    """By finite differences of the loss with one seed: other masks in the backward pass have other gradients."""
    model = llama(adapter=True, dropout=0.5)
    recompute.apply(model, Recomputation(kind=True, tiled_mlp=True), STACK)
    found = gradients(model)
    name = next(one for one in found if "layers.0.mlp.up_proj.lora_A" in one)
    weight, step = dict(model.named_parameters())[name], 0.02
    place = int(found[name].abs().argmax())

    def loss(change: float) -> float:
        with torch.no_grad():
            weight.view(-1)[place] += change
        torch.manual_seed(1)
        return float(model(IDS, labels=IDS).loss.detach())

    difference = (loss(step) - loss(-2 * step)) / (2 * step)
    assert difference == pytest.approx(float(found[name].view(-1)[place]), rel=0.02)


def test_fused_adapters_and_autocast_stay_in_use(computed: Counter[str]) -> None:
    model = llama(adapter=True)
    fused_lora.install(model)

    def autocast_gradients(one: Any) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return gradients(one)

    expected = autocast_gradients(model)
    recompute.apply(model, Recomputation(kind=True, tiled_mlp=True), STACK)
    with Operators() as run:
        found = autocast_gradients(model)
    assert computed["longest"] == TILE and run.counts["aten::addmm_"] > 0
    for name, one in expected.items():
        assert float((found[name] - one).norm() / one.norm()) < 0.01, name


def test_gradients_in_16_bits_are_added_up_in_32() -> None:
    """Added in bfloat16, the sum of many tiles would be off by several roundings."""
    model = llama().bfloat16()
    exact = gradients(copy.deepcopy(model).float())
    whole = gradients(model)
    recompute.apply(model, Recomputation(kind=False, tiled_mlp=True), STACK)
    tiled = gradients(model)

    def error(found: dict[str, torch.Tensor]) -> float:
        name = "model.layers.2.mlp.down_proj.weight"
        return float((found[name].float() - exact[name]).norm() / exact[name].norm())

    assert error(tiled) < 1.1 * error(whole)


def test_evaluation_is_in_tiles_as_well(computed: Counter[str]) -> None:
    model = llama().eval()
    expected = model(IDS).logits
    tiled_mlp.set_tiled(model, True)
    with torch.no_grad():
        assert torch.allclose(model(IDS).logits, expected, atol=1e-6)
    assert computed == {"tokens": IDS.numel() * LAYERS, "longest": TILE}


@pytest.mark.parametrize("family", ["Gemma2", "Falcon"])
def test_a_layer_that_does_more_with_the_output_of_its_mlp(family: str) -> None:
    """A norm after the MLP: the layer's recomputation needs the MLP's output. Falcon adds to it in place."""
    model = make_moe(family, num_key_value_heads=1)
    expected = gradients(model)
    recompute.apply(model, Recomputation(kind=True, tiled_mlp=True), STACK)
    assert_equal(gradients(model), expected)


def test_routed_experts_are_left_whole() -> None:
    """Shared experts and dense layers are not."""

    def names(model: Any) -> list[str]:
        chosen = {id(one) for one in tiled_mlp.mlps(model)}
        return [name for name, module in model.named_modules() if id(module) in chosen]

    assert names(make_moe("Qwen2Moe")) == [f"model.layers.{layer}.mlp.shared_expert" for layer in (0, 1)]
    assert names(make_moe("DeepseekV3")) == ["model.layers.0.mlp", "model.layers.1.mlp.shared_experts"]
    with pytest.raises(UserError, match="MixtralForCausalLM has no MLP that can be computed in slices"):
        tiled_mlp.set_tiled(make_moe("Mixtral"), True)
    with pytest.raises(UserError, match="BloomForCausalLM has no MLP that can be computed in slices .one input, and"):
        tiled_mlp.set_tiled(make_moe("Bloom"), True)  # takes a residual, too
    adapted = peft.get_peft_model(make_moe("Mixtral"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UserError, match="and MixtralForCausalLM has no MLP"):
        tiled_mlp.set_tiled(adapted, True)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("kind", [True, False])
def test_a_sharded_layer_is_gathered_and_reduced_once(kind: bool, computed: Counter[str]) -> None:
    """Not once per tile."""
    model = llama()
    expected = gradients(copy.deepcopy(model))
    shard.apply(model, shard.mesh("cpu"), torch.float32)
    counts = []
    for tiled in (False, True):
        recompute.apply(model, Recomputation(kind=kind, tiled_mlp=tiled), STACK)
        with Operators() as run:
            found = {name: shard.gather_full(one) for name, one in gradients(model).items()}
        assert_equal(found, expected)
        counts.append({name: times for name, times in run.counts.items() if name.startswith(("c10d", "fsdp"))})
    assert computed["longest"] == TILE and counts[0] == counts[1] and sum(counts[0].values()) > LAYERS


def test_the_length_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert tiled_mlp.tile_length(1000, 4096, 14336) == tiled_mlp.LEAST
    length = tiled_mlp.tile_length(300_000, 4096, 14336)
    assert 0.99 < length * 14336 * tiled_mlp.INTERMEDIATES / (300_000 * 4096) <= 1
