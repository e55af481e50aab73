"""How two runs are compared, on files made by hand, against torch's own products of all tensors at once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune.errors import RunError
from finetune.parity import command as parity


def run(folder: Path, tensors: dict[str, torch.Tensor], losses: tuple[float, ...] = (2.0, 1.5)) -> Path:
    """What a run of two steps leaves; its weights are its gradients."""
    folder.mkdir()
    for name in ("gradient", "weights"):
        save_file(tensors, folder / f"{name}.safetensors")
    save_file({"norms": torch.ones(2)}, folder / "norms.safetensors")
    record = {"losses": losses, "eval_loss_after": None, "dtype": "float32", "hardware": {"device": "cpu"}}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_pieces_add_up_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "PIECE", 7)
    torch.manual_seed(0)
    one = {"a": torch.randn(5, 9), "b": torch.randn(3).bfloat16(), "c": torch.zeros(2)}
    two = {name: tensor * 2 + (0.1 if name == "b" else 0) for name, tensor in one.items()}
    found = parity.compare(run(tmp_path / "1", one), run(tmp_path / "2", two), 2)
    a, b = (torch.cat([tensors[name].double().flatten() for name in "abc"]) for tensors in (one, two))
    assert found.ratio == pytest.approx(float(b.norm() / a.norm()), rel=1e-12)
    assert found.cosine == pytest.approx(float(a @ b / a.norm() / b.norm()), rel=1e-12)
    assert found.weights == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-12)
    assert sorted(name for name, *_ in found.tensors) == ["a", "b"]  # none for a tensor without a gradient
    assert "the gradient is 1.99" in found.failures[0] and "the trained weights differ" in found.failures[1]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_no_proof(tmp_path: Path, wrong: float) -> None:
    tensors = {"a": torch.tensor([1.0, wrong, 2.0])}
    found = parity.compare(run(tmp_path / "1", tensors), run(tmp_path / "2", tensors), 2)
    assert any("the gradient is" in failure for failure in found.failures)
    right = {"a": torch.ones(3)}
    lost = parity.compare(run(tmp_path / "3", right), run(tmp_path / "4", right, losses=(2.0, math.nan)), 2)
    assert [failure.split(" differs")[0] for failure in lost.failures] == ["a step's loss"]


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    one, two = run(tmp_path / "1", {"a": torch.ones(2)}), run(tmp_path / "2", {"b": torch.ones(2)})
    with pytest.raises(RunError, match="different tensors"):
        parity.compare(one, two, 2)
