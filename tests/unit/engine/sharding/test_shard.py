"""Sharding without ranks: what is refused, which modules are units, files of tensors, loading unit by unit."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from finetune.config import ConfigError, load
from finetune.engine.checkpoint import tensor_files
from finetune.engine.monitoring import invariants
from finetune.engine.sharding import (
    checkpoint_weights,
    digests,
    memory_per_rank,
    quantized_storage,
    shard,
    unit_loading,
)
from finetune.errors import RunError, UserError
from finetune.runtime.hooks import Hooks
from finetune.runtime.ranks.distributed import Ranks

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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Model(nn.Module):
    """Two layers, an embedding and a head."""

    _no_split_modules: Any = ("Layer",)

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.layers = nn.ModuleList([Layer(), Layer()])
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return 2 * self.head(x)  # FSDP2 warns of outputs that are views

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


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


def test_a_script_that_saves_the_model_itself_is_refused() -> None:
    with pytest.raises(UserError, match="has a `save` function"):
        shard.check("cpu", torch.float32, Hooks(save=lambda model, tokenizer: None))


def test_an_adapter_with_rows_of_zeros_is_not_saved_whole() -> None:
    checkpoint_weights.check_adapter(80, 80)
    with pytest.raises(RunError, match="the ranks hold 80 elements other than zero, the file 10"):
        checkpoint_weights.check_adapter(80, 10)


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    """A gloo group of this process alone, which FSDP2 shards over like any other."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


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


# --- 4-bit weights ----------------------------------------------------------------------------------------------------


