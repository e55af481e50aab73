"""Only the SFT trainer is rewritten when Unsloth is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import patches
from patches import unsloth_all_trl_trainers as only_sft

RL = """
rewritten = []


def _patch_trl_rl_trainers(trainer_file="grpo_trainer"):
    rewritten.append(trainer_file)


def patch_trl_rl_trainers():
    for name in ("dpo_trainer", "grpo_trainer", "sft_trainer"):
        _patch_trl_rl_trainers(name)
"""


@pytest.fixture
def unsloth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that rewrites trainers when it is imported, in the layout of Unsloth's."""
    import torch

    models = tmp_path / "unsloth" / "models"
    models.mkdir(parents=True)
    (models / "rl.py").write_text(RL)
    (models / "__init__.py").write_text("")
    (models.parent / "__init__.py").write_text("from unsloth.models import rl\n\nrl.patch_trl_rl_trainers()\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "unsloth"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    importlib.invalidate_caches()
    yield models
    for name in [name for name in sys.modules if name.partition(".")[0] == "unsloth"]:
        del sys.modules[name]


def rewritten() -> list[str]:
    return importlib.import_module("unsloth").rl.rewritten


def test_only_the_sft_trainer_is_rewritten(unsloth: Path) -> None:
    verdicts = patches.core.run([only_sft])
    assert [one.applied for one in verdicts] == [True] and not only_sft.needed()
    assert rewritten() == ["sft_trainer"]


def test_without_the_patch_all_trainers_are(unsloth: Path) -> None:
    assert only_sft.needed()
    assert rewritten() == ["dpo_trainer", "grpo_trainer", "sft_trainer"]


def test_an_unsloth_that_rewrites_none_is_left_alone(unsloth: Path) -> None:
    (unsloth / "rl.py").write_text(RL.replace("def patch_trl_rl_trainers", "def patch_when_used"))
    assert not only_sft.needed()


def test_the_installed_unsloth_has_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if importlib.util.find_spec("unsloth") is None:
        pytest.skip("Unsloth is not installed")
    assert not only_sft.needed()  # nothing is rewritten on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert only_sft.needed()
