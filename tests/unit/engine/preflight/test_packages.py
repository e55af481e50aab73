"""The package of an optimizer, compared with what transformers refuses."""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path

import pytest
import transformers
from transformers import trainer_optimizer
from transformers.training_args import OptimizerNames

from finetune.engine.preflight import config_checks
from finetune.errors import UserError
from tests.helpers import launch

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


@pytest.mark.process
def test_a_run_says_so_before_it_loads_anything(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    words = ["--model.model_name_or_path", str(tiny_model), "--data.train_file", str(tmp_path / "rows.jsonl")]
    done = launch.run("1 rank", [*words, "--training.optim", "grokadamw"], cache=tmp_path)
    assert done.returncode == 2
    assert "error: training.optim: grokadamw needs the package grokadamw" in done.stdout
    assert "Traceback" not in done.stdout
