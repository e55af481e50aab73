"""Tests of finetune/export/command.py."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from finetune.engine.checkpoint import checkpoints
from finetune.engine.optimizer import master_weights
from finetune.errors import UserError
from finetune.export import card, command, verify
from finetune.export.merged import Merge
from tests.helpers.export import WARNINGS, edit, ends, flip, load, tensors

pytestmark = WARNINGS


def checkpoint(run: Path) -> Path:
    """checkpoint-5 of a run, complete."""
    folder = run / "checkpoint-5"
    folder.mkdir()
    for file in run.iterdir():
        if file.is_file() and file.name != "run.json":
            shutil.copyfile(file, folder / file.name)
    checkpoints.seal(folder, {"step": 5, "settings": json.loads((run / "run.json").read_text())["settings"]})
    return folder


def test_folders_that_cannot_be_exported(
    run_folder: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def words(folder: Path, *more: str) -> str:
        found = ends(capsys, [str(folder), "--to", "merged", "--out", str(out), "--no-verify", *more], 2)
        assert not out.exists() and not list(tmp_path.glob(".*"))
        return found

    assert "no such folder" in words(tmp_path / "none")
    assert "not the output folder of a run" in words(base)
    partial = checkpoint(run_folder)
    (partial / "adapter_model.safetensors").write_bytes(b"x" * 10)
    assert "adapter_model.safetensors has 10 bytes" in words(partial)
    shutil.rmtree(partial)
    good = checkpoint(run_folder)
    edit(run_folder / "run.json", status="failed")
    assert f"its status is failed. Export a checkpoint: {good}." in words(run_folder)
    edit(run_folder / "run.json", status="done", final_files={"adapter_model.safetensors": "0" * 32})
    assert "does not match its checksum in run.json" in words(run_folder)
    weights = run_folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert "adapter_model.safetensors is damaged: it has" in words(run_folder)
    (run_folder / "run.json").write_text("[")
    assert "run.json cannot be read" in words(run_folder)


def test_a_disk_without_space(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    words = ends(capsys, [str(run_folder), "--to", "merged", "--out", str(tmp_path / "out")], 2)
    assert f"--out is {tmp_path / 'out'}, whose disk has 1 MiB free; the export needs 64 MiB" in words
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["weights", "card"])
def test_a_disk_that_fills_up_while_writing(
    part: str, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another program took since the space was looked at."""
    write = Merge.write

    def full(self: Merge, folder: Path, shard: int) -> None:
        write(self, folder, shard)
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "model.safetensors"))

    def full_card(folder: Path, *given: Any) -> None:
        (folder / "README.md").write_text("ha")
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "README.md"))

    monkeypatch.setattr(*((Merge, "write", full) if part == "weights" else (card, "write", full_card)))
    out = tmp_path / "out"
    words = ends(capsys, [str(run_folder), "--to", "merged", "--out", str(out), "--no-verify"], 1)
    assert "disk" in words and "space" in words
    assert not out.exists() and not list(tmp_path.glob(".*"))


