"""Packs in each family of models: against each document alone in plain transformers, and with a planted leak."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from finetune.config import load
from finetune.data.collate import collate
from finetune.engine.kernels import by_document
from finetune.engine.model import packing
from finetune.runtime.bootstrap import Stack
from tests.helpers import tiny

STACK = Stack(backend="transformers", reason="a test", device="cpu", local_rank=0, patches=())
CONFIG = load(["--model.model_name_or_path", "m", "--data.train_file", "x", "--model.dtype", "float32"])
APART = "documents are apart bit for bit"
RECURRENT = "recurrent layers run document by document"
ATTENTION = {"Llama": {}, "Gemma3Text": {"head_dim": 16, "sliding_window": 8}, "Qwen3Moe": tiny.FAMILIES["Qwen3Moe"]}
# What has no convolution that would show its layers.
REFUSED = ("Rwkv", "MiniMax")


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
        logits = model(**given, use_cache=False).logits[0, :-1]
        tokens = torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:], reduction="none")
        tokens.sum().backward()
        found += tokens[batch["labels"][0, 1:] >= 0].tolist()
    trained = [one for one in model.parameters() if one.grad is not None]
    return found, torch.cat([one.grad.flatten() for one in trained])


@pytest.mark.parametrize("family", [*ATTENTION, *tiny.MULTIMODAL, *tiny.RECURRENT])
def test_packed_documents_are_as_if_alone(family: str) -> None:
    """Losses and gradients, with layers computed again in the backward pass."""
    plain = make(family)
    packed = copy.deepcopy(plain)
    tried = packing.prepare_for_packs(packed, CONFIG, STACK)
    if family in REFUSED:
        assert str(tried.leak).endswith(f"reaches the one before it in {family.lower()}, which was tried")
        return
    recurrent = bool(by_document.recurrent_layers(packed))
    assert tried.leak is None and tried.proof.startswith(APART) and (RECURRENT[:16] in tried.proof) == recurrent
    assert all(one.grad is None for one in packed.parameters())
    tiny.checkpoint_activations(packed)
    found, gradient = losses(packed, [documents()], 192)
    expected, expected_gradient = losses(plain, [[one] for one in documents()], None)
    assert found == pytest.approx(expected, abs=1e-5)
    assert torch.linalg.vector_norm(gradient - expected_gradient) < 1e-5 * torch.linalg.vector_norm(expected_gradient)


@pytest.mark.parametrize("family", ["Lfm2", "Qwen3_5", "Qwen3Next", "FalconH1", "NemotronH", "Mamba"])
def test_one_recurrent_layer_without_boundaries_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(family)
    layers = by_document.recurrent_layers(model)
    monkeypatch.setattr(by_document, "recurrent_layers", lambda _: dict(list(layers.items())[1:]))
    assert "reaches the one before it" in str(packing.prepare_for_packs(model, CONFIG, STACK).leak)


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "Qwen3Moe", "Qwen3VL", "Gemma4"])
def test_one_attention_without_boundaries_is_found(family: str) -> None:
    """And separated, unless the user has chosen how attention is computed."""
    model = make(family)
    forward = (attention := model.get_decoder().layers[-1].self_attn).forward
    attention.forward = lambda *args, **given: forward(*args, **given | {"attention_mask": None})
    config = load(["--model.model_name_or_path", "m", "--data.train_file", "x", "--model.attn_implementation", "sdpa"])
    assert "reaches the one before it" in str(packing.prepare_for_packs(model, config, STACK).leak)
    if family == "Llama":
        assert packing.prepare_for_packs(model, CONFIG, STACK).proof.startswith(f"{APART}; attention run document")
