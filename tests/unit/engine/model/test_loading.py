"""What a loaded model computes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # noqa: F401

from finetune.config import load
from finetune.engine.model import loading
from finetune.engine.sharding import shard
from finetune.runtime.bootstrap import Stack
from tests.helpers import launch, tiny


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hidden_states_of_a_quantized_model(tmp_path: Path, dtype: str) -> None:
    """Only float16 is too narrow for them."""
    model = tiny.make_model(tmp_path / "model")
    words = ["--model.model_name_or_path", str(model), "--model.backend", "transformers", "--model.dtype", dtype]
    config = load([*words, "--model.load_in_4bit", "true", "--data.train_file", "x"], command="train")
    stack = Stack(backend="transformers", reason="a test", device="cpu", local_rank=0, patches=())
    loaded: Any = loading.load(config, stack, row_length=64)
    seen = []
    loaded.get_base_model().model.layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loaded(input_ids=torch.arange(8)[None])
    assert seen == [torch.bfloat16 if dtype == "bfloat16" else torch.float32]
    assert {one.dtype for one in loaded.parameters() if one.requires_grad} == {torch.float32}


def test_weights_that_will_be_sharded_have_no_room_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 refuses weights whose rows are apart, and on each rank they would take the memory of the whole model."""
    model = tiny.make_model(tmp_path / "model")
    words = ["--model.model_name_or_path", str(model), "--model.backend", "transformers", "--data.train_file", "x"]
    config = load([*words, "--model.dtype", "bfloat16"], command="train")
    stack = Stack(backend="transformers", reason="a test", device="cpu", local_rank=0, patches=())
    for sharded in (False, True):
        monkeypatch.setattr(shard, "is_requested", lambda config, sharded=sharded: sharded)
        loaded: Any = loading.load(config, stack, row_length=64)
        assert all(one.is_contiguous() for one in loaded.parameters()) == sharded


@pytest.mark.unsloth
@pytest.mark.process
def test_unsloth_loads_the_tokenizer_once(tmp_path: Path) -> None:
    tiny.make_model(tmp_path / "model")
    script = """
import unsloth
from unsloth import tokenizer_utils
from transformers import AutoTokenizer
from finetune.config import load
from finetune.engine.model import loading
from finetune.runtime.bootstrap import Stack

own, calls, found = AutoTokenizer.from_pretrained, [], []
AutoTokenizer.from_pretrained = staticmethod(lambda *given, **named: (calls.append(1), own(*given, **named))[1])
class Loader:
    def from_pretrained(**given):
        return None, found.append(tokenizer_utils.load_correct_tokenizer("model"))

Loader.from_pretrained()
twice, unsloth.FastLanguageModel = len(calls), Loader
config = load(["--model.model_name_or_path", "model", "--data.train_file", "x"], command="train")
stack = Stack(backend="unsloth", reason="a test", device="cpu", local_rank=0, patches=())
loading._load_unsloth(config, stack, 64, continue_adapter=True)
one, other = [(each.get_vocab(), each.chat_template, each.special_tokens_map) for each in found]
print("RESULT", twice, len(calls) - twice, one == other)
"""
    done = launch.on_the_installed_unsloth(script, tmp_path)
    assert "RESULT 2 1 True" in done.stdout, done.stderr[-4000:]
