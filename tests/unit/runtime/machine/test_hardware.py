"""What a machine has, told by a driver made of Python: right, or unknown with its reason."""

from __future__ import annotations

import itertools
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from finetune.config import Config
from finetune.config.schema import ModelConfig
from finetune.engine.model.load_arguments import emulation_note, resolve_dtype
from finetune.runtime.bootstrap import Stack
from finetune.runtime.machine import hardware, nvml
from tests.helpers.nvml import Card, install

EIGHT: dict[tuple[int, int], str] = dict.fromkeys(itertools.combinations(range(8), 2), "NVLink")


@pytest.mark.parametrize(
    ("units", "asked", "has"),
    [
        ({"avx2": True, "avx512_f": True}, None, False),  # torch emulates bfloat16
        ({"avx512_bf16": True}, None, True),
        ({"amx_bf16": True, "avx512_bf16": False}, None, True),
        ({"avx512_bf16": True}, "0", False),
        ({}, "1", True),
    ],
)
def test_bfloat16_on_a_cpu(monkeypatch: pytest.MonkeyPatch, units: dict, asked: str | None, has: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units, raising=False)
    monkeypatch.delenv("UNSLOTH_CPU_BF16")
    if asked is not None:
        monkeypatch.setenv("UNSLOTH_CPU_BF16", asked)
    stack = Stack(backend="transformers", reason="", device="cpu", local_rank=0, patches=())
    assert resolve_dtype(Config(), stack) == (torch.bfloat16 if has else torch.float32)
    assert resolve_dtype(Config(model=ModelConfig(dtype="float32")), stack) == torch.float32
    slow = "This device has no units for bfloat16: slower than float32, which model.dtype: auto takes"
    assert emulation_note(Config(model=ModelConfig(dtype="bfloat16")), stack) == (None if has else slow)
    assert emulation_note(Config(), stack) is None


@pytest.mark.parametrize(("major", "has"), [(7, False), (8, True)], ids=["T4", "A100"])
def test_bfloat16_on_a_gpu(monkeypatch: pytest.MonkeyPatch, major: int, has: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)  # emulated
    stack = Stack(backend="transformers", reason="", device="cuda", local_rank=0, patches=())
    assert resolve_dtype(Config(), stack) == (torch.bfloat16 if has else torch.float16)
    said = emulation_note(Config(model=ModelConfig(dtype="bfloat16")), stack)
    assert said == (
        None if has else "This device has no units for bfloat16: slower than float16, which model.dtype: auto takes"
    )
    assert emulation_note(Config(model=ModelConfig(dtype="float16")), stack) is None


def test_eight_gpus_on_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Card() for _ in range(8)]
    install(monkeypatch, cards, dict(EIGHT))
    found = hardware.survey()
    assert hardware.topology_line(found) == "8 x NVIDIA H200, NVLink between all pairs, peer access"
    assert found.links is not None and len(found.links) == 28 and found.gpus is not None
    assert found.links[0].kind == "NVLink"
    assert not found.differences
    first = found.gpus[0]
    assert (first.sm_clock_mhz, first.sm_clock_max_mhz, first.power_w, first.power_limit_w) == (345, 1980, 76.5, 700.0)
    assert (first.temperature_c, first.free_gib) == (31, 1.0)
    assert (first.pcie_generation_max, first.pcie_width) == (5, 8)
    assert (found.driver_version, found.driver_gpus, found.peak_bf16_tflops) == ("580.1", 8, 989.4)
    assert json.loads(json.dumps(found.to_dict()))["links"][27]["gpus"] == [6, 7]


def test_two_cards_behind_a_host_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published study's machine."""
    card = Card(name="NVIDIA GeForce RTX 4070 Ti SUPER", gib=16)
    install(monkeypatch, [card, card], {(0, 1): "PHB"}, peers=False)
    found = hardware.survey()
    line = "2 x NVIDIA GeForce RTX 4070 Ti SUPER, PHB between them, no peer access"
    assert hardware.topology_line(found) == line
    assert found.links is not None
    assert (found.links[0].kind, found.links[0].peer_access) == ("PHB", False)
    assert found.peak_bf16_tflops is None


@pytest.mark.parametrize(
    ("links", "one", "other", "kind"),
    [
        ({(0, 1): "NVLink", (0, 2): "SYS", (1, 2): "SYS"}, 0, 1, "NVLink"),
        ({(0, 1): "PIX", (0, 2): "PXB", (1, 2): "NODE"}, 0, 2, "PXB"),
        ({(0, 1): "NVLink", (0, 2): "SYS", (1, 2): "SYS"}, 1, 2, "SYS"),
    ],
)
def test_links_have_the_names_of_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, links: dict, one: int, other: int, kind: str
) -> None:
    install(monkeypatch, [Card(), Card(), Card()], links)
    driver = sys.modules["pynvml"]
    for first, second in ((one, other), (other, one)):
        assert nvml.link_between(driver, first, second) == kind
    with pytest.raises(RuntimeError, match="does not know both"):
        nvml.link_between(driver, None, 1)


