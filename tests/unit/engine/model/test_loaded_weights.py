"""A model or an adapter whose files lack weights is refused; what may be missing is not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from finetune.config.load import load
from finetune.engine.model import adapters, loading
from finetune.errors import UserError
from finetune.runtime.bootstrap import Stack
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
def test_random_weights_are_refused(
    change: Callable[..., dict[str, Any]],
    why: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    shape = transformers.LlamaConfig(**tiny.SMALL, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(shape).save_pretrained(tmp_path)
    assert loading.load_base(str(tmp_path))
    rewrite(tmp_path / "model.safetensors", change)
    with caplog.at_level("WARNING"), pytest.raises(UserError, match=why):
        loading.load_base(str(tmp_path))
    assert "LOAD REPORT" not in caplog.text  # transformers' table of the same


def test_a_tied_head_may_be_missing(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.SMALL, tie_word_embeddings=True)).save_pretrained(
        tmp_path
    )
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert loading.load_base(str(tmp_path))


def load_to_train(folder: Path, full: bool, *, without_weights: bool = False) -> Any:
    words = ["--model.model_name_or_path", str(folder), "--model.full_finetuning", str(full).lower()]
    words += ["--data.train_file", "x", "--model.backend", "transformers"]
    config = load(words, command="train")
    stack = Stack(backend="transformers", reason="a test", device="cpu", local_rank=0, patches=())
    return loading.load(config, stack, row_length=64, without_weights=without_weights)


def test_a_tower_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Full fine-tuning would save random numbers."""
    folder = tiny.save_multimodal("Qwen3_5", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    lost = sorted(name for name in weights if "visual.merger" in name)
    rewrite(folder / "model.safetensors", lambda tensors: {k: v for k, v in tensors.items() if k not in lost})
    with pytest.raises(UserError, match=rf"lack {len(lost)} of .*random numbers: {lost[0]}, "):
        load_to_train(folder, full=True)
    assert loading.load_base(str(folder)) and capsys.readouterr().out == ""  # such as for chat
    assert load_to_train(folder, full=False)
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "random" in one]
    assert line.startswith(f"warning: the files of the model lack {len(lost)} weights of its towers")
    assert lost[0] in line


@pytest.mark.parametrize("without_weights", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("change", "first"), [("layer", "model.layers.1.input_layernorm.weight"), ("mtp", "mtp.fc")])
def test_weights_that_are_not_loaded(
    change: str, first: str, full: bool, without_weights: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a further layer, or those that the class leaves out: only full fine-tuning loses them."""
    if change == "mtp":
        folder = tiny.save_multimodal("Qwen3_5", tmp_path / "model")
        more = {"mtp.fc": torch.ones(2), "model.rotary_emb.inv_freq": torch.ones(2)}
        rewrite(folder / "model.safetensors", lambda tensors: tensors | more)
    else:
        folder = tiny.make_model(tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert load_to_train(folder, full, without_weights=without_weights)
    lines = [one for one in capsys.readouterr().out.splitlines() if "does not load" in one]
    assert len(lines) == (full or change == "layer")
    for line in lines:
        assert f"{'9 weights' if change == 'layer' else '1 weight'} of the model's files: {first}" in line
        assert ("fewer layers" in line) == line.startswith("warning: ") == (change == "layer")
        assert ("The trained model will not have them." in line) == full


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


@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments:UserWarning")  # as in every command
@pytest.mark.parametrize("record", ["unsloth", "grouped", "detail"])
def test_stacked_experts_in_unsloths_older_order(
    record: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They compute what they were trained to, and are saved in PEFT's order, which is not converted again."""
    config = load(["--model.model_name_or_path", "m", "--data.train_file", "x", "--lora.r", "3"])
    trained = adapters.add_adapter(tiny.make_moe("Qwen3Moe"), config).eval()
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        for one in trained.parameters():
            one.add_(0.1 * torch.randn_like(one)) if one.requires_grad else None
        wanted = trained(ids).logits
    trained.save_pretrained(tmp_path / "older")
    file = tmp_path / "older" / "adapter_config.json"
    content = json.loads(file.read_text())
    assert content["target_parameters"]
    recorded = {"unsloth_fused_expert_lora": {"lora_B_layout": "grouped_by_expert"}} if record == "detail" else {}
    content["auto_mapping"] = {"unsloth_fixed": True} | recorded
    content |= {"lora_B_layout": "grouped_by_expert"} if record == "grouped" else {}
    file.write_text(json.dumps(content))
    rank, experts = 3, tiny.EXPERTS
    order = [r * experts + e for e in range(experts) for r in range(rank)]  # in PEFT's columns, those of expert 0 first
    rewrite(
        tmp_path / "older" / "adapter_model.safetensors",
        lambda tensors: (
            tensors | {k: v[:, order].contiguous() for k, v in tensors.items() if "experts" in k and "lora_B" in k}
        ),
    )
    for name, converts in (("older", True), ("again", False)):
        found = adapters.load_adapter(tiny.make_moe("Qwen3Moe"), str(tmp_path / name)).eval()
        torch.testing.assert_close(found(ids).logits, wanted)
        assert ("Unsloth before 2026.9.6" in capsys.readouterr().out) == converts
        found.save_pretrained(tmp_path / "again")
