"""Fixtures of the tests of chat."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune import train
from tests.helpers.chat import PROMPTS, TEMPLATE
from tests.unit.engine.checkpoint.test_resume import in_this_process


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat")


@pytest.fixture(scope="package")
def run(shared: Path, tiny_model: Path, tiny_data: Path) -> Path:
    """A finished run of 4 steps with checkpoints at 2 and 4. Its adapter is then made large, so that answers differ."""
    out = shared / "out"
    (shared / "own.jinja").write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as monkeypatch, in_this_process(monkeypatch, shared):
        arguments = ["--model.model_name_or_path", str(tiny_model), "--model.backend", "transformers"]
        arguments += ["--model.chat_template", str(shared / "own.jinja"), "--data.system_prompt", "Be brief."]
        arguments += ["--data.train_file", str(tiny_data / "train.jsonl"), "--data.num_proc", "1"]
        arguments += ["--training.output_dir", str(out), "--training.global_batch_size", "4"]
        arguments += ["--training.max_steps", "4", "--training.save_steps", "2"]
        assert train.main(arguments) == 0
    weights = load_file(out / "adapter_model.safetensors")
    torch.manual_seed(1)
    save_file(
        {name: torch.randn_like(tensor) * 0.3 for name, tensor in weights.items()},
        out / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    return out


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read when it is imported
    with in_this_process(monkeypatch, tmp_path):
        yield


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(PROMPTS) + "\r\n")
    return file


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))
