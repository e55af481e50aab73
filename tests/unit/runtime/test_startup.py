"""What makes a start fast, and how its time is told."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
import time
import types
from importlib import metadata
from pathlib import Path

import psutil
import pytest

import patches
from finetune.runtime import bootstrap, launch_lines, startup
from finetune.runtime.machine import pycache
from finetune.runtime.ranks import launcher
from patches import unsloth_all_trl_trainers as only_sft


def test_phases_add_up_to_the_time_since_the_launcher_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find", os.getppid)
    start = startup.StartUp()
    start.ended("libraries")
    start.ended("data")
    start.ended("libraries")
    seconds = start.complete()
    assert seconds is not None and list(seconds) == ["launcher", "libraries", "data", "first step"]
    launched = psutil.Process(os.getppid()).create_time()
    assert sum(seconds.values()) == pytest.approx(time.time() - launched, abs=1.0)
    assert seconds["launcher"] == pytest.approx(psutil.Process().create_time() - launched)


def test_a_process_starts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find", lambda: None)
    start = startup.StartUp()
    first = start.complete()
    assert first is not None and list(first) == ["first step"]
    start.ended("data")
    assert start.complete() is None and list(first) == ["first step"]


# --- bytecode -------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that was never imported, as the only library; Python may not write beside it."""
    folder = tmp_path / "site" / "never_imported"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr(pycache, "_LIBRARIES", ("never_imported",))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.delitem(sys.modules, "never_imported", raising=False)
    importlib.invalidate_caches()
    return folder


def test_bytecode_is_kept_where_python_would_keep_none(library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert pycache.enable(cache)
    module = importlib.import_module("never_imported")
    assert module.VALUE == 1
    assert [path.name.split(".")[0] for path in cache.rglob("*.pyc")] == ["__init__"]
    assert not (library / "__pycache__").exists()
    assert os.environ["PYTHONPYCACHEPREFIX"] == str(cache / pycache.FOLDER)  # for the processes that this one starts
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert (cache / pycache.FOLDER).stat().st_mode & 0o77 == 0


def test_bytecode_beside_the_sources_is_used(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert not pycache.enable(tmp_path / "cache")  # the first import keeps it
    importlib.import_module("never_imported")
    assert (library / "__pycache__").is_dir()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "never_imported")
    assert not pycache.enable(tmp_path / "cache") and not (tmp_path / "cache").exists()


def test_bytecode_is_not_taken_from_somebody_elses_folder(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert not pycache.enable(tmp_path / "cache") and sys.pycache_prefix is None


# --- imports --------------------------------------------------------------------------------------------------------


def test_collections_leave_out_what_was_imported() -> None:
    gc.unfreeze()
    with bootstrap.library_imports():
        assert not gc.isenabled()
        with bootstrap.library_imports():
            pass
        assert not gc.isenabled()
        kept: list[object] = []
        kept.append(kept)
    assert gc.isenabled() and gc.get_freeze_count() > 1000
    assert not any(one is kept for one in gc.get_objects())


def test_packages_are_scanned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(metadata, "packages_distributions", lambda: calls.append(1) or {"a": ["b"]})
    bootstrap._scan_packages_once()
    bootstrap._scan_packages_once()
    assert metadata.packages_distributions() == metadata.packages_distributions() == {"a": ["b"]}
    assert calls == [1]


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


@pytest.mark.parametrize(
    ("world_size", "on_cpu", "expected"),
    [
        (1, False, "python"),
        (1, True, "python"),
        (2, False, "accelerate-launch --multi_gpu --num_processes 2"),
        (4, True, "torchrun --standalone --nproc_per_node 4"),
    ],
)
def test_the_launcher_of_a_printed_command(world_size: int, on_cpu: bool, expected: str) -> None:
    assert " ".join(launch_lines.user_command(world_size, on_cpu=on_cpu)) == expected


def test_accelerates_own_script_is_the_command_without_the_others() -> None:
    """`accelerate-launch` takes the options of `accelerate launch`: both parse with the same function."""
    scripts = {one.name: one.value for one in metadata.entry_points(group="console_scripts")}
    assert scripts["accelerate-launch"] == "accelerate.commands.launch:main"
    command = importlib.import_module("accelerate.commands.accelerate_cli")
    assert isinstance(command, types.ModuleType)
    assert command.launch_command_parser.__module__ == "accelerate.commands.launch"
