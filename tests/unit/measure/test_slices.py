"""A sharded run predicted from slices of its model: against the whole model, and against sums done by hand."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from finetune.config import load
from finetune.engine.training.loss import StepStatistics
from finetune.measure import dry_run_slices, held, measurements, slices
from finetune.measure.measurements import Measurement
from finetune.measure.predict import Curve
from finetune.measure.probe import saved_bytes, saved_bytes_without_checkpointing
from tests.helpers import tiny


def build(layers: int, folder: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def build_glm(layers: int, folder: Path, experts: int = 8) -> Any:
    """A mixture of experts whose first layer is dense."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = dict(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64, n_routed_experts=experts,
        num_local_experts=experts, num_experts_per_tok=2, first_k_dense_replace=1, experts_implementation="eager",
    )  # fmt: skip
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**shape))
    model.save_pretrained(folder)
    return model


def test_a_slice_is_the_first_layers_of_the_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = build(6, tmp_path / "whole")
    folder = slices.write_slice(tmp_path / "whole", 2, tmp_path / "slice")
    part = AutoModelForCausalLM.from_pretrained(folder)
    expected = {
        name: value for name, value in whole.state_dict().items() if ".layers." not in name or ".layers.0." in name
        or ".layers.1." in name
    }  # fmt: skip
    assert part.state_dict().keys() == expected.keys()
    for name, value in part.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize(("layers", "expected"), [(2, None), (3, (1, 2)), (4, (1, 2)), (5, (2, 4)), (80, (2, 4))])
def test_how_many_layers_are_measured(layers: int, expected: tuple[int, int] | None) -> None:
    assert slices.slice_layers(layers) == expected


@pytest.mark.parametrize(
    ("layers", "dense", "expected"),
    [(80, 1, (2, 4)), (61, 3, (4, 6)), (5, 1, (2, 4)), (5, 2, None), (4, 1, None), (3, 1, None)],
)
def test_slices_have_all_dense_layers(layers: int, dense: int, expected: tuple[int, int] | None) -> None:
    assert slices.slice_layers(layers, dense) == expected


def test_parameters_of_a_mixture_of_experts_from_its_slices(tmp_path: Path) -> None:
    """All and active ones of a model with a dense layer, extrapolated from slices with that layer."""
    from finetune.engine.model import experts

    whole = experts.count(build_glm(7, tmp_path / "whole"))
    sizes = held.read_sizes(tmp_path / "whole")
    correction = 8  # numbers of a layer in the files that are no parameters: e_score_correction_bias
    assert sizes is not None and sizes.total == whole.total + 6 * correction and sizes.dense_layers == 1
    cut = slices.slice_layers(7, sizes.dense_layers)
    assert cut is not None and cut == (2, 4)
    found = [experts.count(build_glm(layers, tmp_path / str(layers))) for layers in cut]
    assert [sizes.of_first(layers) - (layers - 1) * correction for layers in cut] == [one.total for one in found]
    few, more = (
        replace(
            measured(layers), parameters=one.total, active_parameters=one.active, trainable_parameters=one.trainable
        )
        for layers, one in zip(cut, found, strict=True)
    )
    result = slices.extrapolate(few, more, cut, 7, "hub/model")
    assert (result.parameters, result.active_parameters) == (whole.total, whole.active)
    assert whole.active < whole.total == result.trainable_parameters


# --- activations ------------------------------------------------------------------------------------------------------


class Rows:
    """One row of nine tokens."""

    tokens = label_tokens = np.array([9])
    packs = types.SimpleNamespace(pack_length=None)

    def __getitems__(self, rows: list[int]) -> list[int]:
        return rows

    def largest_first(self) -> np.ndarray:
        return np.array([0])


