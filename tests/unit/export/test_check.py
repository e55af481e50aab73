"""Tests of finetune/export/check.py."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.export import command, verify
from tests.helpers import tiny
from tests.helpers.export import WARNINGS, edit, flip, load, make_adapter, make_base, merge, tensors

pytestmark = WARNINGS


def wrong_tensors(job: dict[str, Path], check: ModuleType) -> list[str]:
    """What the comparison of an export's tensors finds."""
    reference = check.load_with_adapter(job, job["adapter"], torch.float32)
    return check.compare_tensors(reference, {}, job["exported"])["wrong"]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_trained_tokens_are_checked(kind: str, tmp_path: Path, check: ModuleType) -> None:
    """In a model with tied embeddings the head has them too."""
    base = make_base(tmp_path / "base", kind)
    make_adapter(tmp_path / "adapter", base, trainable_token_indices=[7, 3])
    merge(tmp_path / "adapter", base, tmp_path / "out")
    job = {"base": base, "adapter": tmp_path / "adapter", "exported": tmp_path / "out"}

    assert wrong_tensors(job, check) == []
    content = load_file(tmp_path / "out" / "model.safetensors")
    content["model.embed_tokens.weight"][7, 0] += 1
    save_file(content, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    assert len(wrong_tensors(job, check)) == 1


def test_a_flipped_bit_is_found(run_folder: Path, base: Path, tmp_path: Path, check: ModuleType) -> None:
    merge(run_folder, base, tmp_path / "out")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(run_folder / file, tmp_path / "out" / file)
    job = {"base": base, "adapter": run_folder, "exported": tmp_path / "out", "tokenizer": run_folder}
    job |= {"prompts": ["the cat", "seven small birds"], "max_new_tokens": 8}
    assert check.check(job)["passed"]
    for tensor, bit in (("model.layers.1.mlp.down_proj.weight", 0), ("model.norm.weight", 12)):
        flip(tmp_path / "out", tensor, bit)
        found = check.check(job)
        assert not found["passed"] and tensor in found["why"]
        assert len(found["tensors"]["wrong"]) == 1
        flip(tmp_path / "out", tensor, bit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_numbers_are_equal_to_themselves_alone(dtype: torch.dtype, check: ModuleType) -> None:
    infinite = torch.tensor([-torch.inf, torch.inf])
    assert check.tensor_difference("x", infinite.to(dtype), infinite, merged=False) is None
    for other in (0.0, torch.nan):
        assert check.tensor_difference("x", infinite.to(dtype), torch.tensor([-torch.inf, other]), merged=False)


def test_a_wrong_weight_shows_in_the_loss_too(
    run_folder: Path, base: Path, tmp_path: Path, check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "tensor_difference", lambda *arguments, **more: None)
    merge(run_folder, base, tmp_path / "out")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(run_folder / file, tmp_path / "out" / file)
    job = {"base": base, "adapter": run_folder, "exported": tmp_path / "out", "tokenizer": run_folder}
    job |= {"prompts": ["the cat", "seven small birds"], "max_new_tokens": 8}
    flip(tmp_path / "out", "model.layers.1.mlp.down_proj.weight", 14)  # of the exponent
    found = check.check(job)
    assert not found["passed"] and "the loss is" in found["why"]
    (tmp_path / "out" / "chat_template.jinja").write_text("other")
    assert "another chat template" in check.check(job)["why"]


def test_an_export_is_judged_by_the_loss_on_the_runs_rows(
    run_folder: Path,
    base: Path,
    tmp_path: Path,
    check: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held-out rows come from the data cache, where the run left them."""
    import numpy as np

    from finetune.data import store

    def build(folder: Path) -> dict[str, Any]:
        for split, first in (("train", 3), ("eval", 50)):
            writer = store.Writer(folder, split)
            for row in range(5):
                ids = np.arange(first, first + 8 + row, dtype=np.int32)
                writer.add(ids, np.where(np.arange(len(ids)) < 3, -100, ids).astype(np.int32))
            writer.close()
        return {}

    folder, _ = store.entry(tmp_path / "cache", "key", build, verify=True)
    edit(run_folder / "run.json", data_folder=str(folder), ledger={"train": {}, "eval": {}})
    split, rows = verify.rows(json.loads((run_folder / "run.json").read_text()))
    assert split == "eval" and len(rows) == 5 and rows[0][0][0] == 50 and rows[0][1][:3] == [-100] * 3

    monkeypatch.setattr(verify, "run", lambda job: check.check({"max_new_tokens": 8} | job))
    arguments = [str(run_folder), "--to", "merged", "--json", str(tmp_path / "r.json"), "--out"]
    assert command.main([*arguments, str(tmp_path / "out")]) == 0
    loss = json.loads((tmp_path / "r.json").read_text())["verification"]["loss"]
    assert f"loss on held-out rows {loss['export']:.4f} (run {loss['run']:.4f}, base model {loss['base']:.4f})" in (
        " ".join(capsys.readouterr().out.split())
    )
    with torch.no_grad():
        model = load(tmp_path / "out")
        own = check.mean_loss(model, check.take_rows(rows[:1], 10**6))
        assert own == pytest.approx(float(model(torch.tensor([rows[0][0]]), labels=torch.tensor([rows[0][1]])).loss))
    assert [len(ids) for ids, _ in check.take_rows(rows, 14)] == [8, 6] and check.take_rows(rows, 2) == []
    assert loss["bound"] == pytest.approx(0.1 * max(loss["base"] - loss["run"], 0) + check.LOSS_NOISE)
    given = {"tensors": {"wrong": []}, "loss": {"run": 2.0, "export": 2.2, "bound": 0.22}}
    assert check.verdict(given) == ""
    given["loss"]["export"] = 2.3
    assert check.verdict(given) == "the loss is 2.3000 instead of 2.0000, and may be 0.22 higher"

    shutil.rmtree(folder)
    assert command.main([*arguments, str(tmp_path / "without")]) == 0
    assert "loss on its own answers to three questions" in " ".join(capsys.readouterr().out.split())


def test_llama_cpps_answers_may_part_at_a_tie_only(check: ModuleType) -> None:
    pieces = {1: " a", 2: "é", 3: " b", 4: "<end>"}
    tokenizer = SimpleNamespace(decode=lambda ids, **options: "".join(pieces[one] for one in ids if one != 4))
    gaps = [9.0, 0.2, 0.9, 9.0]

    def outcome(text: str) -> str:
        return check.compare_answers([1, 2, 3, 4], text, gaps, tokenizer)["outcome"]

    assert outcome("aé b") == "equal"
    assert outcome("a c") == "tie"
    assert outcome("aé") == outcome("aé c") == "differs"
    assert outcome("b") == outcome("aé b a") == "differs"
    assert check._up_to({4, 5}, [1, 4, 2, 4]) == [1, 4] and check._up_to({5}, [1, 2]) == [1, 2]


def test_a_gguf_file_is_compared_with_the_folder(
    base: Path, tmp_path: Path, check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the answers of another implementation of the same model in place of llama.cpp's."""
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(base), load(base)
    skewed: list[float] = []

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        ids = tokenizer(request["prompt"]).input_ids
        read, answer = len(ids), []
        while len(answer) < request["n_predict"] and tokenizer.eos_token_id not in answer:
            logits = model(torch.tensor([ids])).logits[0, -1]
            if skewed:
                logits[7] += skewed[0]
            answer.append(int(logits.argmax()))
            ids = [*ids, answer[-1]]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        return {"usage": {"prompt_tokens": read + len(skewed[1:])}, "choices": [{"text": text}]}

    class Parameters:
        model = SimpleNamespace()

    server = SimpleNamespace(handle_completions=reply)
    module = SimpleNamespace(CommonParams=Parameters, Server=lambda parameters: server, __version__="1")
    monkeypatch.setitem(sys.modules, "xllamacpp", module)
    job = {"exported": base, "gguf": "model.gguf", "prompts": ["the cat", "seven small birds"], "max_new_tokens": 8}
    found = check.check(job)
    assert found["passed"] and [one["outcome"] for one in found["answers"]] == ["equal", "equal"]
    assert verify.sentence(found).startswith("llama.cpp gives 2 equal greedy answers over")
    monkeypatch.setattr(check, "TIE", 0.0)  # a model with random weights prefers no token by much
    skewed[:] = [50.0]
    assert check.check(job)["why"] == "an answer differs"
    skewed[:] = [0.0, 1.0]
    assert "tokens instead of" in check.check(job)["why"]


def test_answers_of_a_check_end_where_the_positions_do(tmp_path: Path, check: ModuleType) -> None:
    """GPT-2 has a table of them: beyond it is an IndexError."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = tiny.make_tokenizer(tmp_path)
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=24)
    ).save_pretrained(tmp_path)
    job: dict[str, Any] = {"model": tmp_path, "exported": tmp_path, "tokenizer": tmp_path, "max_new_tokens": 24}
    found = check.check(job | {"prompts": ["the cat", "the cat runs over " * 8]})
    assert found["passed"] and found["loss"]["tokens"] == 14 + 1


def test_a_tower_that_the_base_lacks_is_not_demanded(tmp_path: Path, check: ModuleType) -> None:
    base = tiny.save_multimodal("Gemma3", tmp_path / "base")
    kept = {k: v for k, v in load_file(base / "model.safetensors").items() if "vision_tower" not in k}
    save_file(kept, base / "model.safetensors", {"format": "pt"})
    make_adapter(tmp_path / "adapter", base, exclude_modules=".*vis.*")
    merge(tmp_path / "adapter", base, tmp_path / "out")
    job = {"base": base, "adapter": tmp_path / "adapter", "exported": tmp_path / "out"}

    assert wrong_tensors(job, check) == []
    file = next((tmp_path / "out").glob("*.safetensors"))
    lost = next(name for name in kept if name.endswith("1.self_attn.k_proj.weight"))
    save_file({k: v for k, v in load_file(file).items() if k != lost}, file, {"format": "pt"})
    assert wrong_tensors(job, check) == [f"{lost} is missing"]


def test_tensors_that_the_model_does_not_load_are_compared_with_the_files_before(
    base: Path, tmp_path: Path, check: ModuleType
) -> None:
    """Such as the vision tower of a model that is trained on text."""
    full = Path(shutil.copytree(base, tmp_path / "full"))
    save_file(tensors(full) | {"model.visual.weight": torch.ones(3)}, full / "model.safetensors", {"format": "pt"})
    out = Path(shutil.copytree(full, tmp_path / "out"))
    found = check.compare_tensors(load(full), {}, out)
    assert found["not_compared"] == ["model.visual.weight"]
    check.compare_unloaded(full, out, found)
    assert found["not_compared"] == found["wrong"] == []
    save_file(tensors(full) | {"model.visual.weight": torch.zeros(3)}, out / "model.safetensors", {"format": "pt"})
    found = check.compare_tensors(load(full), {}, out)
    check.compare_unloaded(full, out, found)
    assert found["wrong"] == ["model.visual.weight is not equal to the original in 3 of 3 values"]
