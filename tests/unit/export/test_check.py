"""Tests of finetune/export/check.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.export import command, verify
from finetune.export.adapter import Adapter
from finetune.export.merged import Merge
from tests.helpers import tiny
from tests.helpers.export import WARNINGS, edit, flip, load, make_adapter, make_base, merge, shrink, tensors

pytestmark = WARNINGS

PROJECTION = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_a_check_in_16_bits_does_not_lose_small_updates(
    kind: str, tmp_path: Path, check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a float32 copy of the model does not fit, transformers would load float32 weights rounded to nearest."""
    base = make_base(tmp_path / "base")
    make_adapter(tmp_path / "adapter", base)
    shrink(tmp_path / "adapter", 1e-2)
    exact, out = (Path(shutil.copytree(base, tmp_path / name)) for name in ("exact", "out"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    Merge(base, Adapter(tmp_path / "adapter", config), torch.float32).write(exact)
    job: dict[str, Any] = {"tokenizer": base, "prompts": ["the cat"], "max_new_tokens": 4}
    if kind == "adapter":
        job |= {"base": base, "adapter": tmp_path / "adapter", "exported": exact}
    else:  # a checkpoint of full fine-tuning, whose weights are float32
        edit(exact / "config.json", dtype="bfloat16")
        Merge(exact, None).write(out)
        job |= {"model": exact, "exported": out}
    monkeypatch.setattr(check, "choose_device", lambda job: (torch.device("cpu"), torch.bfloat16))
    with torch.no_grad():
        found = check.check_folder(job)
        assert found["passed"], found["why"]
        loaded = check.load_model(exact, {}, torch.bfloat16).state_dict()[PROJECTION].float()
    old = tensors(base)[PROJECTION].float()
    update = tensors(exact)[PROJECTION] - old
    assert float(((loaded - old) * update).sum() / (update * update).sum()) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_trained_tokens_are_checked(kind: str, tmp_path: Path, check: ModuleType) -> None:
    """In a model with tied embeddings the head has them too."""
    base = make_base(tmp_path / "base", kind)
    make_adapter(tmp_path / "adapter", base, trainable_token_indices=[7, 3])
    merge(tmp_path / "adapter", base, tmp_path / "out")
    job = {"base": base, "adapter": tmp_path / "adapter"}

    def wrong() -> list[str]:
        reference = check.load_with_adapter(
            job, tmp_path / "adapter", torch.float32, torch.device("cpu"), tmp_path / "out"
        )
        return check.compare_tensors(reference, {}, tmp_path / "out", torch.float32)[0]["wrong"]

    assert wrong() == []
    content = load_file(tmp_path / "out" / "model.safetensors")
    content["model.embed_tokens.weight"][7, 0] += 1
    save_file(content, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    assert len(wrong()) == 1


@pytest.mark.parametrize(
    ("tensor", "bit"),
    [("model.layers.1.mlp.down_proj.weight", 0), ("model.embed_tokens.weight", 0), ("model.norm.weight", 12)],
)
def test_a_flipped_bit_is_found(
    tensor: str, bit: int, run_folder: Path, base: Path, tmp_path: Path, check: ModuleType
) -> None:
    merge(run_folder, base, tmp_path / "out")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(run_folder / file, tmp_path / "out" / file)
    job = {"base": base, "adapter": run_folder, "exported": tmp_path / "out", "tokenizer": run_folder}
    job |= {"prompts": ["the cat", "seven small birds"], "max_new_tokens": 8}
    assert check.check(job)["passed"]
    flip(tmp_path / "out", tensor, bit)
    found = check.check(job)
    assert not found["passed"] and tensor in found["why"]
    assert len(found["tensors"]["wrong"]) == 1


def test_a_wrong_weight_shows_in_the_logits_too(
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
    assert not found["passed"] and "logits differ" in found["why"]
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
        own = check.token_losses(model, check.take_rows(rows[:1], 10**6)).mean()
        assert own == pytest.approx(model(torch.tensor([rows[0][0]]), labels=torch.tensor([rows[0][1]])).loss)
    assert [len(ids) for ids, _ in check.take_rows(rows, 14)] == [8, 6] and check.take_rows(rows, 2) == []

    given = {"base": [4.0, 4.0], "run": [2.0, 2.0], "export": [2.0, 2.4], "noisy": [2.1, 2.4]}
    losses = {name: torch.tensor(one) for name, one in given.items()}
    assert check.compare_losses(losses)["bound"] == pytest.approx(0.1 * 2.0 + 0.05)
    found = {"tensors": {"wrong": []}, "logits": {"difference": 0, "bound": 1}, "answers": []}
    assert check.verdict(found | {"loss": check.compare_losses(losses)}) == ""
    worse = check.compare_losses(losses | {"export": losses["noisy"] + 0.1, "noisy": losses["noisy"]})
    assert "loss on the run's rows is 2.3500 instead of 2.0000" in check.verdict(found | {"loss": worse})

    shutil.rmtree(folder)
    assert command.main([*arguments, str(tmp_path / "without")]) == 0
    assert "The run's rows are not in the data cache" in capsys.readouterr().out


def test_answers_may_part_at_a_tie_only(check: ModuleType) -> None:
    tokenizer = SimpleNamespace(decode=str)
    rows = torch.zeros(4, 5)
    rows[2, 1], rows[2, 3] = 2.0, 1.9
    compare = check.compare_answers
    assert compare([4, 1], [4, 1], rows, 2, 0.0, tokenizer)["outcome"] == "equal"
    assert compare([4, 1], [4, 3], rows, 2, 0.2, tokenizer)["outcome"] == "tie"
    assert compare([4, 1], [4, 3], rows, 2, 0.05, tokenizer)["outcome"] == "differs"
    assert compare([4, 1], [4], rows, 2, 9.0, tokenizer)["outcome"] == "differs"


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
    assert found["passed"] and [one["tokens"] for one in found["answers"]] == [14, 1]


def test_llama_cpp_has_what_the_check_uses() -> None:
    """Of the extra `gguf`, which `make test-oldest` installs."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install '.[gguf]'")
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.n_parallel, parameters.warmup = "model.gguf", 64, 1, False
    assert parameters.model.path == "model.gguf" and callable(xllamacpp.Server.handle_completions)


def test_experts_are_compared_as_the_reference_chose_them(check: ModuleType) -> None:
    """Scores that are nearly equal may part at any rounding, and the logits with them."""
    before = torch.tensor([[0.5, 0.3, 0.2999, 0.1], [0.6, 0.4, 0.2, 0.1]])
    after = torch.tensor([[0.5, 0.2999, 0.3, 0.1], [0.6, 0.4, 0.2, 0.1]])
    with check.Choices() as chosen:
        torch.topk(before, 2, dim=-1)
    with check.Choices(chosen.experts) as same:
        values, experts = after.topk(2)
    assert experts.tolist() == [[0, 1], [0, 1]] and values[0].tolist() == pytest.approx([0.5, 0.2999])
    assert (same.count, same.others) == (4, 1)
    (others,) = chosen.other_experts(same)
    assert others.tolist() == [[0, 2], [0, 1]]  # the second row's are too far apart
    found: dict[str, Any] = {"tensors": {"wrong": []}, "logits": {"difference": 0, "bound": 1}, "answers": []}
    assert check.verdict(found | {"experts": {"chosen": 100, "others": 4, "bound": 5.0}}) == ""
    assert "choose 40 of 100 experts" in check.verdict(found | {"experts": {"chosen": 100, "others": 40, "bound": 5}})


def test_tokens_that_llama_cpp_does_not_report(check: ModuleType) -> None:
    """Those after which the text ends within a character."""
    pieces = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:]}
    tokenizer = SimpleNamespace(decode=lambda ids: b"".join(pieces[one] for one in ids).decode(errors="replace"))
    assert check._unreported([2, 3, 1], 3, [1], tokenizer) == [2]
    assert check._unreported([1, 2, 3], 1, [], tokenizer) == []
    assert check._unreported([1, 3], 3, [], tokenizer) == []  # a token was left out that should have been reported
    assert check._unreported([2], None, [1], tokenizer) == [2]