class Trains:
    """As much of a trainer as `saved_bytes` uses."""

    def __init__(self, model: Any) -> None:
        self.model = self.model_wrapped = model.train()
        self.args = types.SimpleNamespace(device=torch.device("cpu"))
        self.statistics = StepStatistics()

    def collate_rows(self, rows: list[int], pack_length: int | None = None) -> dict[str, Any]:
        ids = torch.arange(9)[None].repeat(len(rows), 1)
        return {"input_ids": ids, "labels": ids}

    def _prepare_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def compute_loss_context_manager(self) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def compute_loss(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> torch.Tensor:
        return model(**inputs, use_cache=False, num_items_in_batch=num_items_in_batch).loss


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_of_slices_give_those_of_the_whole(checkpointing: bool, tmp_path: Path) -> None:
    found = {}
    for layers in (2, 4, 7):
        model = build(layers, tmp_path / str(layers))
        if checkpointing:
            tiny.checkpoint_activations(model)
        found[layers] = saved_bytes(Trains(model), Rows(), 2)  # type: ignore[arg-type]
    each = (found[4] - found[2]) / 2
    assert found[7] == found[2] + 5 * each
    hidden = 2 * 9 * 32 * 4  # bytes of the hidden states
    assert each == hidden if checkpointing else each > 10 * hidden


def test_activations_of_experts_are_those_of_the_ones_that_tokens_are_routed_to(tmp_path: Path) -> None:
    """From slices with the dense layer to the whole; four times as many experts keep little more: two numbers for each
    of an expert's tokens, and the router's logits."""
    found = {
        layers: saved_bytes(Trains(build_glm(layers, tmp_path / str(layers))), Rows(), 2)  # type: ignore[arg-type]
        for layers in (2, 4, 7)
    }
    each = (found[4] - found[2]) / 2
    assert found[7] == pytest.approx(found[2] + 5 * each, rel=0.02)
    many = saved_bytes(Trains(build_glm(4, tmp_path / "many", experts=32)), Rows(), 2)  # type: ignore[arg-type]
    assert many == pytest.approx(found[4], rel=0.1)


def test_activations_without_checkpointing_are_counted_with_it_and_it_stays_on(tmp_path: Path) -> None:
    model = build(2, tmp_path / "model")
    plain = saved_bytes(Trains(model), Rows(), 2)  # type: ignore[arg-type]
    tiny.checkpoint_activations(model)
    with_it = saved_bytes(Trains(model), Rows(), 2)  # type: ignore[arg-type]
    assert saved_bytes_without_checkpointing(Trains(model), Rows(), 2) == plain > with_it  # type: ignore[arg-type]
    assert saved_bytes(Trains(model), Rows(), 2) == with_it  # type: ignore[arg-type]


# --- from slices to the whole -----------------------------------------------------------------------------------------


def measured(layers: int) -> Measurement:
    """Of a machine on which everything is a line over the layers; a layer has two trained tensors."""
    return Measurement(
        facts={
            "model.model_name_or_path": f"/tmp/{layers}",
            "the size of the model": [100 + 10 * layers, 10 * layers, layers],
            "device": "x",
        },
        when="now", per_device=1, global_batch_size=8, seconds_per_micro_batch=0.5 + 0.1 * layers,
        seconds_per_token=1e-3 * layers, residual_seconds=[0.0], backward_share=0.75, data_seconds=0.0,
        optimizer_seconds=0.25 * layers, other_seconds=0.125, start_up_seconds=10.0,
        compute_seconds={str(world): (2.0 + layers) / world for world in (1, 2, 4, 8)}, tokens_per_step=800.0,
        steps=100.0, peak_memory_bytes=float(1000 + 300 * layers), memory_bytes=1e5, parameters=100 + 10 * layers,
        active_parameters=100 + 3 * layers, trainable_parameters=10 * layers,
        gradient_bytes=[7, *[24, 16] * layers, 3], gradient_dtype="float32",
        as_bucket_view=True, gradients_in_peak=True, bucket_cap_bytes=1, first_bucket_bytes=1,
    )  # fmt: skip


def test_the_whole_is_on_the_line_through_its_slices() -> None:
    found = slices.extrapolate(measured(2), measured(4), (2, 4), 32, "hub/model")
    expected = measured(32)
    assert found.facts == expected.facts | {"model.model_name_or_path": "hub/model"}
    for name, value in expected.to_dict().items():
        own = found.to_dict()[name]
        if name == "gradient_bytes":
            assert sorted(own) == sorted(value)
        elif name == "compute_seconds":
            assert own == pytest.approx(value)
        elif isinstance(value, float):
            assert own == pytest.approx(value), name
        elif name != "facts":
            assert own == value, name


def sharded(**changed: Any) -> slices.Sharded:
    """A full fine-tuning of four layers of 100 parameters, and 40 outside them, in 2 bytes each."""
    known: dict[str, Any] = dict(
        whole=measured(4),
        layers=4,
        sizes=held.Sizes(total=440, layer=100, outside=40, root=40),
        stored=held.Storage(layer=2, outside=2, full=True, state=4),
        activation_bytes=900.0,
        fixed_bytes=70.0,
        adapter_bytes=0.0,
        layer_bytes=10.0,
        reduces_once=False,
    )
    return slices.Sharded(**known | changed)


def test_memory_of_a_rank() -> None:
    # Weights, gradients and two states of a half of 440 parameters; two layers and the rest gathered.
    kept, gathered = 440 * 2 * 4 / 2, (2 * 100 + 40) * 2
    # Gradients of the root and of a layer; the layer's in float32, and this rank's half of them in both types; the
    # activations of all layers, and a layer's twice.
    layer = 40 * 2 + 100 * 2 + 100 * 4 + 50 * (4 + 2) + 900 + 2 * 10
    assert sharded().peak_bytes(2) == kept + gathered + layer
    assert sharded(layer_bytes=1e6).peak_bytes(2) == kept + gathered + layer + 50  # the most that was seen to be needed
    assert sharded(layer_bytes=None).peak_bytes(2) == kept + gathered + layer + 50
    assert sharded(fixed_bytes=5000.0).peak_bytes(2) == kept + gathered + 900 + 5000  # at the loss
    # At the end, without activations: an embedding of 300 of its own, gathered; gradients of all 700 outside.
    sizes = held.Sizes(total=1100, layer=100, outside=700, root=400)
    one = sharded(sizes=sizes, activation_bytes=0.0, fixed_bytes=0.0, layer_bytes=None)
    assert one.peak_bytes(2) == 1100 * 2 * 4 / 2 + 300 * 2 + 700 * 2 + 400 * 4 + 200 * (4 + 2)
    frozen = sharded(stored=held.Storage(layer=2, outside=2, full=False, state=0))
    assert frozen.peak_bytes(2) == 440 * 2 / 2 + gathered + 900 + 70
    assert replace(frozen, adapter_bytes=48.0).peak_bytes(2) == frozen.peak_bytes(2) + 24
    # Float32 weights that are gathered in bfloat16, with gradients in bfloat16 until they are reduced in float32.
    wide = held.Storage(layer=4, outside=4, full=True, state=8, gathered=2)
    layer = 40 * 2 + 100 * 2 + 100 * 4 + 50 * 4 + 900 + 2 * 10
    assert sharded(stored=wide).peak_bytes(2) == 440 * 4 * 4 / 2 + gathered + layer
    once = sharded(reduces_once=True)
    assert once.peak_bytes(2) == sharded().peak_bytes(2) + 4 * 440  # while it accumulates
    alone = replace(once, whole=replace(once.whole, global_batch_size=2))
    assert alone.peak_bytes(2) == sharded().peak_bytes(2)
    shared = replace(alone, whole=replace(alone.whole, shared_by=2))  # one group: both rows after each other
    assert shared.peak_bytes(2) == once.peak_bytes(2)


def test_memory_of_adams_states_in_8_bits() -> None:
    job = ["--model.model_name_or_path", "m", "--data.train_file", "x", "--model.dtype", "bfloat16"]
    found = {}
    for optimizer in ("adamw_torch_fused", "adamw_torch_8bit", "sgd"):
        words = [*job, "--model.full_finetuning", "true", "--training.optim", optimizer]
        stored = held.storage(load(words, command="train"))
        assert (stored.layer, stored.gathered) == (2, None)
        found[optimizer] = sharded(stored=stored).peak_bytes(2) - sharded(stored=replace(stored, state=0)).peak_bytes(2)
    assert found == {"adamw_torch_fused": 440 * 4 / 2, "adamw_torch_8bit": 447, "sgd": 0}  # 440 * 2.03 / 2, rounded up
    words = [*job, "--model.full_finetuning", "true", "--training.master_weights"]
    wide, rounds = (held.storage(load([*words, kind], command="train")) for kind in ("float32", "stochastic"))
    assert wide == held.Storage(layer=4, outside=4, full=True, state=8, gathered=2)
    assert rounds == held.Storage(layer=2, outside=2, full=True, state=8)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_that_is_not_the_head_is_no_part_of_the_root(tied: bool, tmp_path: Path) -> None:
    """As `engine.sharding.shard.units` has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
        tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    found = held.read_sizes(tmp_path)
    assert found is not None and found.root == 50 * 64 + 64  # the head and the last norm
    assert found.outside == found.root + (0 if tied else 50 * 64)


def test_parameters_are_counted_from_headers(tmp_path: Path) -> None:
    save_file({"layers.0.a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model-1.safetensors")
    packed = torch.zeros(10, dtype=torch.uint8)  # 4 bits: two in a byte
    save_file({"layers.1.c": packed}, tmp_path / "model-2.safetensors")
    assert held.read_sizes(tmp_path) == held.Sizes(total=15 + 7 + 20, layer=20, outside=7, root=7)
    (tmp_path / "empty").mkdir()
    assert held.read_sizes(tmp_path / "empty") is None


def test_files_of_weights_that_are_in_4_bits_already_have_the_sizes_of_the_model(tmp_path: Path) -> None:
    """Two weights are in a byte, with scales and tables beside them."""
    pytest.importorskip("bitsandbytes")
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.models import write_in_parts

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    LlamaForCausalLM(config).save_pretrained(plain)
    packed.mkdir()
    write_in_parts(packed, config, torch.device("cpu"), nf4=True)
    assert held.read_sizes(packed) == held.read_sizes(plain)


def test_what_is_gathered_and_what_of_it_shows() -> None:
    curve = Curve(points=((1.0, 2.0), (1e9, 2.0)))  # every all-reduce takes two seconds, so each half of one takes one
    work = measured(4).work(8)
    assert work.accumulation == 1
    slow = replace(work, compute_seconds=4 * 40.0)  # a layer: 10 s forward, 30 s backward
    # Forward: what is outside and the first layer. Backward: the last layer's gather, the reduction of the first one
    # and of what is outside.
    assert slices.exposed_seconds(sharded(), slow, curve) == 2 + 1 + 2
    fast, total = replace(work, compute_seconds=0.0), 1 + 4 * 1 + 4 * 2 + 1  # with nothing to hide it
    assert slices.exposed_seconds(sharded(), fast, curve) == total
    twice = replace(fast, accumulation=2)
    assert slices.exposed_seconds(sharded(), twice, curve) == 2 * total
    assert slices.exposed_seconds(sharded(reduces_once=True), twice, curve) == total + (1 + 4 + 4)


def test_a_step_of_several_ranks() -> None:
    found, work = sharded(), measured(4).work(2)
    one = slices.predict(found, work, 2, None)
    assert one.step_seconds == pytest.approx(work.compute_seconds + work.optimizer_seconds / 2 + work.other_seconds)
    assert one.peak_memory_bytes == found.peak_bytes(2)


def test_activations_come_from_what_is_saved() -> None:
    config = load(
        ["--model.model_name_or_path", "m", "--data.train_file", "x", "--model.full_finetuning", "true",
         "--model.dtype", "bfloat16"],
        command="train",
    )  # fmt: skip
    sizes = held.Sizes(total=440, layer=10, outside=40, root=40)
    found = slices.from_slices(measured(2), measured(4), [50, 90], [150, 450], (2, 4), 32, config, sizes, True)
    assert found.activation_bytes == 32 * 20
    assert found.fixed_bytes == (1000 + 300 * 4) - (4 * 10 + 40) * 2 * 4 - 4 * 20
    assert found.layer_bytes == 150
    full = slices.from_slices(measured(2), measured(4), [50, 90], [150, None], (2, 4), 32, config, sizes, True)
    assert full.layer_bytes is None and full.adapter_bytes == 0
    # A LoRA: 4 bytes of weight, 4 of gradient and 8 of AdamW's states, of the slice's layers and of all.
    frozen = replace(config, model=replace(config.model, full_finetuning=False))
    few, more = (replace(measured(layers), trainable_parameters=3 * layers) for layers in (2, 4))
    lora = slices.from_slices(few, more, [50, 90], [150, 450], (2, 4), 32, frozen, sizes, True)
    assert lora.adapter_bytes == 16 * 3 * 32
    assert lora.fixed_bytes == more.peak_memory_bytes - (4 * 10 + 40) * 2 - 4 * 20 - 16 * 3 * 4


# Total, layer, head; activations and loss as a dry run on an H200 measured them, GiB; peak of two H200s with two
# micro-batches of 4,096 tokens (benchmarks/results/2026-11-24-shard-two-h200.jsonl). The record lacks the activations
# of a layer without checkpointing; these are of a layer of that shape on a CPU.
@pytest.mark.parametrize(
    ("total", "layer", "embedding", "tied", "activations", "loss", "in_a_layer", "peak"),
    [
        (1_235_814_400, 60_821_504, 262_668_288, True, 0.25, 1.7788782119750977, 0.416, 7.235225200653076),
        (8_030_261_248, 218_112_000, 525_336_576, False, 1.0, 3.3346190452575684, 0.768, 36.34490442276001),
    ],
)
def test_memory_of_two_gpus_is_predicted_from_above_and_closely(
    total: int, layer: int, embedding: int, tied: bool, activations: float, loss: float, in_a_layer: float, peak: float
) -> None:
    outside = embedding if tied else 2 * embedding + 4096
    found = sharded(
        sizes=held.Sizes(total=total, layer=layer, outside=outside, root=outside - (0 if tied else embedding)),
        activation_bytes=activations * 2**30,
        fixed_bytes=loss * 2**30,
        layer_bytes=in_a_layer * 2**30,
    )
    assert 1 <= found.peak_bytes(2) / 2**30 / peak < 1.07


def test_what_is_kept_is_found_by_the_same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    found = sharded()
    path = slices.save(found)
    assert slices.find(found.whole.facts) == (found, str(path))
    other = found.whole.facts | {"device": "y"}
    assert slices.find(other) == (None, "the nearest dry run differs in: device")
    assert measurements.find(found.whole.facts)[0] is None  # it is no measurement of a run with DDP
    path.write_text(json.dumps({"kind": "sharded"}))
    assert slices.find(found.whole.facts)[0] is None


def test_a_sharded_job_that_does_not_fit_is_refused_with_the_number_that_holds_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(dry_run_slices.measurements, "find_comm", lambda *_: (None, "not measured"))
    two, four = (sharded().peak_bytes(ranks) for ranks in (2, 4))
    found = sharded(whole=replace(measured(4), memory_bytes=(two + four) / 2 / 0.8))
    result = dry_run_slices.sharded_result(found, 50, 2)
    assert not result["go"] and result["reason"] == "the job does not fit on 2 GPUs; it fits on 4"
    assert [row["fits"] for row in result["sharded"]["rows"]] == [False, True, True]
    assert [row["peak_memory_gib"] * 2**30 for row in result["sharded"]["rows"][:2]] == [two, four]
    assert dry_run_slices.sharded_result(found, 50, 4)["go"]
