"""Sharding without ranks: what is refused, which modules are units, files of tensors, loading unit by unit."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.config import ConfigError, load
from finetune.engine.sharding import (
    shard,
    unit_loading,
)
from finetune.errors import UserError
from finetune.runtime.ranks.distributed import Ranks
from tests.helpers.layers import Model

SHARD = ("--training.strategy", "shard")


def config(*extra: str, model: str = "m"):
    return load(["--model.model_name_or_path", model, "--data.train_file", "t.jsonl", *SHARD, *extra])


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (("--model.backend", "unsloth"), "model.backend"),
        (("--model.load_in_8bit",), "load_in_8bit"),
        (("--model.load_in_fp8",), "load_in_fp8"),
        (("--model.dtype", "float16"), "model.dtype"),
        (("--lora.modules_to_save", "[lm_head]"), "modules_to_save"),
        (("--lora.adapter_kwargs", "{use_dora: true}"), "use_dora"),
        (("--training.optim", "adamw_8bit"), "training.optim"),
        (("--training.optim", "adamw_torch_8bit", "--training.optim_args", "block_size=128"), "training.optim_args"),
        (("--training.gradient_checkpointing", "unsloth"), "gradient_checkpointing"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(extra: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(*extra)
    assert len(refused.value.problems) == 1 and said in refused.value.problems[0]


def test_a_setting_for_sharded_models_needs_one() -> None:
    with pytest.raises(ConfigError, match="shard_reduce applies only to a sharded model"):
        load(["--model.model_name_or_path", "m", "--data.train_file", "t", "--training.shard_reduce", "once"])


def test_units_are_the_layers_and_an_embedding_that_is_not_tied() -> None:
    assert [name for name, _ in shard.units(Model(tied=True))] == ["layers.0", "layers.1"]
    assert [name for name, _ in shard.units(Model(tied=False))] == ["embedding", "layers.0", "layers.1"]


@pytest.mark.parametrize("classes", [None, [], ["Other"]])
def test_a_model_without_a_layer_class_is_refused(classes: Any) -> None:
    model = Model(tied=False)
    model._no_split_modules = classes
    with pytest.raises(UserError, match="shards a model layer by layer, and Model names"):
        shard.units(model)


def test_float16_that_auto_chose_is_refused() -> None:
    with pytest.raises(UserError, match="model.dtype: auto is float16"):
        shard.check("cuda", torch.float16)
    shard.check("cuda", torch.bfloat16)


@pytest.mark.usefixtures("one_rank_group")
def test_gradients_are_kept_until_they_are_reduced() -> None:
    """And what is sharded is seen; a pass without a backward pass leaves no parameter gathered after `reshard`."""
    torch.manual_seed(0)
    plain, ids = Model(tied=True), torch.tensor([[1, 2, 3]])
    sharded = copy.deepcopy(plain)
    shard.apply(sharded, shard.mesh("cpu"), torch.float32)
    found = shard.inspect(sharded)
    assert (found.units, found.sharded_fraction, found.whole_matrices) == (3, 1.0, ())
    assert (found.param_dtypes, found.reduce_dtypes, found.output_dtype) == (("stored",), ("float32",), "float32")
    weight = dict(sharded.named_parameters())["layers.0.linear.weight"]
    for reduces in (False, True):
        shard.set_reduction(sharded, reduces)
        sharded(ids).square().sum().backward()
        plain(ids).square().sum().backward()
        assert (weight.grad is not None) is reduces
    expected: dict[str, Any] = {name: one.grad for name, one in plain.named_parameters()}
    gradients: dict[str, Any] = {name: one.grad for name, one in sharded.named_parameters()}
    assert all(torch.allclose(shard.gather_full(gradients[name]), one, atol=1e-5) for name, one in expected.items())
    norm = torch.linalg.vector_norm(torch.cat([one.flatten() for one in expected.values()]))
    assert torch.allclose(shard.total_norm(gradients.values()), norm)
    with torch.no_grad():
        sharded(ids)
    assert shard.inspect(sharded).whole_matrices  # the root keeps what it has gathered
    shard.reshard(sharded)
    assert not shard.inspect(sharded).whole_matrices


def test_the_norm_of_a_large_tensor_is_exact() -> None:
    """torch's vector_norm is off by 7e-4 here on a CPU, so parts of a tensor would have another norm than the whole."""
    torch.manual_seed(0)
    numbers = torch.randn(2**24 + 5)
    expected = numbers.double().norm()
    for tensors in ([numbers], numbers.split(2**20), [numbers, numbers[:0]]):
        assert float((shard.total_norm(tensors).double() - expected).abs() / expected) < 1e-6


def test_ranks_do_not_share_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch adds the tag to every key of its caches; a user's own stays."""
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "mine")
    tags = set()
    for rank in (0, 1):
        me = Ranks(rank=rank, local_rank=rank, world_size=2, local_world_size=2)
        monkeypatch.setattr(shard.distributed, "ranks", lambda me=me: me)
        torch.compiler.config.cache_key_tag = "mine"
        for _ in range(2):
            shard.separate_compile_caches()
        tags.add(torch.compiler.config.cache_key_tag)
    assert tags == {"mine rank 0 of 2", "mine rank 1 of 2"}


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    me = Ranks(rank=0, local_rank=0, world_size=2, local_world_size=2)
    monkeypatch.setattr(shard.distributed, "ranks", lambda: me)


@pytest.mark.usefixtures("two_ranks")
def test_a_meta_model_gets_its_weights(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    given = config(model=str(tiny_model))
    stored = unit_loading.loadable_files(given)
    assert stored is not None
    model = unit_loading.meta_model(given, torch.bfloat16, {})
    assert all(one.untyped_storage().nbytes() == 2 for one in model.parameters())
    for _, unit in (*shard.units(model), ("", model)):
        unit_loading.load_unit(unit, stored, torch.device("cpu"))
    whole = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    expected = whole.state_dict()
    assert expected.keys() == model.state_dict().keys()
    assert all(torch.equal(one, expected[key]) for key, one in model.state_dict().items())
    ids = torch.arange(5)[None]
    assert torch.equal(model(ids).logits, whole.eval()(ids).logits)  # its buffers as well


@pytest.mark.usefixtures("two_ranks")
def test_what_cannot_be_loaded_by_unit_is_loaded_in_turns(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model, other := tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({f"renamed.{key}": value for key, value in weights.items()}, other / "model.safetensors")
    assert unit_loading.loadable_files(config(model=str(other))) is None
    turns = []
    monkeypatch.setattr(unit_loading, "distributed", SimpleNamespace(barrier=lambda: turns.append("wait")))
    with unit_loading.one_rank_at_a_time(1, 3):
        turns.append("load")
    assert turns == ["wait", "load", "wait", "wait"]
