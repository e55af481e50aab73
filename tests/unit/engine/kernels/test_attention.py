"""Attention over packs: the same as of each document alone, and a faster kernel only where it computes the same."""

from __future__ import annotations

import os
import stat
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from finetune.config import load
from finetune.engine.kernels import attention
from finetune.errors import UserError
from finetune.runtime.machine import flash
from tests.helpers import tiny

LENGTHS = (5, 9, 2)
SHAPES = attention.AttentionShapes(heads=4, key_value_heads=2, head_dim=8, lengths=LENGTHS, dtype=torch.bfloat16)


def of_each_document(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """What `varlen_attn` computes, written out: softmax over the earlier positions of the same document."""
    assert window_size[1] == 0
    outputs = []
    for begin, end in zip(cu_q.tolist()[:-1], cu_q.tolist()[1:], strict=True):
        assert end - begin <= max_q
        q, k, v = (tensor[begin:end].transpose(0, 1).double() for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for tensor in (k, v))
        places = torch.arange(end - begin, device=query.device)
        ago = places[:, None] - places
        seen = (ago >= 0) & ((ago <= window_size[0]) | (window_size[0] < 0))
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        outputs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


def model_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model in float32 that uses the variable-length kernel, which is the reference above."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    sizes: Any = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, attn_implementation="flex_attention" if kind == "flex" else "sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    if kind == "window":
        model: Any = MistralForCausalLM(MistralConfig(**sizes, sliding_window=3))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(varlen, "varlen_attn", of_each_document)
    assert attention.use_for_packs(model, torch.bfloat16)
    return model


@pytest.mark.parametrize("kind", ["causal", "window", "checkpointing", "flex"])
def test_packs_as_each_document_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind, monkeypatch)
    if kind == "checkpointing":
        tiny.checkpoint_activations(model)
    model.train()
    ids = torch.randint(50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    further = attention.batch_arguments(torch.tensor(LENGTHS, dtype=torch.int32), torch.device("cpu"))
    packed = model(input_ids=ids, position_ids=positions, use_cache=False, **further).logits[0]
    packed.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.set_attn_implementation("eager")
    alone = [model(input_ids=part, use_cache=False).logits[0] for part in ids.split(LENGTHS, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)
    torch.cat(alone).square().sum().backward()
    for kept, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(kept, parameter.grad, rtol=1e-3, atol=1e-4)


def test_packs_under_autocast_are_computed_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a QLoRA is, whose parameters are float32 beside the 4-bit ones: the kernel takes 16 bits alone."""
    model = model_of("causal", monkeypatch).eval()
    given: list[torch.dtype] = []

    def watched(query: Any, key: Any, value: Any, *further: Any, **options: Any) -> torch.Tensor:
        given.extend(one.dtype for one in (query, key, value))
        return of_each_document(query, key, value, *further, **options)

    monkeypatch.setattr(varlen, "varlen_attn", watched)
    # A linear layer of bitsandbytes returns its input's type, float32, whatever it computes in.
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).register_forward_hook(lambda module, args, output: output.float())
    ids = torch.randint(50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    further = attention.batch_arguments(torch.tensor(LENGTHS, dtype=torch.int32), torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        packed = model(input_ids=ids, position_ids=positions, use_cache=False, **further).logits[0]
        model.set_attn_implementation("sdpa")
        alone = [model(input_ids=part, use_cache=False).logits[0] for part in ids.split(LENGTHS, dim=1)]
    assert given == [torch.bfloat16] * 6
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0.02, atol=0.02)


def test_what_the_kernel_computes_in() -> None:
    """On a GPU it takes 16 bits alone, also outside of autocast, where a QLoRA's values are float32."""
    on_gpu: Any = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"), dtype=torch.float32)
    assert attention.kernel_dtype(on_gpu) == torch.bfloat16
    assert attention.kernel_dtype(torch.ones(1)) == torch.float32
    assert attention.kernel_dtype(torch.ones(1, dtype=torch.float16)) == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert attention.kernel_dtype(torch.ones(1)) == torch.bfloat16


def test_the_output_has_the_type_of_the_input_outside_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer in float32 follows."""
    monkeypatch.setattr(varlen, "varlen_attn", of_each_document)
    monkeypatch.setattr(attention, "kernel_dtype", lambda value: torch.bfloat16)
    rows = [torch.randn(1, 4, sum(LENGTHS), 8) for _ in range(3)]
    further = attention.batch_arguments(torch.tensor(LENGTHS, dtype=torch.int32), torch.device("cpu"))
    mask = further.pop("attention_mask")
    assert attention.packed_attention(torch.nn.Identity(), *rows, mask, **further)[0].dtype == torch.float32


def test_padded_rows_are_computed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("causal", monkeypatch).eval()
    ids = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    found = model(input_ids=ids, attention_mask=mask).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, model(input_ids=ids, attention_mask=mask).logits, rtol=0, atol=0)


def test_a_model_that_needs_more_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import (
        DogeConfig,
        DogeForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    sizes: Any = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, head_dim=8, attn_implementation="sdpa",
    )  # fmt: skip
    # Soft-capped scores, which the kernel lacks, as SDPA does: its default is eager in transformers 5.24, SDPA in 5.17.
    softcap = Gemma2ForCausalLM(Gemma2Config(**sizes | {"attn_implementation": None})).bfloat16()
    dropout = LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.1)).bfloat16()
    wide = LlamaForCausalLM(LlamaConfig(**sizes))
    chosen = LlamaForCausalLM(LlamaConfig(**sizes | {"attn_implementation": "eager"})).bfloat16()
    small: Any = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 50, "attn_implementation": "sdpa"}
    named = GPT2LMHeadModel(GPT2Config(**small)).bfloat16()  # its dropout has another name
    masks = DogeForCausalLM(DogeConfig(**sizes)).bfloat16()
    ahead = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    ahead.model.layers[0].self_attn.is_causal = False
    windowed = tiny.make_moe("Qwen2Moe", use_sliding_window=True, sliding_window=3, max_window_layers=1).bfloat16()
    windowed.set_attn_implementation("sdpa")
    uneven = LlamaForCausalLM(LlamaConfig(**sizes | {"head_dim": 20})).bfloat16()  # as OpenLLaMA 3B has heads of 100
    for model in (softcap, dropout, wide, chosen, named, masks, ahead, windowed, uneven):
        before = model.config._attn_implementation
        assert not attention.use_for_packs(model, model.dtype)
        assert model.config._attn_implementation == before
    assert attention.use_for_packs(GPT2LMHeadModel(GPT2Config(**small, attn_pdrop=0.0)), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.process  # Triton starts some
@pytest.mark.filterwarnings("default")
def test_heads_of_512_on_a_gpu() -> None:
    """Against the reference, with an empty document at the end, as graphs have them."""
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value, weights = (
        torch.randn(300, heads, 512, generator=generator, device="cuda").bfloat16().requires_grad_()
        for heads in (8, 2, 2, 8)
    )
    bounds = torch.tensor([0, 130, 131, 300, 300], dtype=torch.int32, device="cuda")
    found = attention.wide_attention((query, key, value), bounds, 200, 0.04)
    wanted = of_each_document(query, key, value, bounds, bounds, 200, 200, scale=0.04, window_size=(-1, 0))
    gradients = [torch.autograd.grad(one, (query, key, value), weights) for one in (found, wanted)]
    for one, other in zip([found, *gradients[0]], [wanted, *gradients[1]], strict=True):
        assert attention.difference(one, other) < attention.LARGEST_DIFFERENCE


@pytest.mark.parametrize("given", [
    {"dropout": 0.1}, {"indices": torch.ones(1)}, {"mask": torch.ones(1, 1, 8, 8)}, {"sliding_window": 4, "width": 264},
])  # fmt: skip
def test_a_call_that_needs_more_than_the_kernel_is_refused(given: dict) -> None:
    """In a model of an unknown kind."""
    heads = torch.ones(1, 2, 8, given.pop("width", 8))
    arguments = attention.batch_arguments(torch.tensor([8], dtype=torch.int32), torch.device("cpu"))
    mask = given.pop("mask", arguments.pop("attention_mask"))
    with pytest.raises(UserError, match="which the kernel for packs does not compute. Set model.attn_implementation"):
        attention.packed_attention(torch.nn.Identity(), heads, heads, heads, mask, **arguments, **given)


@pytest.mark.parametrize(
    "words, packed",
    [
        (["--model.dtype", "bfloat16"], True),
        (["--model.dtype", "float32"], False),
        (["--model.dtype", "bfloat16", "--model.attn_implementation", "sdpa"], False),
    ],
    ids=["16 bits", "32 bits", "set"],
)
def test_what_the_run_computes_in_decides_and_not_the_parameters(
    words: list[str], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.engine.model.packing import prepare_for_packs

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(varlen, "varlen_attn", of_each_document)
    sizes: Any = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=50)
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa"))  # float32, as beside 4-bit weights
    config = load(["--model.model_name_or_path", "m", "--data.train_file", "x", *words], command="train")
    stack: Any = types.SimpleNamespace(device="cuda", backend="transformers")
    assert prepare_for_packs(model, config, stack).leak is None
    assert (model.config._attn_implementation == attention.PACKED) is packed


def test_a_model_whose_layers_do_not_get_the_boundaries_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by trying it: its tokens would attend to all others, also to later ones."""
    from finetune.engine.model.packing import prepare_for_packs

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(varlen, "varlen_attn", of_each_document)
    model = tiny.make_moe("Nemotron")
    model.set_attn_implementation("sdpa")
    config = load(["--model.model_name_or_path", "m", "--data.train_file", "x", "--model.dtype", "bfloat16"])
    stack: Any = types.SimpleNamespace(device="cuda", backend="transformers")
    assert prepare_for_packs(model, config, stack).leak is None
    assert model.config._attn_implementation == "sdpa"


def test_layers_that_lose_the_boundaries_attend_to_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not tried before, as on Unsloth."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    model = tiny.make_moe("Nemotron")
    model.set_attn_implementation("sdpa")
    assert attention.use_for_packs(model, torch.bfloat16)
    further = attention.batch_arguments(torch.tensor([4, 8], dtype=torch.int32), torch.device("cpu"))
    with pytest.raises(UserError, match="attn_implementation: sdpa"):
        model(input_ids=torch.arange(12)[None], use_cache=False, **further)
    assert model(input_ids=torch.arange(12)[None], use_cache=False).logits.shape[1] == 12  # other rows


def calls_a_function(self: Any, **given: Any) -> Any:
    return globals()["MistralAttention_forward"](self, **given)


def test_a_window_is_not_taken_to_be_passed_on_without_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mistral.modeling_mistral import MistralAttention

    model = model_of("window", monkeypatch)
    assert attention.why_not_computed(model) is None
    monkeypatch.setitem(globals(), "MistralAttention_forward", MistralAttention.forward)
    monkeypatch.setattr(MistralAttention, "forward", calls_a_function)  # as in the layers that Unsloth compiles
    assert attention.why_not_computed(model) is None
    monkeypatch.setattr(MistralAttention, "forward", print)
    assert "sliding window" in str(attention.why_not_computed(model))


# --- the switch -------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which kernel each call of a switch reaches."""
    called: list[str] = []

    def fourth(*given: Any, **options: Any) -> tuple[str, None]:
        called.append("flash")
        assert set(options) == {
            "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal",
        }  # fmt: skip
        return "output", None

    monkeypatch.setattr(flash, "kernel", lambda: fourth)
    flash.set_enabled(False)
    yield called
    flash.set_enabled(False)


def test_the_switch_leaves_to_torch_what_the_other_kernel_does_not_compute(calls: list[str]) -> None:
    attend = flash.switch(lambda *given, **options: calls.append("torch"))
    causal: dict[str, Any] = {"scale": 0.5, "window_size": (-1, 0), "enable_gqa": True}
    attend(*"qkvbb", 9, 9, **causal)
    flash.set_enabled(True)
    assert attend(*"qkvbb", 9, 9, **causal) == "output"
    attend(*"qkvbb", 9, 9, return_aux=None, **causal)
    attend(*"qkvbb", 9, 9, **causal | {"window_size": (127, 0)})
    attend(*"qkvbb", 9, 9)  # not causal
    attend(*"qkvbb", 9, 9, return_aux=object(), **causal)
    attend(*"qkvb", None, 9, 9, **causal)
    flash.pause(True)
    attend(*"qkvbb", 9, 9, **causal)
    flash.pause(False)
    assert calls == ["torch", "flash", "flash", "torch", "torch", "torch", "torch", "torch"]


def test_short_documents_do_not_ask_for_kernels_of_their_own(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn compiles others where the bound of the longest document fits in a block, of at most 128 tokens."""
    bounds: list[int] = []

    def kernel(*given: Any, max_seqlen_q: int, max_seqlen_k: int, **options: Any) -> tuple[str, None]:
        bounds.extend((max_seqlen_q, max_seqlen_k))
        return "output", None

    monkeypatch.setattr(flash, "kernel", lambda: kernel)
    flash.set_enabled(True)
    for longest in (3, 118, 700):
        flash.switch(lambda *given, **options: None)(*"qkvbb", longest, longest, window_size=flash.CAUSAL)
    assert bounds == [512, 512, 512, 512, 700, 700]


def no_locks(*given: Any) -> None:
    """As `flock` on a network disk without locks."""
    raise OSError("no locks available")


def test_compiled_kernels_are_kept_in_the_users_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package reads two variables when it is imported, unless the user has set them."""
    names = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    package = types.ModuleType("flash_attn.cute.interface")
    package.flash_attn_varlen_func = len  # type: ignore[attr-defined]
    for module in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", package)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is removed afterwards
        monkeypatch.delenv(name)
    flash.kernel.__wrapped__()
    folder = Path(os.environ[names[1]])
    assert os.environ[names[0]] == "1"
    assert folder.is_relative_to(tmp_path) and stat.S_IMODE(folder.stat().st_mode) == 0o700

    for refused in (
        lambda: folder.chmod(0o770),  # others may write to it
        lambda: (folder.chmod(0o700), monkeypatch.setattr(flash.fcntl, "flock", no_locks)),
    ):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        refused()
        flash.kernel.__wrapped__()
        assert not any(name in os.environ for name in names)
    monkeypatch.setattr(flash.fcntl, "flock", lambda *given: None)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)  # as if another user had made it
    for name in names:
        monkeypatch.delenv(name, raising=False)
    flash.kernel.__wrapped__()
    assert not any(name in os.environ for name in names)


def test_the_switch_keeps_the_signature_that_unsloth_reads() -> None:
    import inspect

    assert inspect.signature(flash.switch(varlen.varlen_attn)) == inspect.signature(varlen.varlen_attn)


# --- packs with Unsloth -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("whose", "words", "packed"), [
    ("transformers", [], True),
    ("unsloth", [], False),
    ("transformers", ["--model.full_finetuning", "true"], False),
    ("transformers", ["--model.attn_implementation", "sdpa"], False),
])  # fmt: skip
def test_adapters_on_unsloth_need_no_mask_where_transformers_attends(
    monkeypatch: pytest.MonkeyPatch, whose: str, words: list[str], packed: bool
) -> None:
    """The trial gets what the layers read in training: the kernel's boundaries, or lengths for Unsloth's."""
    from finetune.engine.model import trial
    from finetune.engine.model.packing import prepare_for_packs

    tried: list[dict[str, Any]] = []

    def separation(model: Any, dtype: torch.dtype, arguments: Any) -> trial.Separation:
        tried.append(arguments([3, 5]))
        return trial.Separation(leak=None)

    def forward(*given: Any, **named: Any) -> None: ...

    forward.__module__ = "unsloth.models.llama"
    if whose == "unsloth":
        monkeypatch.setattr(LlamaAttention, "forward", forward)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    blocks = types.ModuleType("unsloth.utils.hf_packed_attention")
    blocks.enable_hf_packed_attention = lambda: True  # type: ignore[attr-defined]
    theirs = types.ModuleType("unsloth.utils.packing")
    theirs.mark_allow_overlength = lambda model: None  # type: ignore[attr-defined]
    for module in (types.ModuleType("unsloth"), types.ModuleType("unsloth.utils"), theirs, blocks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sizes: Any = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=50)
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa"))
    words = ["--model.model_name_or_path", "m", "--data.train_file", "x", "--model.dtype", "bfloat16", *words]
    stack: Any = types.SimpleNamespace(device="cuda", backend="unsloth")
    monkeypatch.setattr(trial, "separation", separation)
    prepare_for_packs(model, load(words, command="train"), stack)
    assert (model.config._attn_implementation == attention.PACKED) is packed
    (given,) = tried
    assert given.pop("position_ids").tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert (list(given) == ["packed_seq_lengths"]) is not packed and ("cu_seq_lens_q" in given) is packed


