"""Fixtures that several tests share. Runs of the shipped command go through `tests.launch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune import verb
from tests import tiny, warm


@pytest.fixture(autouse=True)
def a_console_of_its_own() -> None:
    """The console keeps what the terminal was like when it was first asked for."""
    verb.console.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def warm_servers() -> Iterator[None]:
    """Those that the session's tests have started end with it."""
    yield
    warm.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama of about 100,000 parameters, with tokenizer and chat template."""
    return tiny.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with train.jsonl (50 ragged conversations) and eval.jsonl (11)."""
    folder = tmp_path_factory.mktemp("data")
    tiny.make_rows(folder / "train.jsonl", 50)
    tiny.make_rows(folder / "eval.jsonl", 11, seed=1)
    return folder
