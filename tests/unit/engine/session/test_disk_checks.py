"""Checks of disk space before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finetune.config import load
from finetune.engine.checkpoint import output_folder
from finetune.engine.session import disk_checks


@pytest.mark.parametrize(("save_steps", "weights"), [(500, 2), (0, 1)])
def test_a_run_without_checkpoints_needs_room_for_its_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_steps: int, weights: int
) -> None:
    """Two float32 moments of each of 1,024 weights belong to a checkpoint."""
    asked = []
    monkeypatch.setattr(output_folder, "check_space", lambda _, needed, what: asked.append((needed, what)))
    files = ["--model.model_name_or_path", "m", "--data.train_file", "rows.jsonl"]
    config = load([*files, "--training.output_dir", str(tmp_path), "--training.save_steps", str(save_steps)])
    disk_checks.check_space(config, torch.nn.Linear(32, 32, bias=False))
    moments = 8 * 1024 * (weights - 1)
    (needed, what) = asked[0]
    assert needed == weights * 4 * 1024 + moments + output_folder.SPARE_BYTES
    assert ("checkpoint" in what) == (save_steps > 0)