def test_options_that_do_not_fit(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    given = [str(run_folder), *out]
    for arguments, expected in {
        (): "export needs --to",
        ("--to", "hub"): "expected adapter, merged or gguf",
        ("--to", "merged", "--gguf-type", "f16"): "--gguf-type is for GGUF files",
        ("--to", "adapter", "--shard-size", "1"): "--shard-size is for merged models: got --to adapter",
        (
            "--to",
            "gguf",
            "--dtype",
            "float32",
        ): "merged models: got --to gguf. Remove it, or use --gguf-type",
        ("--to", "merged", "--dtype", "float16"): "expected bfloat16 or float32",
        ("--to", "merged", "--shard-size", "0"): "expected a size in GB",
    }.items():
        assert expected in ends(capsys, [*given, *arguments], 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    assert "exists already. Give a new folder" in ends(capsys, [*given, "--to", "merged", "--overwrite"], 2)
    assert (tmp_path / "out" / "mine").read_text() == "kept"


@pytest.mark.usefixtures("in_this_process")
def test_an_export_is_complete_and_verified(run_folder: Path, base: Path, tmp_path: Path) -> None:
    edit(base / "generation_config.json", eos_token_id=1)  # another than the tokenizer's, which ended the turns
    given = checkpoint(run_folder)
    out, report = tmp_path / "a" / "out", tmp_path / "report.json"
    arguments = ["--to", "merged", "--out", str(out), "--json", str(report), "--shard-size", "0.0001"]
    assert command.main([str(given), *arguments]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md"} <= names
    assert "model.safetensors.index.json" in names and not names & {"optimizer.pt", "checkpoint.json"}
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1, 2]
    found = json.loads(report.read_text())
    assert found["verification"]["passed"] and found["step"] == 5
    assert found["verification"]["tensors"] == {"compared": 21, "changed": 6, "not_compared": [], "wrong": []}
    loss = found["verification"]["loss"]
    assert loss["export"] - loss["run"] <= loss["bound"] and loss["export"] != loss["run"]
    assert str(tmp_path) not in (out / "README.md").read_text() + (out / "export.json").read_text()


@pytest.mark.usefixtures("in_this_process")
def test_an_adapter_and_a_full_model_are_copied_bit_by_bit(run_folder: Path, base: Path, tmp_path: Path) -> None:
    assert command.main([str(run_folder), "--to", "adapter", "--out", str(tmp_path / "adapter")]) == 0
    one, two = (tensors(folder) for folder in (run_folder, tmp_path / "adapter"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    full = Path(shutil.copytree(base, tmp_path / "full"))
    (full / "run.json").write_text(json.dumps({"status": "done", "config": {"model": {}}}))
    assert command.main([str(full), "--to", "merged", "--out", str(tmp_path / "out")]) == 0
    one, two = (tensors(folder) for folder in (full, tmp_path / "out"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    with pytest.raises(UserError, match="has no adapter"):
        command.run([str(full), "--to", "adapter", "--out", str(tmp_path / "none")])


@pytest.mark.usefixtures("in_this_process")
def test_float32_weights_of_a_16_bit_model_are_rounded_as_the_final_model(
    base: Path, tmp_path: Path, check: ModuleType
) -> None:
    """A checkpoint of full fine-tuning, with updates that rounding to nearest would lose."""
    full = Path(shutil.copytree(base, tmp_path / "full"))
    old = tensors(full)
    trained = {name: one.float() * (1 + 2**-11) for name, one in old.items()}
    save_file(trained, full / "model.safetensors", {"format": "pt"})
    (full / "run.json").write_text(json.dumps({"status": "done", "config": {"model": {}}}))
    assert command.main([str(full), "--to", "merged", "--out", str(tmp_path / "out")]) == 0
    own = tensors(tmp_path / "out")
    model = load(full)
    state = master_weights.saved_state(model, torch.bfloat16)
    assert own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in own)
    name = "model.layers.0.mlp.up_proj.weight"
    assert float(own[name].float().abs().sum() / old[name].float().abs().sum() - 1) == pytest.approx(2**-11, rel=0.1)
    save_file({name: one.bfloat16() for name, one in trained.items()}, tmp_path / "out" / "model.safetensors")
    found = check.compare_tensors(load(full), check.open_tensors(full), tmp_path / "out")
    assert found["wrong"] and "is not equal to the original" in found["wrong"][0]


@pytest.mark.process
@pytest.mark.campaign
def test_a_damaged_export_ends_with_1_and_leaves_nothing(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check's own process, started as it is for users."""
    write, findings, run = Merge.write, [], verify.run

    def damaged(self: Merge, folder: Path, shard: int) -> None:
        write(self, folder, shard)
        flip(folder, "model.layers.0.self_attn.q_proj.weight")

    monkeypatch.setattr(Merge, "write", damaged)
    monkeypatch.setattr(verify, "run", lambda job: findings.append(run(job)) or findings[-1])
    out, report = tmp_path / "out", tmp_path / "report.json"
    words = ends(capsys, [str(run_folder), "--to", "merged", "--out", str(out), "--json", str(report)], 1)
    assert "does not match the run: the tensor model.layers.0.self_attn.q_proj.weight is off" in words
    assert not out.exists() and not list(tmp_path.glob(".*"))
    assert findings[0]["imported_finetune"] is False and findings[0]["passed"] is False
    assert json.loads(report.read_text())["verification"]["passed"] is False
