"""Today's families through whole runs: QLoRA on packs, resumed, merged and talked to, and full fine-tuning."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

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
    """A resumed run goes on as one that was never stopped, the merged model answers as plain transformers has it, and
    one that was trained in full has the tensors of its base."""
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
        assert answers[1]["text"] == answer_of_transformers(family, merged) and answers[0]["tokens"]
        trained = runs(full, *STEPS, "--model.full_finetuning", "true")
    assert trained["packs"]["packed"] and trained["status"] == "done"
    before, after = load_file(base / "model.safetensors"), load_file(full / "model.safetensors")
    assert {name: one.shape for name, one in after.items()} == {name: one.shape for name, one in before.items()}
    assert sum(not torch.equal(one, before[name]) for name, one in after.items()) > 15  # without towers


def answer_of_transformers(family: str, folder: Path) -> str:
    kind = "AutoModelForMultimodalLM" if family in tiny.MULTIMODAL else "AutoModelForCausalLM"
    model: Any = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": "the cat runs"}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, do_sample=False, max_new_tokens=12, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
