"""What is known of a model's files before anything heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from finetune.config import Config, load
from finetune.engine import preflight
from finetune.errors import UserError


def config(name: Path | str, *extra: str) -> Config:
    return load(["--model.model_name_or_path", str(name), "--data.train_file", "x.jsonl", *extra])


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    content = {"base_model_name_or_path": "base", "r": 8, "lora_alpha": 16}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    return tmp_path


def test_a_folder_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a folder with neither config.json nor adapter_config.json"):
        preflight.check_model(config(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    preflight.check_model(config(tmp_path))
    assert preflight.adapter(config(tmp_path)) is None


def test_a_name_that_only_the_hub_can_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline it is in the cache or nowhere; online, a hub that cannot be reached is reported at once."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("some/model", "no name / of the hub"):
        with pytest.raises(UserError, match="no such model in the cache, and HF_HUB_OFFLINE is set"):
            preflight.check_model(config(name))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    with pytest.raises(UserError, match="cannot be reached"):
        preflight.check_model(config("some/model"))
    assert preflight.adapter(config("some/model")) is None


def test_a_model_of_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    preflight.check_model(config("some/model"))
    (snapshot / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))
    with pytest.raises(UserError, match="already an adapter of base"):
        preflight.check_model(config("some/model"))


def test_an_adapter_is_continued_where_that_is_meant(adapter: Path) -> None:
    for look in (preflight.check, preflight.adapter):
        with pytest.raises(UserError, match="already an adapter of base.*lora.continue_adapter: true"):
            look(config(adapter))
        with pytest.raises(UserError, match="Merge the adapter first"):
            look(config(adapter, "--model.full_finetuning"))
        with pytest.raises(UserError, match="{'r': 8, 'lora_alpha': 16}; the configuration has {'r': 4"):
            look(config(adapter, "--lora.continue_adapter", "--lora.r", "4"))
    right = config(adapter, "--lora.continue_adapter", "--lora.r", "8", "--lora.lora_alpha", "16")
    preflight.check_model(right)
    assert (preflight.adapter(right) or {})["r"] == 8
