"""A driver made of Python: GPUs and links in place of NVML, and of what torch asks CUDA, at the libraries' border."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}


@dataclass(kw_only=True)
class Card:
    """A GPU as the driver knows it."""

    name: str = "NVIDIA H200"
    gib: int = 8
    max_clock: int = 1980
    clock: int = 345
    power_limit: int = 700
    temperature: int = 31
    processes: tuple[int, ...] = ()
    refuses: tuple[str, ...] = field(default=())  # questions that it answers with an error


class Nvml(types.ModuleType):
    """The part of pynvml that this project asks. Handles are places in the list of cards."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, cards: Sequence[Card], links: dict[tuple[int, int], str]) -> None:
        """links: of each pair, NVLink or a PCI level."""
        super().__init__("pynvml")
        self.cards, self.links = cards, links

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("nvmlDeviceGet") or name.endswith(("UUID", "Count")):
            return found

        def ask(handle: int, *arguments: Any) -> Any:
            if name in self.cards[handle].refuses:
                raise self.NVMLError("not supported")
            return found(handle, *arguments)

        return ask

    def nvmlInit(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(free=(handle + 1) * 2**30)

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return self.cards[handle].clock if clock == self.NVML_CLOCK_SM else 3201

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        return self.cards[handle].max_clock if clock == self.NVML_CLOCK_SM else 3201

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 76_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return self.cards[handle].power_limit * 1000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return self.cards[handle].temperature

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 8

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [types.SimpleNamespace(pid=pid) for pid in self.cards[handle].processes]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return types.SimpleNamespace(gpu=87)

    def _between(self, one: int, other: int) -> str:
        return self.links[min(one, other), max(one, other)]

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        if self._between(one, other) != "NVLink":
            raise self.NVMLError("not supported")
        return self.NVML_P2P_STATUS_OK

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return LEVELS[self._between(one, other)]


def install(
    monkeypatch: pytest.MonkeyPatch,
    cards: Sequence[Card],
    links: dict[tuple[int, int], str] | None = None,
    *,
    peers: bool | dict[tuple[int, int], bool] = True,
    nvml: bool = True,
    visible: Sequence[int] | None = None,
) -> None:
    """Let this process see a machine with `cards`.

    Args:
        links: of each pair that is not in it, SYS.
        visible: CUDA_VISIBLE_DEVICES, so that torch's GPU 0 is the driver's `visible[0]`.
    """
    seen = list(range(len(cards)) if visible is None else visible)
    pairs = dict.fromkeys(itertools.combinations(range(len(cards)), 2), "SYS")

    def properties(index: int) -> Any:
        card = cards[seen[index]]
        size = card.gib * 2**30
        return types.SimpleNamespace(
            name=card.name, major=9, minor=0, total_memory=size, uuid=str(seen[index]), multi_processor_count=132
        )

    def reach(one: int, other: int) -> bool:
        return peers if isinstance(peers, bool) else peers[one, other]

    monkeypatch.setitem(sys.modules, "pynvml", Nvml(cards, pairs | (links or {})) if nvml else None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach)
