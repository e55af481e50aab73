"""Tests of finetune/export/source.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from finetune.engine.checkpoint import base_weights
from finetune.errors import UserError
from finetune.export import source
from finetune.export.merged import Merge
from tests.helpers.export import WARNINGS, edit, make_run

pytestmark = WARNINGS


def test_a_base_that_has_changed_or_is_missing(base: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(base, tmp_path / "own"))
    make_run(tmp_path / "run", own)
    run = tmp_path / "run"
    assert source.find(run).notes == [] and source.find(run).base == own
    weights = load_file(own / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="has changed since the run: .* has other weights than the run recorded"):
        source.find(run)
    assert source.find(run, str(base)).base == base
    edit(own / "config.json", rms_norm_eps=1e-3)
    with pytest.raises(UserError, match=r"other config.json and weights"):
        source.find(run)
    shutil.rmtree(own)
    with pytest.raises(UserError, match="is not on this machine. Download it with `hf download .*--base"):
        source.find(run)
    edit(run / "run.json", settings={})
    assert len(source.find(run, str(base)).notes) == 2  # nothing to compare with
    shutil.copytree(base, own)
    edit(own / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UserError, match=r"quantized \(gptq\), which cannot be merged"):
        Merge(source.find(run, str(own)).base, None)


def test_stacked_experts_whose_order_is_not_recorded(base: Path, tmp_path: Path) -> None:
    """As after a run that continued an adapter of Unsloth before 2026.9.6 with the transformers backend."""
    own = Path(shutil.copytree(base, tmp_path / "own"))
    make_run(tmp_path / "run", own)
    edit(own / "config.json", model_type="qwen3_moe")
    edit(tmp_path / "run" / "run.json", settings=base_weights.base_model_files(own))
    edit(tmp_path / "run" / "adapter_config.json", target_parameters=["x"], auto_mapping={"unsloth_fixed": True})
    (note,) = source.find(tmp_path / "run").notes
    assert "does not record the order of its stacked experts" in note and "lora.continue_adapter" in note
    edit(tmp_path / "run" / "adapter_config.json", lora_B_layout="rank_major")
    assert source.find(tmp_path / "run").notes == []
