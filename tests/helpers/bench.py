"""What the tests of bench share."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from finetune.runtime.machine import hardware
from tests.helpers.nvml import Card, install


def machine(monkeypatch: pytest.MonkeyPatch, count: int, link: str, **how: Any) -> hardware.Hardware:
    pairs = dict.fromkeys(itertools.combinations(range(count), 2), link)
    install(monkeypatch, how.pop("cards", [Card()] * count), pairs, **how)
    return hardware.survey()


def on_cpu() -> dict[str, Any]:
    bare = {"device": "cpu", "name": "x", "count": 0, "memory_gib": None, "peak_bf16_tflops": None}
    return {**bare, "cpu_cores": 2, "ram_gib": 8.0, "gpus": (), "links": ()}
