"""Fixtures of the tests of export."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from finetune.export import verify
from tests.helpers.export import make_base, make_run


@pytest.fixture(scope="package")
def check() -> ModuleType:
    """The program that runs in a process of its own, here in this one."""
    spec = importlib.util.spec_from_file_location("export_check", verify.PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="package")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def run_folder(base: Path, tmp_path: Path) -> Path:
    make_run(tmp_path / "run", base)
    return tmp_path / "run"


@pytest.fixture
def in_this_process(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "run", lambda job: check.check({"max_new_tokens": 8} | job))
