"""Processes as launchers start them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from finetune.runtime.ranks import distributed


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that no launcher has started; what a test adds to its environment goes with the test."""
    before = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    distributed.ranks.cache_clear()
    distributed.launcher_profile.cache_clear()
    yield
    distributed.ranks.cache_clear()
    distributed.launcher_profile.cache_clear()
    os.environ.clear()
    os.environ.update(before)
