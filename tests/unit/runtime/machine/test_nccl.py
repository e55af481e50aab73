"""NCCL's environment by topology: only what the topology decides, each with its reason."""

from __future__ import annotations

import itertools

import pytest

from finetune.runtime.machine import hardware, nccl
from tests.helpers.nvml import Card, install


def machine(monkeypatch: pytest.MonkeyPatch, count: int, link: str, **how: object) -> hardware.Hardware:
    pairs = dict.fromkeys(itertools.combinations(range(count), 2), link)
    install(monkeypatch, [Card()] * count, pairs, **how)
    return hardware.survey()


def chosen(found: hardware.Hardware) -> dict[str, str]:
    settings = nccl.recommend_settings(found)
    assert all(len(one.reason) > 40 for one in settings)
    return {one.name: one.value for one in settings}


def test_by_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(machine(monkeypatch, 8, "NVLink")) == {"NCCL_NVLS_ENABLE": "0"}
    assert chosen(machine(monkeypatch, 2, "PHB", peers=False)) == {"NCCL_P2P_DISABLE": "1"}
    assert chosen(machine(monkeypatch, 4, "SYS", peers=False)) == {"NCCL_P2P_DISABLE": "1"}
    for link in ("PIX", "PXB", "SYS"):
        found = machine(monkeypatch, 4, link)
        assert chosen(found) == {}
    found = machine(monkeypatch, 1, "NVLink")
    assert chosen(found) == {}


def test_what_is_mixed_or_unknown_is_left_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = machine(monkeypatch, 3, "SYS", peers={(0, 1): True, (0, 2): False, (1, 2): False})
    assert chosen(mixed) == {}
    assert chosen(machine(monkeypatch, 2, "NVLink", nvml=False)) == {}  # the links are not known
    seen = hardware.probe()
    assert chosen(seen) == {}


def test_without_a_gpu() -> None:
    found = hardware.survey()
    assert chosen(found) == {}
