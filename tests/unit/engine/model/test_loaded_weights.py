"""A model or an adapter whose files lack weights is refused; what may be missing is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from finetune.config.load import load
from finetune.engine.model import adapters, loading
from finetune.errors import UserError
from tests.helpers import tiny


def rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: {k: v for k, v in tensors.items() if ".1.mlp.up" not in k}, "lack 1 of .*Copy or download"),
        (
            lambda tensors: {f"base_model.model.{k}": v for k, v in tensors.items()},
            "base_model.*merge_and_unload",
        ),
        (lambda tensors: {k.replace("q_proj", "q_proj.base_layer"): v for k, v in tensors.items()}, "instead of"),
        (lambda tensors: {k: v for k, v in tensors.items() if "lm_head" not in k}, "tie_word_embeddings: true"),
    ],
    ids=["one", "prefix", "infix", "head"],
)
def test_random_weights_are_refused(change: Callable[..., dict[str, Any]], why: str, tmp_path: Path) -> None:
    shape = transformers.LlamaConfig(**tiny.SMALL, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(shape).save_pretrained(tmp_path)
    assert loading.load_base(str(tmp_path))
    rewrite(tmp_path / "model.safetensors", change)
    with pytest.raises(UserError, match=why):
        loading.load_base(str(tmp_path))


def test_a_tied_head_may_be_missing(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.SMALL, tie_word_embeddings=True)).save_pretrained(
        tmp_path
    )
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert loading.load_base(str(tmp_path))


def test_the_tensors_of_an_adapter_that_peft_drops(tmp_path: Path) -> None:
    def base() -> Any:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.SMALL))

    config = load(["--model.model_name_or_path", "m", "--data.train_file", "x"])
    adapters.add_adapter(base(), config).save_pretrained(tmp_path)
    assert adapters.load_adapter(base(), str(tmp_path)).peft_config
    rewrite(
        tmp_path / "adapter_model.safetensors",
        lambda tensors: (
            tensors | {k.replace("q_proj", "further"): v.clone() for k, v in tensors.items() if "q_proj" in k}
        ),
    )
    with pytest.raises(UserError, match="nothing of it takes .*more"):
        adapters.load_adapter(base(), str(tmp_path))