def four_bits(rows: int, columns: int) -> Any:
    from bitsandbytes.nn import Linear4bit, Params4bit

    torch.manual_seed(0)
    layer = Linear4bit(columns, rows, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    weight: Any = Params4bit
    layer.weight = weight(torch.randn(rows, columns), requires_grad=False, quant_type="nf4")
    return layer.to("cpu")


def test_4_bit_weights_are_stored_as_float32_with_the_same_bytes() -> None:
    from bitsandbytes.functional import dequantize_4bit

    layer, x = four_bits(24, 64), torch.randn(3, 64)
    expected = x @ dequantize_4bit(layer.weight.data, layer.weight.quant_state).t()
    content = layer.weight.data.view(torch.uint8).flatten().clone()
    assert quantized_storage.store_as_float32(nn.ModuleList([layer]), torch.device("cpu")) == 1
    assert layer.weight.dtype == torch.float32 and layer.weight.shape == (len(content) // 4, 1)
    assert torch.equal(layer.weight.data.view(torch.uint8).flatten(), content)
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_4_bit_weights_that_fill_no_whole_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="has 33 bytes"):
        quantized_storage.store_as_float32(nn.ModuleDict({"a": four_bits(1, 66)}), torch.device("cpu"))


def test_a_4_bit_layer_on_a_cpu_has_the_right_gradient_after_an_evaluation() -> None:
    """On CPUs with AVX512-BF16, bitsandbytes repacks weights in the first evaluation and then computes with a kernel
    without a backward pass. On others this passes anyway."""
    from bitsandbytes.functional import dequantize_4bit

    from finetune.engine.model.loading import keep_4bit_layout

    layer, x, gradient = four_bits(64, 64), torch.randn(3, 64, requires_grad=True), torch.randn(3, 64)
    expected = gradient @ dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    keep_4bit_layout(layer)
    layer.eval()
    with torch.no_grad():
        layer(x)
    layer.train()
    layer(x).backward(gradient)
    assert x.grad is not None and torch.allclose(x.grad, expected, atol=1e-5)


# --- files of tensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_a_digest_tells_every_changed_byte(dtype: torch.dtype) -> None:
    """Also where the bytes do not fill whole words, and where two words change places."""
    content = torch.randint(0, 256, (14 if dtype != torch.float32 else 16,), dtype=torch.uint8)
    before = digests.digest(content.view(dtype))
    for place in range(len(content)):
        other = content.clone()
        other[place] ^= 1
        assert digests.digest(other.view(dtype)) != before
    words = torch.arange(1, 9, dtype=torch.int32)
    assert digests.digest(words) != digests.digest(words.flip(0))
    assert digests.digest(words) == sum(value * odd for value, odd in zip(range(1, 9), range(1, 17, 2), strict=True))


@pytest.mark.usefixtures("one_rank_group")
def test_frozen_weights_that_are_gathered_with_other_bytes_are_named() -> None:
    """On CUDA, torch's copy for the all-gather makes one pattern of all NaN of a 16-bit type."""
    model = Model(tied=False)
    model.layers.requires_grad_(False)
    packed = torch.tensor([0x7F86, 0x7F95] * 8, dtype=torch.int16).view(torch.bfloat16).view(4, 4)
    layer: Any = model.layers[1]
    layer.linear.register_parameter("weight", nn.Parameter(packed, requires_grad=False))
    shard.apply(model, shard.mesh("cpu"), torch.float32)
    assert digests.changed_weights(model) == ()
    own = layer.linear.weight.to_local()
    own.view(torch.int16).copy_(torch.full((4, 4), 0x7FFF, dtype=torch.int16))
    assert digests.changed_weights(model) == ("layers.1.linear.weight",)
    assert isinstance(layer.linear.weight, DTensor)  # freed again


def test_tensors_come_back_from_one_file_or_several(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(i + 1, 3) for i in range(7)} | {"scalar": torch.tensor(2.0)}
    for name, most, count in (("one", None, 1), ("many", 50, 7)):
        folder = tmp_path / name
        folder.mkdir()
        tensor_files.write(folder, "model", tensors, file_bytes=most)
        assert len(list(folder.glob("*.safetensors"))) == count
        read = tensor_files.TensorFiles(folder, "model")
        assert set(read.keys()) == set(tensors)
        assert all(torch.equal(read.read_full(key), value) for key, value in tensors.items())
        assert torch.equal(read.read_rows("t4", 1, 3), tensors["t4"][1:3]) and read.shape("t4") == (5, 3)


def test_transformers_reads_the_files(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tensor_files.write(tmp_path, "model", checkpoint_weights.weights(model), file_bytes=40_000)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    shutil.copy(tiny_model / "config.json", tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(one, again.state_dict()[key]) for key, one in model.state_dict().items())


@pytest.mark.parametrize(
    "name", ["../m.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 3, "..\\m.safetensors"]
)
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="does not name the files"):
        tensor_files.TensorFiles(tmp_path, "model")


def test_an_optimizer_comes_back(tmp_path: Path) -> None:
    """Its state, from files without pickle, as torch's own dictionary has it; for a parameter of another shape not."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensor_files.write_optimizer(tmp_path, optimizer)
    assert not list(tmp_path.glob("*.pt"))
    read = tensor_files.read_optimizer(tmp_path, list(model.parameters()))
    expected = optimizer.state_dict()
    assert read["param_groups"] == expected["param_groups"]
    for index, state in expected["state"].items():
        assert all(torch.equal(read["state"][index][name], value) for name, value in state.items())
    with pytest.raises(ValueError, match="its parameter"):
        tensor_files.read_optimizer(tmp_path, list(nn.Linear(4, 2).parameters()))


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    me = Ranks(rank=0, local_rank=0, world_size=2, local_world_size=2)
    monkeypatch.setattr(shard.distributed, "ranks", lambda: me)


@pytest.mark.usefixtures("two_ranks")
def test_a_meta_model_gets_its_weights(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    given = config(model=str(tiny_model))
    stored = unit_loading.loadable_files(given, Hooks())
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
    hook = Hooks(model=lambda model, tokenizer: model)
    assert unit_loading.loadable_files(config(model=str(tiny_model)), hook) is None
    shutil.copytree(tiny_model, other := tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({f"renamed.{key}": value for key, value in weights.items()}, other / "model.safetensors")
    assert unit_loading.loadable_files(config(model=str(other)), Hooks()) is None
    turns = []
    monkeypatch.setattr(unit_loading, "distributed", SimpleNamespace(barrier=lambda: turns.append("wait")))
    with unit_loading.one_rank_at_a_time(1, 3):
        turns.append("load")
    assert turns == ["wait", "load", "wait", "wait"]


# --- memory per rank --------------------------------------------------------------------------------------------------


def test_a_rank_that_holds_the_whole_model_holds_more_than_predicted() -> None:
    """Of what `fully_shard` leaves alone, in each of parameters, gradients and optimizer state."""
    model, ids = Model(tied=True), torch.tensor([[1, 2, 3]])
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids).sum().backward()
    optimizer.step()
    found, elements = memory_per_rank.allocated_bytes(model, optimizer), sum(one.numel() for one in model.parameters())
    assert found == memory_per_rank.RankMemory(parameters=4 * elements, gradients=4 * elements, optimizer=8 * elements)
    assert memory_per_rank.predicted_bytes(model, 1, "adamw_torch") == found
    half = memory_per_rank.predicted_bytes(model, 2, "adamw_torch")
    assert half == memory_per_rank.RankMemory(parameters=2 * elements, gradients=2 * elements, optimizer=4 * elements)
    assert memory_per_rank.excess(found, found) is None
    for name in ("parameters", "gradients", "optimizer"):
        worse = replace(half, **{name: getattr(found, name)})
        assert (memory_per_rank.excess(worse, half) or "").endswith(f"of {name}, predicted {getattr(half, name):,}")
    part = nn.Module()
    part.weight = nn.Parameter(torch.zeros(8, 4)[:4])  # of a larger storage, which it keeps
    with pytest.raises(
        UserError, match="rank 0 holds more memory than predicted .128 bytes of parameters, predicted 64"
    ):
        invariants.check_memory(part, torch.optim.SGD(part.parameters()), "sgd")
