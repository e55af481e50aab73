"""Packs in each family of models: against each document alone in plain transformers, and with a planted leak."""

from __future__ import annotations

import copy
import inspect
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch.nn.attention import varlen

from finetune.config import load
from finetune.data import store
from finetune.data.collate import collate
from finetune.engine import job
from finetune.engine.kernels import attention, by_document
from finetune.engine.model import adapter_coverage, adapters, packing, trial
from finetune.runtime.bootstrap import Stack
from finetune.runtime.ranks import distributed
from finetune.runtime.ranks.context_group import ALONE
from tests.helpers import tiny
from tests.unit.engine.kernels.test_attention import of_each_document

STACK = Stack(backend="transformers", reason="a test", device="cpu", local_rank=0, patches=())
CPU = torch.device("cpu")
WORDS = ["--model.model_name_or_path", "m", "--data.train_file", "x", "--model.dtype", "float32"]
CONFIG = load(WORDS)
APART = "documents are apart bit for bit"
RECURRENT = "recurrent layers run document by document"
ATTENTION = {"Llama": {}, "Gemma3Text": {"head_dim": 16, "sliding_window": 8}, "Qwen3Moe": tiny.FAMILIES["Qwen3Moe"]}
ATTENTION |= {"Gemma2": {"head_dim": 16, "sliding_window": 8}, "GptOss": tiny.FAMILIES["GptOss"]}
# What has no convolution that would show its layers, and sinks beside a mask that is made without positions.
REFUSED = ("MiniMax", "GptOss")
NEWER = Version(version("transformers")) >= Version("5.20")  # packs of Mamba 2 are refused without mamba-ssm


