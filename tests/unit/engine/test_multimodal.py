"""Models for images beside text, trained on text: in this process, against plain transformers and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from finetune import cli
from finetune.config import load
from finetune.data import store
from finetune.engine import multimodal
from finetune.engine.model import adapters, load_errors, loading
from finetune.engine.sharding import shard
from finetune.errors import UserError
from tests.helpers import launch, tiny
from tests.helpers.export import WARNINGS, check_in_this_process
from tests.helpers.runs import Runs, in_this_process

pytestmark = WARNINGS
FAMILIES = sorted(tiny.MULTIMODAL)


def without_gradient(model: Any) -> set[str]:
    """Names of the trainable weights that a row of text gives no gradient."""
    ids = torch.arange(3, 24)[None] % tiny.VOCABULARY
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    return {name for name, one in model.named_parameters() if one.requires_grad and one.grad is None}


@pytest.mark.parametrize("family", FAMILIES)
def test_towers_are_what_text_gives_no_gradient(family: str) -> None:
    model = tiny.make_multimodal(family)
    beside = multimodal.towers(model)
    in_towers = {name for name, _ in model.named_parameters() if name.startswith(tuple(f"{one}." for one in beside))}
    assert beside and without_gradient(model) == in_towers
    multimodal.prepare(model)
    assert {name for name, one in model.named_parameters() if not one.requires_grad} == in_towers
    assert [name for name, _ in shard.units(model)][: len(beside)] == list(beside)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [None, "all-linear", "[q_proj, down_proj]", ".*(q_proj|down_proj)"])
def test_an_adapter_leaves_towers_out(family: str, targets: str | None) -> None:
    words = [] if targets is None else ["--lora.target_modules", targets]
    words += ["--lora.adapter_kwargs", "{exclude_modules: [layers.0.self_attn.q_proj]}"]
    config = load(["--model.model_name_or_path", "m", "--data.train_file", "x", *words])
    model: Any = adapters.add_adapter(tiny.make_multimodal(family), config)
    base = model.get_base_model()
    adapted = {name for name, one in base.named_modules() if hasattr(one, "lora_A")}
    linear = {name for name, one in base.get_decoder().named_modules() if isinstance(one, torch.nn.Linear)}
    excluded = {one for one in linear if one.endswith("layers.0.self_attn.q_proj")}
    wanted = {one.removesuffix(".base_layer") for one in linear if "lora_" not in one} - excluded
    prefix = next(name for name, one in base.named_modules() if one is base.get_decoder())
    if targets != "all-linear":
        chosen = adapters.PROJECTIONS if targets is None else ("q_proj", "down_proj")
        wanted = {one for one in wanted if one.endswith(chosen)}
    assert adapted == {f"{prefix}.{one}" for one in wanted}
    assert not without_gradient(model)


def test_names_of_layers_in_towers_alone() -> None:
    with pytest.raises(UserError, match=r"matches no module of the text model: `qkv`"):
        config = load(["--model.model_name_or_path", "m", "--data.train_file", "x", "--lora.target_modules", "[qkv]"])
        adapters.adapter_targets.check(tiny.make_multimodal("Qwen2_5_VL"), config, ["qkv"], "transformers")


@pytest.mark.parametrize(
    ("kind", "named", "whole"),
    [
        ("Llama", "LlamaForCausalLM", False),
        ("Qwen3_5", "Qwen3_5ForConditionalGeneration", True),
        ("Qwen3_5", "Qwen3_5ForCausalLM", False),
        ("Qwen3_5Text", "Qwen3_5ForCausalLM", False),
        ("Llama4", "Llama4ForConditionalGeneration", True),
        ("Llava", "LlavaForConditionalGeneration", True),
        ("Florence2", "Florence2ForConditionalGeneration", False),
        ("Qwen2_5Omni", "Qwen2_5OmniModel", False),
        ("T5", "T5ForConditionalGeneration", False),
    ],
)
def test_the_class_that_loads_all_of_a_model(kind: str, named: str, whole: bool) -> None:
    shape = getattr(transformers, f"{kind}Config")()
    shape.architectures = [named]
    other = transformers.AutoModelForMultimodalLM if whole else transformers.AutoModelForCausalLM
    assert multimodal.auto_class(shape) is other
    of_text, of_all = "model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"
    assert multimodal.auto_class(shape, [of_all]) is other
    only_text = kind in ("Qwen3_5", "Llama4")  # adapters of version 0.1.0
    assert multimodal.auto_class(shape, [of_text]) is (transformers.AutoModelForCausalLM if only_text else other)


@pytest.mark.parametrize("kind", ["T5", "Florence2", "Qwen2_5Omni"])
def test_what_cannot_be_trained_says_why(kind: str, tmp_path: Path) -> None:
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    why = "no decoder for it that continues text.*encoder-decoders and compositions of several models are not"
    with pytest.raises(UserError, match=why), load_errors.explain_load_error(str(tmp_path), "model"):
        loading.load_base(str(tmp_path))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("multimodal")
    tiny.make_rows(folder / "train.jsonl", 4, longest=12)
    for family in ("Gemma3", "Qwen3_5", "Qwen3VL"):
        tiny.save_multimodal(family, folder / family)
    return folder


def plain_losses(model: Any, rows: store.Rows, steps: int) -> list[float]:
    """AdamW at 1e-3 on all rows in each step, clipped at 1."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        total, count = torch.zeros(()), 0
        for index in range(len(rows)):
            ids, labels = (torch.tensor(values, dtype=torch.int64) for values in rows[index])
            logits = model(input_ids=ids[None]).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
            count += int((labels[1:] != -100).sum())
        (loss := total / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("family", "full", "packed"),
    [
        ("Gemma3", "true", ""),
        ("Qwen3_5", "true", ""),
        ("Qwen3_5", "false", "in one pack"),
        ("Qwen3VL", "false", "in one pack"),
    ],
)
@pytest.mark.campaign
def test_a_run_and_its_export(
    family: str,
    full: str,
    packed: str,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The losses of plain transformers and PEFT; the saved model and the export have the class and each tensor of the
    base, those of the tower bit for bit."""
    from peft import LoraConfig, get_peft_model

    base = shared / family
    with in_this_process(monkeypatch, tmp_path):
        words = ["--model.model_name_or_path", str(base), "--model.full_finetuning", full]
        words += ["--training.learning_rate", "1e-3", "--training.lr_scheduler_type", "constant"]
        words += ["--training.optim", "adamw_torch", "--training.max_steps", "3"]
        pack = ["--data.packing", "true", "--data.max_length", "512", "--training.global_batch_size", "1"]
        words += pack if packed else []
        words += ["--training.gradient_checkpointing", "false"]
        run = Runs(shared, monkeypatch)(tmp_path / "out", *words)
        printed = " ".join(capsys.readouterr().out.split())
        assert "Rows of text never reach model.vis" in printed
        assert run["packs"]["packed"] == bool(packed) and f"{run['packs']['reason']}" in printed
        check_in_this_process(monkeypatch)
        assert cli.main(["export", str(tmp_path / "out"), "--to", "merged", "--out", str(tmp_path / "merged")]) == 0
    plain: Any = transformers.AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    if full == "false":
        lora = {name: run["config"]["lora"][name] for name in ("r", "lora_alpha", "lora_dropout")}
        torch.manual_seed(run["config"]["training"]["seed"])
        targets = LoraConfig(target_modules=list(adapters.PROJECTIONS), exclude_modules=".*vis.*", **lora)
        plain = get_peft_model(plain, targets)
    (folder,) = {path.parent for path in tmp_path.glob("**/train.arrow")}
    assert run["losses"] == pytest.approx(plain_losses(plain, store.load_rows(folder, "train"), 3), abs=1e-4)
    before = load_file(base / "model.safetensors")
    for made in (tmp_path / "out", tmp_path / "merged")[full == "false" :]:
        after, shape = load_file(made / "model.safetensors"), transformers.AutoConfig.from_pretrained(made)
        assert {name: one.shape for name, one in after.items()} == {name: one.shape for name, one in before.items()}
        assert shape.architectures == [type(plain.get_base_model() if full == "false" else plain).__name__]
        same = {name for name, one in after.items() if torch.equal(one, before[name])}
        in_towers = {name for name in before if "visual" in name or "vision" in name or "multi_modal" in name}
        assert in_towers and in_towers <= same and len(same) <= len(before) - 10


@pytest.mark.process
@pytest.mark.unsloth
@pytest.mark.campaign
def test_shards_and_unsloth_keep_every_tensor(shared: Path, tmp_path: Path) -> None:
    words = ["--model.model_name_or_path", str(shared / "Qwen3_5"), "--data.train_file", str(shared / "train.jsonl")]
    words += ["--training.max_steps", "2", "--training.global_batch_size", "2", "--logging.generate_samples", "0"]
    words += ["--model.full_finetuning", "true", "--training.learning_rate", "1e-3", "--model.backend"]
    before, losses = load_file(shared / "Qwen3_5" / "model.safetensors"), []
    for how, *further in (("1 rank", "unsloth"), ("2 ranks", "transformers", "--training.strategy", "shard")):
        run = launch.train(how, [*words, *further], out=tmp_path / how, cache=tmp_path)
        losses.append(run["losses"])
        files = (tmp_path / how).glob("model*.safetensors")
        after = {name: one for file in files for name, one in load_file(file).items()}
        assert after.keys() == before.keys()
        kept = [name for name in before if torch.equal(after[name], before[name])]
        assert {name for name in before if ".visual." in name} <= set(kept) and len(kept) < len(before) - 20
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