def test_mixed_links(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {(0, 1): True, (0, 2): False, (1, 2): False}
    install(monkeypatch, [Card(), Card(), Card()], {(0, 1): "NVLink"}, peers=peers)
    assert hardware.topology_line(hardware.survey()) == (
        "3 x NVIDIA H200, NVLink or SYS between pairs, peer access in 1 of 3 pairs"
    )


def test_unlike_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [Card(), Card(power_limit=500), Card(name="NVIDIA L4", gib=24, max_clock=2040)])
    found = hardware.survey()
    assert found.differences == (
        "name: NVIDIA H200, NVIDIA H200, NVIDIA L4",
        "memory_gib: 8.0, 8.0, 24.0",
        "sm_clock_max_mhz: 1980, 1980, 2040",
        "power_limit_w: 700.0, 500.0, 700.0",
    )
    assert hardware.topology_line(found).startswith("2 x NVIDIA H200 + 1 x NVIDIA L4, SYS between all pairs")
    assert hardware.topology_line(found).endswith("GPUs differ")


def test_a_gpu_that_another_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [Card(processes=(os.getpid(),)), Card(processes=(os.getpid(), 77, 12))])
    gpus = hardware.survey().gpus
    assert gpus is not None and [gpu.other_processes for gpu in gpus] == [(), (12, 77)]


def test_visible_devices_are_found_by_their_names_and_not_by_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [Card(temperature=30 + gpu) for gpu in range(4)], {(0, 3): "PHB"}, visible=[3, 0])
    found = hardware.survey()
    assert found.gpus is not None and found.links is not None
    assert [gpu.temperature_c for gpu in found.gpus] == [33, 30]
    assert found.count == 2 and found.driver_gpus == 4
    assert found.links[0].kind == "PHB"


def test_one_question_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = ("nvmlDeviceGetTemperature", "nvmlDeviceGetEnforcedPowerLimit")
    install(monkeypatch, [Card(refuses=refuses), Card()], {(0, 1): "NVLink"})
    found = hardware.survey()
    assert found.gpus is not None and found.links is not None
    assert found.gpus[0].temperature_c is None and found.gpus[0].sm_clock_mhz == 345
    assert found.gpus[1].temperature_c == 31
    assert found.links[0].kind == "NVLink"
    assert set(found.unknown) - {"nccl"} == {"temperature_c of GPU 0", "power_limit_w of GPU 0"}
    assert "not supported" in found.unknown["temperature_c of GPU 0"]


def test_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [Card(), Card()], nvml=False)
    found = hardware.survey()
    assert found.gpus is not None and found.links is not None
    assert found.gpus[0].name == "NVIDIA H200" and found.gpus[0].temperature_c is None
    assert (found.links[0].kind, found.links[0].peer_access) == (None, True)
    assert not found.differences
    assert {"NVML", "driver", "link of GPUs 0 and 1"} <= set(found.unknown)
    assert hardware.topology_line(found) == "2 x NVIDIA H200, unknown link between them, peer access"
    assert nvml.idle_note() is None
    monkeypatch.setattr(nvml, "gpu_names", lambda: ["NVIDIA H200"] * 8)
    assert "1 of 8 GPUs is used: `accelerate launch --num_processes 8`" in str(nvml.idle_note())


def test_a_driver_that_torch_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [Card(), Card()])
    monkeypatch.setattr(torch.cuda, "init", lambda: torch.zeros(1)[3])
    found = hardware.survey()
    assert (found.device, found.gpus, found.driver_gpus) == ("cpu", (), 2)
    assert "IndexError" in found.unknown["devices"]


def test_without_a_gpu() -> None:
    """This machine, as it is: the suite runs on CPUs."""
    found = hardware.survey()
    assert (found.device, found.count, found.gpus, found.links) == ("cpu", 0, (), ())
    assert found.cpu_cores >= 1 and found.ram_gib > 0.1
    without = ("built without CUDA", "Found no NVIDIA driver")  # of torch for a CPU, and for CUDA
    assert any(reason in found.unknown["devices"] for reason in without) and "NVML" in found.unknown
    assert hardware.topology_line(found).startswith(f"no GPU, {found.cpu_cores} CPU cores (")


def test_the_probe_asks_nothing_of_nvml_nor_of_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [Card(), Card()], nvml=False)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: pytest.fail("asked for peers"))
    found = hardware.probe()
    assert (found.name, found.count, found.memory_gib, found.gpus, found.links) == ("NVIDIA H200", 2, 8.0, None, None)
    assert found.differences == () and hardware.topology_line(found) == "2 x NVIDIA H200, links not surveyed"
    assert "gpus" not in found.to_dict() and "links" not in found.to_dict()


FULL = (
    "CUDA out of memory. Tried to allocate 140.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which 106.56 MiB is "
    "free. {other}Including non-PyTorch memory, this process has 35.96 GiB memory in use. Of the allocated memory "
    "35.31 GiB is allocated by PyTorch, and 19.35 MiB is reserved by PyTorch but unallocated. If reserved\n"
)
OTHER = "Process 498 has 43.10 GiB memory in use. "


@pytest.mark.parametrize(
    ("other", "reserved_gib", "said"),
    [
        (OTHER, 35.8, "Other processes use 43.3 of this GPU's 79.2 GiB: end them (nvidia-smi lists them), or select "),
        (OTHER, 77.5, "CUDA out of memory. Tried"),  # a container's driver counts this process by another number
        ("", 35.8, "CUDA out of memory. Tried"),
    ],
    ids=["another process", "this process", "none"],
)
def test_who_filled_a_gpu(monkeypatch: pytest.MonkeyPatch, other: str, reserved_gib: float, said: str) -> None:
    """The message is torch 2.11's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(0.104 * 2**30), int(79.18 * 2**30)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: int(reserved_gib * 2**30))
    found = hardware.out_of_memory_details(torch.OutOfMemoryError(FULL.format(other=other)))
    assert found.startswith(said), found
    assert found.endswith("this process has 35.96 GiB memory in use.")
