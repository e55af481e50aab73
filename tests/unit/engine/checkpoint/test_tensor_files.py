"""Whole tensors in safetensors files, and an optimizer's state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from finetune.engine.checkpoint import tensor_files
from finetune.engine.sharding import checkpoint_weights
from finetune.runtime.ranks import distributed


def test_tensors_come_back_from_one_file_or_several(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(i + 1, 3) for i in range(7)} | {"scalar": torch.tensor(2.0)}
    for name, most, count in (("one", None, 1), ("many", 50, 7)):
        folder = tmp_path / name
        folder.mkdir()
        tensor_files.write(folder, "model", tensors, file_bytes=most)
        assert len(list(folder.glob("*.safetensors"))) == count
        read = tensor_files.TensorFiles(folder, "model")
        assert set(read.keys()) == set(tensors)
        assert all(torch.equal(read.read_full(key), value) for key, value in tensors.items())
        assert torch.equal(read.read_rows("t4", 1, 3), tensors["t4"][1:3]) and read.shape("t4") == (5, 3)


def test_a_rank_with_a_slow_disk_is_waited_for_before_the_next_gather(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the host, whose collectives have no timeout of training's: after each file."""
    done: list[str] = []
    monkeypatch.setattr(tensor_files, "save", lambda _, path: (path.touch(), done.append("save")))
    monkeypatch.setattr(distributed, "barrier", lambda: done.append("wait"))
    tensor_files.write(tmp_path, "model", {name: torch.ones(4) for name in "abc"}, file_bytes=16)
    assert done == ["save", "wait"] * 3


def test_transformers_reads_the_files(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tensor_files.write(tmp_path, "model", checkpoint_weights.weights(model), file_bytes=40_000)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    shutil.copy(tiny_model / "config.json", tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(one, again.state_dict()[key]) for key, one in model.state_dict().items())


@pytest.mark.parametrize(
    "name", ["../m.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 3, "..\\m.safetensors"]
)
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="does not name the files"):
        tensor_files.TensorFiles(tmp_path, "model")


def test_an_optimizer_comes_back(tmp_path: Path) -> None:
    """Its state, from files without pickle, as torch's own dictionary has it; for a parameter of another shape not."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensor_files.write_optimizer(tmp_path, optimizer)
    assert not list(tmp_path.glob("*.pt"))
    read = tensor_files.read_optimizer(tmp_path, list(model.parameters()))
    expected = optimizer.state_dict()
    assert read["param_groups"] == expected["param_groups"]
    for index, state in expected["state"].items():
        assert all(torch.equal(read["state"][index][name], value) for name, value in state.items())
    with pytest.raises(ValueError, match="its parameter"):
        tensor_files.read_optimizer(tmp_path, list(nn.Linear(4, 2).parameters()))
