"""The settings of the model and its adapter, on both backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.config import load
from finetune.engine.model import load_checks, loading
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack
from tests.helpers import launch

PLAIN = Stack(backend="transformers", reason="a test", device="cpu", local_rank=0, patches=())


def loaded(folder: Path, *extra: str) -> Any:
    named = ["--model.model_name_or_path", str(folder), "--data.train_file", "t", "--model.backend", "transformers"]
    return loading.load(load([*named, *extra]), PLAIN, row_length=64)


def adapters(found: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in found.named_parameters() if p.requires_grad}


def test_adapter_settings_on_the_transformers_backend(tiny_model: Path) -> None:
    one, same = adapters(loaded(tiny_model)), adapters(loaded(tiny_model, "--lora.random_state", "42"))
    other = adapters(loaded(tiny_model, "--lora.random_state", "7"))
    assert all(torch.equal(one[name], same[name]) for name in one)  # 42 is the default of training.seed
    assert any(not torch.equal(one[name], other[name]) for name in one)
    first_layer = adapters(loaded(tiny_model, "--lora.adapter_kwargs", "{layers_to_transform: [0]}"))
    assert 0 < len(first_layer) < len(one) and all("layers.0." in name for name in first_layer)
    assert loaded(tiny_model, "--lora.bias", "all").peft_config["default"].bias == "all"


def test_arguments_that_the_backend_does_not_take(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="PEFT's LoraConfig has no `finetune_mlp_modules`"):
        loaded(tiny_model, "--lora.adapter_kwargs", "{finetune_mlp_modules: false}")
    named = ["--model.model_name_or_path", str(tiny_model), "--data.train_file", "t", "--model.loader", "FastModel"]
    with pytest.raises(UserError, match=r"model.loader is FastModel, .* the backend is transformers \(a test\)"):
        load_checks.check(load(named), PLAIN)


@pytest.mark.parametrize("chosen", ["nonsense", "flash_attention_3"])
def test_an_attention_that_is_not_there_is_named_with_its_key(chosen: str, tiny_model: Path) -> None:
    """transformers has no such name; its package is not installed."""
    with pytest.raises(UserError, match=f"model.attn_implementation is {chosen}, .*Set it to null"):
        loaded(tiny_model, "--model.attn_implementation", chosen)


UNSLOTH = """
import json, sys
from finetune.runtime import bootstrap
from finetune.config import load
stack = bootstrap.start("unsloth")
from finetune.engine.model import loading
answers = []
for extra in json.loads(sys.argv[2]):
    config = load(["--model.model_name_or_path", sys.argv[1], "--data.train_file", "t", *extra])
    try:
        found = loading.load(config, stack, row_length=64)
        names = [name for name, p in found.named_parameters() if p.requires_grad]
        answers.append([len(names), sum("layers.1." in name for name in names), found.peft_config["default"].bias])
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""


@pytest.mark.unsloth
@pytest.mark.process
def test_loader_and_adapter_settings_on_unsloth(tiny_model: Path, tmp_path: Path) -> None:
    cases = [
        ["--lora.r", "8"],
        ["--model.loader", "FastModel", "--lora.adapter_kwargs", "{layers_to_transform: [0]}"],
        ["--model.loader_kwargs", "{offload_embedding: false}", "--lora.bias", "all"],
        ["--model.loader_kwargs", "{unsloth_tiled_mlb: true}"],
        ["--lora.adapter_kwargs", "{loftq: {}}"],
        ["--model.load_in_8bit"],
    ]
    done = launch.python(["-c", UNSLOTH, str(tiny_model), json.dumps(cases)], cache=tmp_path, kind="unsloth")
    assert done.returncode == 0, done.stderr[-3000:]
    usual, first_layer, biased, misspelt, unknown, eight = json.loads(done.stdout.splitlines()[-1])
    assert usual == [28, 14, "none"]  # two layers, seven projections, A and B
    assert first_layer == [14, 0, "none"]
    assert biased == [28, 14, "all"]  # a model without biases: that the argument arrives is all that can be seen
    assert misspelt.startswith(
        "UserError: model.loader_kwargs has `unsloth_tiled_mlb`, which no loader of this model accepts"
    )
    assert unknown.startswith("UserError: lora.adapter_kwargs has `loftq`, which no loader of this model accepts")
    assert eight.startswith("UserError: model.load_in_8bit is set, but the backend loaded 16-bit weights")
