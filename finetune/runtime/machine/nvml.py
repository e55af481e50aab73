"""What NVIDIA's driver knows of the GPUs beyond torch, through `nvidia-ml-py`: clocks, power, processes, links. Nothing
here initializes CUDA."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import threading
from collections.abc import Callable, Sequence
from statistics import fmean
from types import ModuleType
from typing import Any

NVLINK = "NVLink"
# PCI topology levels by NVML's number, named as in `nvidia-smi topo -m`.
PCI_LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
Query = Callable[[ModuleType, Any], Any]  # of NVML and the handle of a GPU


def load() -> ModuleType:
    """NVML, initialized. Raises an error of its own without a driver, and ImportError without the package."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def gpu_names() -> list[str] | None:
    """The names of all GPUs that the driver has, those hidden from this process included; None without NVML."""
    try:
        nvml = load()
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return [str(nvml.nvmlDeviceGetName(handle)) for handle in handles]
    except Exception:  # no driver
        return None


def idle_note() -> str | None:
    """What a run on one GPU says where there are more."""
    if (count := len(gpu_names() or ())) < 2:
        return None
    return f"1 of {count} GPUs is used: `accelerate launch --num_processes {count}` uses all (`finetune advise` first)"


def handle_of(nvml: ModuleType, properties: object) -> Any:
    """The handle of the GPU with these properties of torch. By UUID: NVML ignores CUDA_VISIBLE_DEVICES and may number
    the GPUs in another order."""
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{getattr(properties, 'uuid', None)}")


# --- one GPU ----------------------------------------------------------------------------------------------------------

# Values that change while a GPU works, in the units of `hardware.Gpu`.
STATE: dict[str, Query] = {
    "sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
}
GPU: dict[str, Query] = {
    "free_gib": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).free / 2**30,
    "sm_clock_max_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "memory_clock_max_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "pcie_generation_max": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
    "pcie_width": lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
    "other_processes": lambda nvml, gpu: tuple(sorted(set(_processes(nvml, gpu)) - {os.getpid()})),
    **{name: query for name, query in STATE.items() if name != "utilization"},
}


def _processes(nvml: ModuleType, gpu: object) -> list[int]:
    return [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)]


# --- links ------------------------------------------------------------------------------------------------------------


def link_between(nvml: ModuleType | None, one: object, other: object) -> str:
    """The connection of two GPUs: NVLINK, or the PCI level as `nvidia-smi topo -m` prints it.

    Args:
        nvml: the initialized pynvml module.
        one, other: NVML handles; None for a GPU that NVML does not know.

    Raises:
        RuntimeError: one of them is None.
    """
    if nvml is None or one is None or other is None:
        raise RuntimeError("NVML does not know both GPUs")
    try:
        linked = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK
    except nvml.NVMLError:  # cards without NVLink reject the query
        linked = False
    if linked:
        return NVLINK
    level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    return PCI_LEVELS.get(level, f"NVML level {level}")


# --- sampled during a run ---------------------------------------------------------------------------------------------

INTERVAL_SECONDS = 5.0
# Bits of nvmlDeviceGetCurrentClocksEventReasons (NVML API reference, "NvmlClocksEventReasons"). Idle and application
# clocks are left out.
POWER_CAP = 0x04
THROTTLE_REASONS = {
    POWER_CAP: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal limit (software)",
    0x40: "thermal limit (hardware)",
    0x80: "power brake (hardware)",
}
# `other_processes`: that compute on it, in addition to this project's rank.
_MEANS = ("utilization", "sm_clock_mhz", "power_w", "temperature_c", "other_processes")
FIELDS = (*_MEANS, "throttled", "samples", "reasons")


Sample = dict[str, float]  # one look at one GPU, by FIELDS but for `throttled` and `samples`; NaN for what is not known


class GpuSampler:
    """Samples GPUs every few seconds until it is closed. Nothing in it touches CUDA or the training thread."""

    def __init__(self, handles: Sequence[Any], read: Callable[[Any], Sample]) -> None:
        """
        Args:
            handles: NVML's handle of each GPU.
            read: one sample of a handle.
        """
        self._handles, self._read = handles, read
        self._samples: list[list[Sample]] = [[] for _ in handles]
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="gpu-sampler", daemon=True).start()

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL_SECONDS):
            self.sample()

    def sample(self) -> None:
        """Look at each GPU once. A GPU that NVML cannot read is left out."""
        for index, handle in enumerate(self._handles):
            with contextlib.suppress(Exception):
                found = self._read(handle)
                with self._lock:
                    self._samples[index].append(found)

    def take(self) -> list[list[float]]:
        """Means since the last call by FIELDS, per GPU; `reasons` are all bits seen. Empty for a GPU not sampled."""
        with self._lock:
            taken, self._samples = self._samples, [[] for _ in self._handles]
        return [summary(samples) for samples in taken]

    def close(self) -> None:
        """Stop sampling."""
        self._closed.set()


def summary(samples: Sequence[Sample]) -> list[float]:
    """Means of samples by FIELDS.

    The power cap does not count as throttled: it governs the clock of any GPU under full load. Healthy H200s report it
    in all samples, at 1,770 to 1,950 of 1,980 MHz (benchmarks/results, 2026-11-23, dashboard).
    """
    if not samples:
        return []
    columns = [fmean(one[name] for one in samples) for name in _MEANS]
    reasons = [int(one["reasons"]) for one in samples]
    throttled = fmean(bool(one & ~POWER_CAP) for one in reasons)
    return [*columns, throttled, len(samples), functools.reduce(operator.or_, reasons)]


def start_sampling(gpus: int) -> GpuSampler | None:
    """Sample the first `gpus` GPUs that this process can see; None without CUDA or NVML."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        nvml = load()
        handles = [handle_of(nvml, torch.cuda.get_device_properties(index)) for index in range(gpus)]
        return GpuSampler(handles, functools.partial(_sample, nvml))
    except Exception:  # no NVML, or a GPU it does not list: the run goes on without these charts
        return None


def _sample(nvml: ModuleType, gpu: object) -> Sample:
    def ask(query: Query) -> float:
        try:
            return float(query(nvml, gpu))
        except nvml.NVMLError:
            return math.nan

    reasons = ask(lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
    return {
        "utilization": STATE["utilization"](nvml, gpu),  # which every GPU knows that can be sampled
        **{name: ask(query) for name, query in STATE.items() if name != "utilization"},
        "other_processes": ask(lambda nvml, gpu: max(len(_processes(nvml, gpu)) - 1, 0)),
        "reasons": 0 if math.isnan(reasons) else int(reasons) & sum(THROTTLE_REASONS),
    }
