"""What transformers does less of when it is imported, and that what it lists stays the same."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers.utils import replace_return_docstrings

import patches
from patches import transformers_slow_import as slow


def copy_of(name: str) -> ModuleType:
    """A second copy of a module of the installed transformers, as it is before the patch."""
    installed = importlib.import_module(f"transformers.utils.{name}")
    spec = importlib.util.spec_from_file_location(f"transformers.utils.{name}_copy", installed.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy  # its dataclasses look for it there
    try:
        spec.loader.exec_module(copy)
    finally:
        del sys.modules[spec.name]
    return copy


class Name(str):
    """Not to be compared with others, one by one."""

    __eq__ = None  # type: ignore[assignment]
    __hash__ = str.__hash__


def test_models_are_listed_as_ever_from_files_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Path(str(importlib.import_module("transformers.models").__file__))
    original, changed = copy_of("import_utils"), copy_of("import_utils")
    slow._CHANGES["transformers.utils.import_utils"](changed)
    expected = original.define_import_structure(models.parent, prefix="models")
    assert changed.define_import_structure(models.parent, prefix="models") == expected
    lazy = [one._LazyModule("transformers.models", str(models), expected) for one in (original, changed)]
    assert lazy[0].__dir__() == lazy[1].__dir__() and len(dir(lazy[1])) > 1000
    lazy[1].__all__ = [Name("Model")]
    assert [one for one in lazy[1].__dir__() if isinstance(one, Name)]

    def read(*_: object, **__: object) -> None:
        raise AssertionError("a file is read again")

    asked = [str(one) for one in (models, *models.parent.glob("*/__init__.py"))]
    expected = [original.define_import_structure(one) for one in asked]
    monkeypatch.setattr(builtins, "open", read)
    assert [changed.define_import_structure(one) for one in asked] == expected


def test_no_docstrings_are_written() -> None:
    changed = copy_of("auto_docstring")
    slow._CHANGES["transformers.utils.auto_docstring"](changed)

    @changed.auto_docstring
    class Model:
        """An output."""

        @changed.auto_docstring(custom_intro="In one sentence.")
        def forward(self) -> int:
            return 1

    @replace_return_docstrings(output_type=Model, config_class="Config")  # as remote code may do
    def called() -> None:
        """
        Returns:
        """

    assert (Model().forward(), Model.forward.__doc__) == (1, None) and "Model" in str(called.__doc__)


def test_it_is_applied_before_transformers_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("transformers")
    assert not slow.needed()
    others = [one for one in sys.meta_path if not isinstance(one, patches.core._ChangedModules)]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.delitem(sys.modules, "transformers")
    assert slow.needed()
    assert [one.applied for one in patches.core.run(patches.FIRST)] == [True]


def test_a_module_is_changed_once_it_has_been_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_one.py").write_text("speed = 1\n")
    (tmp_path / "user_of_it.py").write_text("from slow_one import speed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    patches.core.change_on_import({"slow_one": lambda module: setattr(module, "speed", module.speed + 1)})
    assert patches.core.is_changed("slow_one") and not patches.core.is_changed("slow_one", "user_of_it")
    assert importlib.import_module("user_of_it").speed == 2
