"""Models with a table of positions: how many it has, and what stays below."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finetune.config import Config, load
from finetune.config.batch import resolve_batch
from finetune.config.schema import ModelConfig
from finetune.engine import job
from finetune.engine.model import generation, packing, positions
from finetune.engine.session import opening
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack
from tests.helpers import tiny

TINY: dict[str, Any] = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
GPT2 = dict(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=40)
# Configuration -> the positions for which its forward pass has a row (found by running it, below).
KINDS: dict[str, tuple[dict[str, Any], int | None]] = {
    "GPT2Config": (GPT2, 40),
    "OpenAIGPTConfig": (GPT2, 40),
    "CTRLConfig": (GPT2 | {"dff": 16}, 40),
    "GPTJConfig": (GPT2 | {"rotary_dim": 4}, 40),
    "CodeGenConfig": (GPT2 | {"rotary_dim": 4, "n_head": 4}, 40),
    "GPTNeoConfig": (
        dict(
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            vocab_size=32,
            max_position_embeddings=40,
            attention_types=[[["global"], 1]],
        ),
        40,
    ),
    "OPTConfig": (TINY | {"ffn_dim": 16, "word_embed_proj_dim": 16, "max_position_embeddings": 40}, 40),
    "BioGptConfig": (TINY | {"intermediate_size": 16, "max_position_embeddings": 40}, 40),
    "RobertaConfig": (TINY | {"intermediate_size": 16, "max_position_embeddings": 40, "is_decoder": True}, 38),
    "BertConfig": (TINY | {"intermediate_size": 16, "max_position_embeddings": 40, "is_decoder": True}, 40),
    "MptConfig": (dict(d_model=16, n_layers=1, n_heads=2, vocab_size=32, max_seq_len=40), 40),
    "WhisperConfig": (
        dict(d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, vocab_size=32)
        | dict(encoder_layers=1, encoder_attention_heads=2, max_target_positions=40),
        40,
    ),
    "LlamaConfig": (TINY | {"intermediate_size": 16, "max_position_embeddings": 40}, None),
    "BloomConfig": (dict(hidden_size=16, n_layer=1, n_head=2, vocab_size=32), None),
}


def made(kind: str) -> Any:
    import transformers

    config = getattr(transformers, kind)(pad_token_id=1, bos_token_id=0, eos_token_id=2, **KINDS[kind][0])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_is_where_the_forward_pass_ends(kind: str) -> None:
    model, expected = made(kind), KINDS[kind][1]
    assert positions.limit(model) == expected
    longest = expected or 64
    with torch.no_grad():
        model(torch.full((1, longest), 5))
        if expected is not None:
            with pytest.raises((IndexError, RuntimeError)):
                model(torch.full((1, longest + 1), 5))


def test_rows_that_need_more_positions_are_refused_with_a_length_that_fits() -> None:
    """Rows are padded to multiples of 8, and padding has positions, too."""
    model = made("RobertaConfig")
    positions.check(model, SimpleNamespace(lengths=np.array([3, 32])), "training")
    with pytest.raises(UserError, match=r"up to 33 tokens, and roberta has a table of 38 positions.*to 32 or less"):
        positions.check(model, SimpleNamespace(lengths=np.array([3, 33])), "training")
    positions.check(made("LlamaConfig"), SimpleNamespace(lengths=np.array([10_000])), "training")


def test_unsloth_is_given_no_rows_beyond_the_context(tmp_path: Path) -> None:
    """There its loader for GPUs would scale the model's RoPE. Packs are longer than their documents."""
    tiny.make_model(tmp_path / "model")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "model")}))
    for folder in (tmp_path / "model", adapter):
        config = Config(model=ModelConfig(model_name_or_path=str(folder)))
        assert [positions.without_scaling(config, row, 100) for row in (100, 1024, 16384)] == [100, 1024, 1024]
        with pytest.raises(UserError, match=r"up to 1,025 tokens, .* a context of 1,024.*data.max_length to 1024"):
            positions.without_scaling(config, 4096, 1025)
    assert positions.context(str(tmp_path)) is None  # has no model


@pytest.mark.parametrize("backend", ["unsloth", "transformers"])
def test_a_run_loads_unsloth_with_no_more_than_the_context(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.make_model(tmp_path / "model")
    tiny.make_rows(tmp_path / "train.jsonl", 8)
    words = ["--model.model_name_or_path", str(tmp_path / "model"), "--data.train_file", str(tmp_path / "train.jsonl")]
    words += ["--data.packing", "true", "--data.pack_length", "4096", "--data.cache_dir", str(tmp_path / "cache")]
    stack = Stack(backend=backend, reason="a test", device="cpu", local_rank=0, patches=())
    given: list[int] = []

    def load_model(config: Any, stack: Any, row_length: int) -> Any:
        given.append(row_length)
        raise UserError("seen")

    monkeypatch.setattr(opening, "_start_backend", lambda *_: stack)
    monkeypatch.setattr(job, "load_model", load_model)
    config = load(words, command="train")
    with pytest.raises(UserError, match="seen"):
        opening.open_session(config, resolve_batch(config.training, 1))
    assert given == [1024 if backend == "unsloth" else 4096]


def test_each_answer_ends_at_the_limit() -> None:
    """A short prompt beside a long one has all the room that it has alone."""
    from transformers import GenerationConfig

    torch.manual_seed(0)
    model = made("GPT2Config")
    settings = GenerationConfig(max_new_tokens=30, do_sample=False, pad_token_id=1, eos_token_id=[31])
    prompts = [[5] * 4, [5] * 35]
    found = generation.complete(model, prompts, settings)
    alone = [generation.complete(model, [one], settings)[0] for one in prompts]
    assert found == alone and len(found[1]) <= 5 and settings.max_new_tokens == 30
    with pytest.raises(UserError, match="prompt has 40 tokens, and gpt2 has a table of 40 positions"):
        generation.complete(model, [[5] * 40], settings)


@pytest.mark.parametrize(
    ("kind", "separates"),
    [
        ("LlamaConfig", True),
        ("GPTNeoConfig", True),
        ("BloomConfig", False),  # takes no position ids
        ("OPTConfig", True),  # makes its mask without them
        ("BioGptConfig", False),  # the same, and its attention drops out weights
    ],
)
def test_models_that_do_not_separate_packed_documents_are_not_packed(
    kind: str, separates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"max_position_embeddings": 512}
    monkeypatch.setitem(KINDS, kind, (KINDS[kind][0] | more, None))
    torch.manual_seed(0)
    model = made(kind)
    model.train()
    stack: Any = SimpleNamespace(backend="transformers", device="cpu")
    config = Config(model=ModelConfig(model_name_or_path="m"))
    found = packing.prepare_for_packs(model, config, stack)
    assert (found.leak is None) == separates and model.training, found

    model.eval()
    ids, places = torch.arange(20)[None] + 3, torch.tensor([[*range(8), *range(12)]])
    with torch.no_grad():
        packed, alone = model(ids, position_ids=places, use_cache=False), model(ids[:, 8:], use_cache=False)
    assert torch.allclose(packed.logits[:, 8:], alone.logits, atol=1e-5) == separates
