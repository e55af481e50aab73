"""Fixtures of the tests of drop_in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny
from tests.helpers.drop_in import SETTINGS, TEXTS, dataset


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("model"), hidden=16, layers=1)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever test of a process imports a class first starts it."""
    monkeypatch.setenv("FINETUNE_BACKEND", "transformers")


@pytest.fixture
def make(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A trainer: keywords that SFTConfig knows go there, the others to the trainer."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    from finetune import SFTConfig, SFTTrainer

    def make(rows: Any = TEXTS, trainer: type = SFTTrainer, path: Path = model, **given: Any) -> Any:
        settings = SETTINGS | {"output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 4}
        settings |= {name: given.pop(name) for name in list(given) if name in SFTConfig.__dataclass_fields__}
        if settings["per_device_train_batch_size"] is None:  # not given
            del settings["per_device_train_batch_size"]
        return trainer(str(path), SFTConfig(**settings), train_dataset=dataset(rows), **given)

    return make
