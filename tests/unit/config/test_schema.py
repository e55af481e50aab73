"""Tests of finetune/config/schema.py."""

import subprocess
import sys

import pytest

from finetune.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
)
from tests.helpers import ROOT


def test_from_dict_of_another_version():
    saved = Config().to_dict() | {"plugins": {}}
    saved["lora"]["rank"] = 3
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(saved)
    assert len(caught.value.problems) == 2 and "lora.rank" in str(caught.value) and "plugins" in str(caught.value)


def in_subprocess(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_no_heavy_import():
    code = """
import sys
from finetune.config import ConfigError, help_text, load, dump_yaml
help_text(), dump_yaml(load(["--training.adam_beta2", "0.9", "--training.optim", "sgd"]))
try:
    load(["--training.learnin_rate", "1"])
except ConfigError:
    pass
heavy = {"torch", "transformers", "trl", "accelerate", "datasets", "unsloth", "peft", "numpy"}
print(sorted(heavy & set(sys.modules)))
"""
    assert in_subprocess(code).strip() == "[]"


def test_sections_are_frozen():
    for section in (Config(), ModelConfig(), DataConfig()):
        with pytest.raises(AttributeError):
            section.r = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        ModelConfig("positional")  # type: ignore[misc]
