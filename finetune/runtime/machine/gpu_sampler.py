"""Utilization, clock, power, temperature and throttling of this machine's GPUs, sampled by a thread through NVML."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

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
_MEANS = ("utilization", "sm_clock_mhz", "power_w", "temperature_c", "other_processes")
FIELDS = (*_MEANS, "throttled", "samples", "reasons")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at one GPU. What NVML does not know is NaN."""

    utilization: float  # 0 to 1
    sm_clock_mhz: float
    power_w: float
    temperature_c: float
    other_processes: float  # that compute on it, in addition to this project's rank
    reasons: int  # bits of THROTTLE_REASONS


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
    columns = [fmean(asdict(one)[name] for one in samples) for name in _MEANS]
    reasons = 0
    for one in samples:
        reasons |= one.reasons
    return [*columns, fmean(bool(one.reasons & ~POWER_CAP) for one in samples), len(samples), reasons]


def reason_names(bits: int) -> list[str]:
    """Names of throttle reasons."""
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


def start(gpus: int) -> GpuSampler | None:
    """Sample the first `gpus` GPUs that this process can see; None without CUDA or NVML."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(gpus)]
        return GpuSampler([pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids], _read_nvml)
    except Exception:  # no NVML, or a GPU it does not list: the run goes on without these charts
        return None


def _read_nvml(handle: object) -> Sample:
    import pynvml

    rates: Any = pynvml.nvmlDeviceGetUtilizationRates(handle)

    def ask(function: Callable[..., float], *arguments: object) -> float:
        try:
            return float(function(handle, *arguments))
        except pynvml.NVMLError:
            return float("nan")

    def others() -> float:
        try:
            return float(max(len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) - 1, 0))
        except pynvml.NVMLError:
            return float("nan")

    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    return Sample(
        utilization=rates.gpu / 100,
        sm_clock_mhz=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        power_w=ask(pynvml.nvmlDeviceGetPowerUsage) / 1e3,
        temperature_c=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        other_processes=others(),
        reasons=int(reasons) & sum(THROTTLE_REASONS) if reasons == reasons else 0,
    )
