"""What is checked before anything heavy is imported: a model's files, and the package of an optimizer."""

from __future__ import annotations

import importlib.util
import json
import os
import types
from pathlib import Path

import pytest
import transformers
from huggingface_hub import constants
from transformers import trainer_optimizer
from transformers.training_args import OptimizerNames

from finetune import train
from finetune.config import Config, load
from finetune.engine.model import tokenizer_loading
from finetune.engine.preflight import adapter_files, config_checks
from finetune.errors import UserError
from finetune.runtime import bootstrap
from tests.helpers import tiny


def config(name: Path | str, *extra: str) -> Config:
    return load(["--model.model_name_or_path", str(name), "--data.train_file", "x.jsonl", *extra])


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    content = {"base_model_name_or_path": "base", "r": 8, "lora_alpha": 16}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    return tmp_path


def test_a_folder_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a folder with neither config.json nor adapter_config.json"):
        config_checks.check_model(config(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    config_checks.check_model(config(tmp_path))
    assert adapter_files.adapter(config(tmp_path)) is None


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_fifo_in_a_model_folder_is_found_before_a_library_waits_for_it(name: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    if name != "config.json":
        (base / "config.json").write_text("{}")
    os.mkfifo(base / name)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    content = {"base_model_name_or_path": str(base), "r": 16, "lora_alpha": 16}
    (adapter / "adapter_config.json").write_text(json.dumps(content))
    for given in (config(base), config(adapter, "--lora.continue_adapter", "true")):
        with pytest.raises(UserError, match=f"{base} cannot be loaded as a model: {name} is a FIFO, not a regular"):
            config_checks.check_model(given)


def test_a_name_that_only_the_hub_can_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline it is in the cache or nowhere; online, a Hub that cannot be reached is reported at once."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("some/model", "no name / of the Hub"):
        with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, and .*no such model in the cache"):
            config_checks.check_model(config(name))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    with pytest.raises(UserError, match="cannot be reached"):
        config_checks.check_model(config("some/model"))
    assert adapter_files.adapter(config("some/model")) is None


def test_a_model_of_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    config_checks.check_model(config("some/model"))
    (snapshot / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))
    with pytest.raises(UserError, match="already an adapter of base"):
        config_checks.check_model(config("some/model"))


def test_an_adapter_is_continued_where_that_is_meant(adapter: Path) -> None:
    for look in (config_checks.check, adapter_files.adapter):
        with pytest.raises(UserError, match="already an adapter of base.*lora.continue_adapter: true"):
            look(config(adapter))
        with pytest.raises(UserError, match="Merge the adapter first"):
            look(config(adapter, "--model.full_finetuning"))
        with pytest.raises(UserError, match="{'r': 8, 'lora_alpha': 16}; the configuration has {'r': 4"):
            look(config(adapter, "--lora.continue_adapter", "--lora.r", "4"))
    right = config(adapter, "--lora.continue_adapter", "--lora.r", "8", "--lora.lora_alpha", "16")
    config_checks.check_model(right)
    assert (adapter_files.adapter(right) or {})["r"] == 8


def test_the_tokenizer_of_an_adapter_without_one_is_that_of_its_base(tmp_path: Path) -> None:
    """PEFT saves an adapter alone: continuing it failed for want of a tokenizer."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    tiny.make_tokenizer(base)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    given = config(folder, "--model.revision", "main", "--lora.continue_adapter", "true")
    assert tokenizer_loading.load_tokenizer(given).name_or_path == str(base)
    tiny.make_tokenizer(folder)
    assert tokenizer_loading.load_tokenizer(given).name_or_path == str(folder)


# --- the package of an optimizer, compared with what transformers refuses ------------------------------------------

# Optimizers that need other hardware, or a package that is not on PyPI.
OF_OTHER_HARDWARE = {"adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision"}


@pytest.mark.parametrize("name", sorted({one.value for one in OptimizerNames} - OF_OTHER_HARDWARE))
def test_transformers_asks_for_the_same_packages(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for asked in [one for one in dir(trainer_optimizer) if one.startswith("is_") and one.endswith("_available")]:
        monkeypatch.setattr(trainer_optimizer, asked, lambda *version: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    adam = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0}
    args = types.SimpleNamespace(optim=OptimizerNames(name), learning_rate=1e-3, optim_args=None, **adam)
    try:
        transformers.Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError) as error:
        with pytest.raises(UserError) as refused:
            config_checks.check_optimizer(name)
        package = str(refused.value).split("pip install ")[1].split("`")[0]
        assert package.replace("-", "_") in str(error).replace("-", "_")  # lomo-optim, lomo_optim
    else:
        config_checks.check_optimizer(name)


def test_a_package_that_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: asked.append(module) or module)
    for name in OptimizerNames:
        config_checks.check_optimizer(name.value)
    source = Path(transformers.utils.import_utils.__file__).read_text()
    assert len(set(asked)) == len(config_checks.PACKAGES)
    assert all(f'"{module}"' in source for module in asked)  # the modules that transformers looks for


def test_a_run_says_so_before_it_loads_anything(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "start", None)
    words = ["--model.model_name_or_path", str(tiny_model), "--data.train_file", "rows.jsonl"]
    assert train.main([*words, "--training.optim", "grokadamw"]) == 2
    assert "error: training.optim: grokadamw needs the package grokadamw" in capsys.readouterr().err
