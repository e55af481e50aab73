"""The digest that identifies a base model's weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from finetune.engine.checkpoint import base_weights


def test_digest_of_weights_is_of_tensors_and_not_of_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {name: torch.randn(300, 200) for name in ("a", "b", "c")}  # 240,000 bytes: more than the samples

    def digest(name: str, **files: dict[str, torch.Tensor]) -> str | None:
        folder = tmp_path / name
        folder.mkdir()
        for file, tensors in files.items():
            save_file(tensors, folder / f"{file}.safetensors")
        if len(files) > 1:
            places = {name: f"{file}.safetensors" for file, tensors in files.items() for name in tensors}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return base_weights.weights_digest(folder)

    whole = digest("whole", model=weights)
    first, second = {"a": weights["a"]}, {name: weights[name] for name in ("b", "c")}
    assert whole == digest("sharded", one=first, two=second)
    changed = {
        "renamed": {"d": weights["a"], **second},
        "removed": second,
        "shape": {"a": weights["a"].reshape(200, 300), **second},
        "type": {"a": weights["a"].half(), **second},
        "start": {"a": edited(weights["a"], 0), **second},
        "middle": {"a": edited(weights["a"], 30_010), **second},
        "end": {"a": edited(weights["a"], -1), **second},
    }
    found = {name: digest(name, model=tensors) for name, tensors in changed.items()}
    assert len({whole, *found.values()}) == 1 + len(changed)
    assert digest("unseen", model={"a": edited(weights["a"], 20_000), **second}) == whole  # between the samples
    (tmp_path / "sharded" / "two.safetensors").unlink()
    assert base_weights.weights_digest(tmp_path / "sharded") is None
    assert base_weights.weights_digest(tmp_path) is None


def edited(tensor: torch.Tensor, place: int) -> torch.Tensor:
    other = tensor.clone()
    other.view(-1)[place] += 1
    return other
