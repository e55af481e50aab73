"""Today's families through whole runs: QLoRA on packs, resumed, merged and talked to, and full fine-tuning."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from finetune import cli
from tests.helpers import tiny
from tests.helpers.chat import answered
from tests.helpers.export import WARNINGS, check_in_this_process
from tests.helpers.runs import Runs, in_this_process

pytestmark = WARNINGS
OTHERS = ("Qwen3_5", "Qwen3Next", "Gemma3", "Gemma4", "Mistral3", "Lfm2", "NemotronH", "FalconH1")
FAMILIES = ["GraniteMoeHybrid", *(pytest.param(one, marks=pytest.mark.campaign) for one in OTHERS)]
STEPS = ("--data.packing", "true", "--data.max_length", "128", "--training.global_batch_size", "1")
STEPS += ("--training.max_steps", "2", "--training.save_steps", "1")
FINAL = "adapter_model.safetensors"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_through_its_runs(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run goes on as one that was never stopped, the adapter and the merged model answer, and a model that is
    trained in full has the tensors of its base."""
    base = (tiny.save_multimodal if family in tiny.MULTIMODAL else tiny.save_text)(family, tmp_path / "model")
    tiny.make_rows(tmp_path / "train.jsonl", 12, longest=12)
    (prompts := tmp_path / "prompts.txt").write_text("the cat runs\n")
    once, twice, merged, full = (tmp_path / name for name in ("once", "twice", "merged", "full"))
    check_in_this_process(monkeypatch)
    with in_this_process(monkeypatch, tmp_path):
        runs = Runs(tmp_path, monkeypatch)
        quantized = (*STEPS, "--model.load_in_4bit", "true", "--lora.target_modules", "all-linear")
        first = runs(once, *quantized)
        assert first["packs"]["packed"], first["packs"]
        shutil.copytree(once / "checkpoint-1", twice / "checkpoint-1")
        again = runs(twice, *quantized, "--training.resume_from_checkpoint", "true")
        assert again["losses"] == first["losses"][1:] and (once / FINAL).read_bytes() == (twice / FINAL).read_bytes()
        assert cli.main(["export", str(once), "--to", "merged", "--out", str(merged)]) == 0
        answers = [answered(tmp_path, one, "--prompts", str(prompts))["answers"][0]["answer"] for one in (once, merged)]
        assert all(one["text"] for one in answers)
        check_adapter(once, base, merged)
        trained = runs(full, *STEPS, "--model.full_finetuning", "true")
    assert trained["packs"]["packed"] and trained["status"] == "done"
    before, after = load_file(base / "model.safetensors"), load_file(full / "model.safetensors")
    assert {name: one.shape for name, one in after.items()} == {name: one.shape for name, one in before.items()}
    assert sum(not torch.equal(one, before[name]) for name, one in after.items()) > 15  # without towers


def check_adapter(adapter: Path, base: Path, merged: Path) -> None:
    """An adapter names modules of the checkpoint's own class, as servers read them, and plain PEFT loads all of it onto
    that class, with the outputs of the merged model."""
    kind = getattr(transformers, json.loads((base / "config.json").read_text())["architectures"][0])
    model, whole = (kind.from_pretrained(folder, dtype=torch.float32).eval() for folder in (base, merged))
    modules, content = dict(model.named_modules()), load_file(adapter / FINAL)
    names = [re.fullmatch(r"base_model\.model\.(.+?)(\.base_layer)*\.lora_[AB]\.weight", name) for name in content]
    assert names and all(found is not None and found[1] in modules for found in names), list(content)[:9]
    loaded, ids = peft.PeftModel.from_pretrained(model, adapter).eval(), torch.arange(5, 25)[None]
    assert peft.get_peft_model_state_dict(loaded).keys() == content.keys()
    with torch.no_grad(), loaded.disable_adapter():
        before = loaded(input_ids=ids).logits
    with torch.no_grad():
        change, off = (one(input_ids=ids).logits - before for one in (loaded, whole))
    assert (change - off).abs().max() < 0.2 * change.abs().max()


@pytest.mark.campaign
@pytest.mark.parametrize("family", ["GraniteMoeHybrid", *OTHERS])
def test_a_dry_run_of_a_family(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = (tiny.save_multimodal if family in tiny.MULTIMODAL else tiny.save_text)(family, tmp_path / "model")
    rows = tiny.make_rows(tmp_path / "train.jsonl", 12, longest=12)
    words = ["--model.model_name_or_path", str(base), "--data.train_file", str(rows), "--model.backend", "transformers"]
    with in_this_process(monkeypatch, tmp_path):
        assert cli.main(["dryrun", *words, *STEPS[:6], "--json", str(report := tmp_path / "dry.json")]) == 0
    assert json.loads(report.read_text())["memory"]["peak_gib"] > 0