def test_the_record_names_a_kernel_that_was_called() -> None:
    chosen = attention.AttentionKernel(
        kernel=attention.FLASH_4, reason="faster", milliseconds={"a": 1.0}, difference=0.001
    )
    flash.set_enabled(True)
    found = attention.kernel_used(chosen)
    assert found.kernel == attention.OTHER and "never used it" in found.reason and found.milliseconds == {"a": 1.0}
    flash.mark_run()
    assert attention.kernel_used(chosen) == chosen
    flash.pause(True)  # by another way to keep activations than those of earlier trials
    found = attention.kernel_used(chosen)
    assert found.kernel == attention.FLASH_2 and "selective" in found.reason
    flash.pause(False)
    flash.set_enabled(False)
    other = attention.AttentionKernel(kernel=attention.FLASH_2, reason="set by model.packed_attention")
    assert attention.kernel_used(other) == other


def test_a_kernel_that_was_not_called_is_a_warning_too(capsys: pytest.CaptureFixture[str]) -> None:
    from types import SimpleNamespace

    from finetune.run import recording

    job: Any = SimpleNamespace(attention=attention.AttentionKernel(kernel=attention.FLASH_4, reason="faster"))
    trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=7), resumed_step=7)
    flash.set_enabled(True)
    assert recording.attention_used(job, trainer) == vars(job.attention)  # nothing was left to train
    trainer.resumed_step = 5
    assert recording.attention_used(job, trainer)["kernel"] == attention.OTHER
    assert "FlashAttention-4 was chosen, but this model's layers never used it" in capsys.readouterr().err
    flash.mark_run()
    assert recording.attention_used(job, trainer) == vars(job.attention) and not capsys.readouterr().err
    flash.set_enabled(False)


