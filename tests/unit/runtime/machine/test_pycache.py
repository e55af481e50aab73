"""Bytecode of libraries whose folder cannot be written."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from finetune.runtime.machine import pycache


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that was never imported, as the only library; Python may not write beside it."""
    folder = tmp_path / "site" / "never_imported"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr(pycache, "LIBRARIES", ("never_imported",))
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