def make(family: str) -> Any:
    if family in tiny.MULTIMODAL:
        return tiny.make_multimodal(family)
    return tiny.make_text(family, (ATTENTION | tiny.RECURRENT)[family])


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    """Of 17 to 70 tokens and one of two, some of which are supervised."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 50, size=length).astype(np.int32) for length in (17, 70, 2, 33, 20, 31)]
    return [(one, np.where(np.arange(len(one)) % 3 == 0, -100, one).astype(np.int32)) for one in ids]


def losses(model: Any, rows: list[Any], pack_length: int | None) -> tuple[list[float], torch.Tensor]:
    """The loss of each supervised token, and the gradient of their sum."""
    found = []
    for one in rows:
        batch = collate([one], pad_token_id=0, pack_length=pack_length)
        given = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
        if pack_length is not None:
            given |= by_document.arguments_of_pack(model, "transformers")(batch["packed_seq_lengths"], CPU)
        logits = model(**given, use_cache=False).logits[0, :-1]
        tokens = torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:], reduction="none")
        tokens.sum().backward()
        found += tokens[batch["labels"][0, 1:] >= 0].tolist()
    trained = [one for one in model.parameters() if one.grad is not None]
    return found, torch.cat([one.grad.flatten() for one in trained])


def assert_as_if_alone(packed: Any, plain: Any) -> None:
    found, gradient = losses(packed, [documents()], 192)
    expected, expected_gradient = losses(plain, [[one] for one in documents()], None)
    assert found == pytest.approx(expected, abs=1e-5)
    assert torch.linalg.vector_norm(gradient - expected_gradient) < 1e-5 * torch.linalg.vector_norm(expected_gradient)


@pytest.mark.parametrize("family", [*ATTENTION, *tiny.MULTIMODAL, *tiny.RECURRENT])
def test_packed_documents_are_as_if_alone(family: str) -> None:
    """Losses and gradients, with layers computed again in the backward pass."""
    plain = make(family)
    packed = copy.deepcopy(plain)
    tried = packing.prepare_for_packs(packed, CONFIG, STACK)
    if family in REFUSED:
        assert str(tried.leak).endswith(f"reaches the one before it in {plain.config.model_type}, which was tried")
        return
    if NEWER and family == "RecurrentGemma" and "KeyError: 'sliding_attention'" in str(tried.leak):
        pytest.skip("transformers 5.24 makes its masks for other layers: it trains padded")
    recurrent = bool(by_document.recurrent_layers(packed)) and family != "Lfm2"  # a convolution leaves tokens out
    assert tried.leak is None and tried.proof.startswith(APART) and (RECURRENT[:16] in tried.proof) == recurrent
    assert all(one.grad is None for one in packed.parameters())
    tiny.checkpoint_activations(packed)
    assert_as_if_alone(packed, plain)


@pytest.mark.parametrize("family", ["Lfm2", "Qwen3_5", "Qwen3Next", "FalconH1", "NemotronH", "Mamba", "Rwkv"])
def test_one_recurrent_layer_without_boundaries_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(family)
    layers = by_document.recurrent_layers(model)
    monkeypatch.setattr(by_document, "recurrent_layers", lambda _: dict(list(layers.items())[1:]))
    expected = "can't keep packed sequences apart" if NEWER and family == "FalconH1" else "reaches the one before it"
    assert expected in str(packing.prepare_for_packs(model, CONFIG, STACK).leak)


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3Next", "FalconH1", "NemotronH"])
def test_a_kernel_that_knows_the_boundaries_computes_packs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of flash-linear-attention and mamba-ssm, which need a GPU: transformers' own function for each document
    of the boundaries that those take by these names."""
    plain, packed = make(family), make(family)
    layer = next(iter(by_document.recurrent_layers(packed).values()))
    names = inspect.unwrap(type(layer).forward).__globals__
    (function,) = names.keys() & {"torch_chunk_gated_delta_rule", "mamba2_chunk_scan"}
    own = names[function]

    def kernel(*given: Any, cu_seqlens: Any = None, seq_idx: Any = None, **named: Any) -> Any:
        if seq_idx is None:
            return own(*given, **named)
        lengths = seq_idx[0].unique(return_counts=True)[1].tolist()
        assert cu_seqlens is None or cu_seqlens.diff().tolist() == lengths

        def parts(value: Any) -> list[Any]:
            split = isinstance(value, torch.Tensor) and value.shape[:2] == (1, sum(lengths))
            return list(value.split(lengths, 1)) if split else [value] * len(lengths)

        each = zip(*map(parts, given), strict=True)
        found = [
            own(*one, **{name: parts(value)[place] for name, value in named.items()}) for place, one in enumerate(each)
        ]
        joined = torch.cat([one[0] if isinstance(one, tuple) else one for one in found], 1)
        return (joined, None) if isinstance(found[0], tuple) else joined

    monkeypatch.setitem(names, function, kernel)
    tried = packing.prepare_for_packs(packed, CONFIG, STACK)
    if NEWER and family in ("FalconH1", "NemotronH"):
        pytest.skip("transformers computes no packs with its own function in place of mamba-ssm's (5.20 and later)")
    assert tried.leak is None and tried.proof == APART
    assert_as_if_alone(packed, plain)


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "Qwen3Moe", "Qwen3VL", "Gemma4"])
def test_one_attention_without_boundaries_is_found(family: str) -> None:
    model = make(family)
    forward = (attention := model.get_decoder().layers[-1].self_attn).forward
    attention.forward = lambda *args, **given: forward(*args, **given | {"attention_mask": None})
    assert "reaches the one before it" in str(packing.prepare_for_packs(model, CONFIG, STACK).leak)


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3Next"])
def test_attention_beside_recurrent_layers_takes_the_kernel_for_packs(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Unsloth has chosen flex_attention, which knows no documents."""
    monkeypatch.setattr(varlen, "varlen_attn", of_each_document)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    plain = make(family)
    packed = copy.deepcopy(plain)
    packed.config.get_text_config()._attn_implementation = "flex_attention"
    assert attention.use_for_packs(packed, torch.bfloat16)
    tried = packing.prepare_for_packs(packed, CONFIG, STACK)
    assert tried.leak is None and packed.config.get_text_config()._attn_implementation == attention.PACKED
    assert_as_if_alone(packed, plain)


def test_wide_heads_are_computed_beside_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's full attention has heads of 512; those of its windows the kernel takes."""
    wide, plain_attention = [], F.scaled_dot_product_attention

    def of_nested(*rows: torch.Tensor, **given: Any) -> torch.Tensor:
        if not rows[0].is_nested:
            return plain_attention(*rows, **given)
        wide.append(rows[0].shape[-1])  # torch has no kernel for them on a CPU
        documents = zip(*(one.unbind() for one in rows), strict=True)
        found = [plain_attention(*(part[None] for part in one), **given)[0].transpose(0, 1) for one in documents]
        return torch.nested.nested_tensor_from_jagged(torch.cat(found), rows[0].offsets()).transpose(1, 2)

    monkeypatch.setattr(varlen, "varlen_attn", of_each_document)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(F, "scaled_dot_product_attention", of_nested)
    monkeypatch.setattr(attention, "WIDEST", 16)
    plain = make("Gemma4")
    packed = copy.deepcopy(plain)
    packed.get_decoder().set_attn_implementation("sdpa")  # its audio tower lacks it
    assert attention.use_for_packs(packed, torch.bfloat16)
    assert packing.prepare_for_packs(packed, CONFIG, STACK).leak is None
    assert packed.config.get_text_config()._attn_implementation == attention.PACKED and set(wide) == {32}
    assert_as_if_alone(packed, plain)


def test_the_trial_keeps_to_the_tokens_that_each_layer_embeds() -> None:
    """On a GPU another token is an assertion of the device, after which nothing runs."""
    model = make("Gemma4")
    decoder, config = model.get_decoder(), model.config.get_text_config()
    config.vocab_size_per_layer_input = 20
    table = decoder.embed_tokens_per_layer
    table.weight = torch.nn.Parameter(table.weight[:20].detach())
    assert packing.prepare_for_packs(model, CONFIG, STACK).leak is None


def test_a_leak_on_one_rank_pads_the_rows_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents are laid out again, as rows of one each."""
    monkeypatch.setattr(distributed, "gather_objects", lambda one: [one, trial.Separation(leak="it leaks")])
    writer = store.Writer(tmp_path, "train")
    for ids, labels in documents():
        writer.add(ids, labels)
    writer.close()
    rows = store.load_rows(tmp_path, "train")
    config = load([*WORDS, "--data.packing", "true", "--data.max_length", "128"])
    data: Any = SimpleNamespace(splits={"train": rows}, order_key="k")
    found = job.lay_out_for(make("Llama"), config, STACK, data, 1, ALONE)
    assert found.unpacked_because == "it leaks in llama, which was tried"
    assert found.train.packs.pack_length is None and len(found.train) == len(rows)


def test_rounding_to_16_bits_is_no_leak() -> None:
    """A few percent of all numbers, or a token with other experts; another document is one."""
    one = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    another = one.roll(1, 1)
    for factor, dtype, found in ((1.05, torch.bfloat16, False), (1.05, torch.float32, True)):
        assert trial._is_another(one, one * factor, dtype) is found
    assert not trial._is_another(one, torch.cat([another[:1], one[1:]]), torch.bfloat16)
    assert trial._is_another(one, another, torch.bfloat16)
    # On a GPU FP8's rounding took 8 B of random weights further, and its rows were padded at a 14th of the speed.
    assert trial._is_another(one, one * 1.5, torch.bfloat16)
    assert not trial._is_another(one, one * 1.5, torch.bfloat16, trial.APART_IN_FP8)
    assert trial._is_another(one, another, torch.bfloat16, trial.APART_IN_FP8)


@pytest.mark.parametrize(
    ("leaks", "noise", "away", "rounded", "passes", "apart"),
    [
        (0.0, 0.2, 0.1, 0.0, 3, True),
        (0.2, 0.1, 0.1, 0.0, 4, True),
        (0.2, 0.01, 0.1, 0.0, 4, False),
        (0.0, 0.0, 0.5, 0.01, 4, False),
        (0.0, 0.0, 0.5, 0.2, 4, True),
    ],
)
def test_noise_and_rounding_are_measured_where_they_decide(
    leaks: float, noise: float, away: float, rounded: float, passes: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding the embeddings moves the logits of Gemma 4 E2B with random weights by 0.4 of their norm; its packs, on
    an H100, by 0.5. The first pass is of the pack, and the next ones with its first and its last document changed."""
    row, packs, count = torch.ones(sum(trial.DOCUMENTS), 8), iter([0.0, leaks, noise]), []

    def found(model: Any, dtype: Any, ids: Any, given: Any, part: slice, rounding: float) -> tuple[Any, Any]:
        count.append(given)
        assert torch.backends.cuda.cudnn_sdp_enabled() is bool(given)  # a document alone does not load cuDNN
        gradients = row.clone()
        gradients[:24] = 0
        if given:
            return row + next(packs), gradients
        return row[24:64] * (1 + away + (rounded if rounding else 0)), gradients[24:64]

    torch.backends.cuda.enable_cudnn_sdp(True)  # as by default: a patch, which a test has applied here, turns it off
    monkeypatch.setattr(trial, "_outputs_and_gradients", found)
    leak = trial.separation(make("Llama"), torch.bfloat16, lambda lengths: {"lengths": lengths}).leak
    assert ((leak is None), len(count)) == (apart, passes)


def test_the_trial_compiles_nothing() -> None:
    """What it compiled for its tiny rows would be compiled again for those of the run."""
    graphs: list[Any] = []
    model = make("Llama")
    mlp = model.get_decoder().layers[-1].mlp
    mlp.forward = torch.compile(mlp.forward, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    assert packing.prepare_for_packs(model, CONFIG, STACK).leak is None and not graphs
    mlp(torch.zeros(1, 2, mlp.gate_proj.in_features))
    assert graphs  # afterwards


def test_a_trial_that_fails_keeps_the_packs_of_unsloths_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> trial.Separation:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(trial, "separation", fails)
    monkeypatch.setattr(packing, "has_unsloths_attention", lambda model: True)
    unsloth = Stack(backend="unsloth", reason="a test", device="cuda", local_rank=0, patches=())
    assert packing._tried(make("Llama"), torch.bfloat16, unsloth).leak is None
    for family, stack in (("Llama", STACK), ("FalconH1", unsloth)):
        leak = str(packing._tried(make(family), torch.bfloat16, stack).leak)
        assert leak.startswith("it fails on a pack: RuntimeError: no kernel")


@pytest.mark.parametrize(
    ("family", "without"),
    [
        ("FalconH1", {"mamba.out_proj"}),
        ("Mamba", {"mixer.x_proj", "mixer.dt_proj", "mixer.out_proj"}),
        ("Jamba", {"mamba.dt_proj"}),
        ("Qwen3_5", set()),
    ],
)
def test_all_linear_leaves_out_what_has_no_effect(
    family: str, without: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Mamba's layers read weights past an adapter. The others all train."""
    model = adapters.add_adapter(make(family), load([*WORDS, "--lora.target_modules", "all-linear"]))
    base = model.get_base_model()
    bare = {
        ".".join(name.split(".")[-2:])
        for name, one in base.get_decoder().named_modules()
        if type(one) is torch.nn.Linear and "lora_" not in name and not name.endswith("base_layer")
    }
    assert bare - {"feed_forward.router"} == without
    printed = capsys.readouterr().out
    assert all(name in printed for name in without) and ("leaves out" in printed) == bool(without)
    ids = torch.arange(3, 24)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(one.grad.any() for name, one in model.named_parameters() if "lora_B" in name)
    found = adapter_coverage.coverage(model)
    assert found is not None and found.warning is None