# --- the choice -------------------------------------------------------------------------------------------------------


def planted(monkeypatch: pytest.MonkeyPatch, *, ms: float, error: float = 0.0) -> None:
    """A host on which FlashAttention-4 takes `ms` milliseconds, torch's kernel 1, and results are `error` apart."""

    def measured(kernel: Callable[..., Any], shapes: Any, device: Any) -> tuple[list[torch.Tensor], float]:
        if not flash.is_enabled():
            return [torch.ones(4), torch.ones(3)], 1.0
        if ms < 0:
            raise RuntimeError("no such layout")
        return [torch.ones(4), torch.ones(3) * (1 + error)], ms

    monkeypatch.setattr(flash, "why_unusable", lambda: None)
    monkeypatch.setattr(flash, "is_switch_installed", lambda: True)
    monkeypatch.setattr(attention, "measure", measured)


def test_kernels_for_another_number_of_documents_are_compiled_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 4.0 has others above 256 documents."""
    counts: list[int] = []

    def measured(kernel: Any, shapes: attention.AttentionShapes, device: Any) -> tuple[list[torch.Tensor], float]:
        if flash.is_enabled():
            counts.append(len(shapes.lengths))
        return [torch.ones(4)], 0.5 if flash.is_enabled() else 1.0

    planted(monkeypatch, ms=0.5)
    monkeypatch.setattr(attention, "measure", measured)
    for documents in ((2, 256), (2, 257), (300, 400), ()):
        assert attention.choose("auto", SHAPES, "cpu", documents).kernel == attention.FLASH_4
    many = attention.replace(SHAPES, lengths=(3,) * 300)
    attention.choose("auto", many, "cpu", (256, 300))
    assert counts == [3, 3, 257, 3, 300, 400, 3, 300, 256]
    monkeypatch.setattr(attention, "FASTER", 0.1)  # not faster: nothing more is compiled
    attention.choose("auto", SHAPES, "cpu", (2, 257))
    assert counts[9:] == [3]
    attention.choose("flash_4", SHAPES, "cpu", (2, 257))  # not faster, and wanted
    assert counts[10:] == [3, 257]
    flash.set_enabled(False)


@pytest.mark.parametrize(
    ("ms", "error", "kernel", "said"),
    [
        (0.5, 0.003, attention.FLASH_4, "0.50 ms per layer"),
        (0.99, 0.003, attention.FLASH_2, "0.99 ms per layer"),
        (0.5, 0.05, attention.FLASH_2, "differs by 5.00% from torch"),
        (0.5, float("nan"), attention.FLASH_2, "differs by nan"),
        (-1.0, 0.0, attention.FLASH_2, "failed: RuntimeError: no such layout"),
    ],
)
def test_it_is_used_where_it_is_right_and_faster(
    ms: float, error: float, kernel: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, ms=ms, error=error)
    found = attention.choose("auto", SHAPES, "cpu")
    assert (found.kernel, flash.is_enabled()) == (kernel, kernel == attention.FLASH_4)
    assert said in found.reason
    flash.set_enabled(False)


def test_all_ranks_use_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.runtime.ranks import distributed

    planted(monkeypatch, ms=0.5)
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda values: [1.0, 0.0])  # of two
    ranks = distributed.ranks()
    monkeypatch.setattr(distributed, "ranks", lambda: type("Two", (), {**vars(ranks), "world_size": 2}))
    assert attention.choose("auto", SHAPES, "cpu").kernel == attention.FLASH_2
    assert not flash.is_enabled()


def test_the_choice_is_made_for_the_packs_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from finetune.data.packs import pack
    from finetune.engine.job import choose_attention

    class Layout:
        """Packs of documents of these lengths, as `finetune.data.layout.Layout`."""

        lengths = np.array([60, 40, 30, 20, 9])
        packs = pack(lengths, 64, "key")

        def __len__(self) -> int:
            return len(self.packs)

        def __getitem__(self, row: int) -> list[tuple[np.ndarray, None]]:
            return [(np.ones(self.lengths[one]), None) for one in self.packs[row]]

    given: list[Any] = []
    one = attention.AttentionKernel(kernel=attention.FLASH_2, reason="faster")
    monkeypatch.setattr(attention, "choose", lambda *words: given.append(words) or one)
    monkeypatch.setattr(attention, "head_widths", lambda model: {64})
    text = SimpleNamespace(_attn_implementation="sdpa", num_attention_heads=4, hidden_size=32)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    stack: Any = SimpleNamespace(device="cuda", backend="unsloth", torch_device="cuda")
    monkeypatch.setattr("finetune.engine.model.packing.has_unsloths_attention", lambda model: True)
    found = choose_attention("auto", model, stack, Layout(), 2, torch.bfloat16)  # type: ignore[arg-type]
    assert found == one
    ((wanted, shapes, device, documents),) = given
    assert (wanted, device, shapes.lengths) == ("auto", "cuda", (60, 9, 40))
    # Two packs: of padding alone; or of two documents and a segment of padding each, and one more segment.
    assert documents == (2, 7)
    rest: Any = (stack, Layout(), 2, torch.bfloat16)
    monkeypatch.setattr(attention, "head_widths", lambda model: {256, 512})
    found = choose_attention("auto", model, *rest)
    assert found.reason == "faster; torch's memory-efficient kernel for heads of 512" and given.pop()
    found = choose_attention("auto", model, *rest, why_torchs="its layers hold torch's")
    assert (found.kernel, found.reason) == (attention.FLASH_2, "its layers hold torch's") and len(given) == 1
    with pytest.raises(UserError, match="flash_4, which this run cannot use: its layers hold torch's"):
        choose_attention("flash_4", model, *rest, why_torchs="its layers hold torch's")
    # A model that needs what the kernels lack, on Unsloth: transformers' layers and SDPA stay.
    monkeypatch.setattr("finetune.engine.model.packing.has_unsloths_attention", lambda model: False)
    found = choose_attention("auto", model, *rest)
    assert (found.kernel, found.masks) == ("sdpa", True) and len(given) == 1


def test_what_the_user_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, ms=2.0)
    assert attention.choose("torch", SHAPES, "cpu").kernel == attention.FLASH_2
    assert attention.choose("flash_4", SHAPES, "cpu").kernel == attention.FLASH_4  # slower, and wanted
    monkeypatch.setattr(flash, "why_unusable", lambda: flash.NOT_INSTALLED)
    with pytest.raises(UserError, match="pip install 'finetune-multigpu\\[flash\\]'"):
        attention.choose("flash_4", SHAPES, "cpu")
    assert "flash-attn-4 is not installed" in attention.choose("auto", SHAPES, "cpu").reason
    assert not flash.is_enabled()


def test_a_kernel_that_a_cpu_run_cannot_use_is_refused() -> None:
    from types import SimpleNamespace

    from finetune.engine.job import choose_attention

    text = SimpleNamespace(_attn_implementation="sdpa")
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    stack: Any = SimpleNamespace(device="cpu", backend="transformers")
    words = ["--model.model_name_or_path", "m", "--data.train_file", "x", "--model.packed_attention", "flash_4"]
    wanted = load(words, command="train").model
    with pytest.raises(UserError, match="flash_4, which this run cannot use: there is no GPU"):
        choose_attention(wanted.packed_attention, model, stack, None, 1, torch.float32)  # type: ignore[arg-type]
    assert choose_attention("auto", model, stack, None, 1, torch.float32).kernel == "sdpa"  # type: ignore[arg-type]
