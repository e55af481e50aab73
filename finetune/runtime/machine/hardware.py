"""Describes this machine's hardware. What cannot be determined is None, with the reason.

`probe()` is cheap and only looks at this rank's device: every rank calls it at startup. `survey()` looks at the whole
machine, all GPUs and the links between them, through torch and NVML (`nvidia-ml-py`).
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.errors import describe
from finetune.runtime.machine import nvml
from finetune.runtime.types import JsonObject

# Dense bf16 matrix throughput (no sparsity) in TFLOP/s, by the name that CUDA reports. From NVIDIA's data sheets (A100,
# H100 and H200 SXM: "with sparsity" halved; L4, L40S, RTX 4090 and 5090: tensor-core rate with fp32 accumulation).
PEAK_BF16_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H200": 989.4,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
}
# Memory held outside torch's allocator is reported above this many bytes; a CUDA context takes less than 1 GiB.
NOTABLE_OUTSIDE_BYTES = 2.0 * 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU visible to this process. Clocks, power and temperature are momentary values."""

    index: int  # in torch's numbering
    name: str
    compute_capability: str  # such as "9.0"
    multiprocessors: int
    memory_gib: float
    free_gib: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    pcie_generation_max: int | None = None  # highest that card and machine both support
    pcie_width: int | None = None  # lanes
    other_processes: tuple[int, ...] | None = None  # ids of the other processes that compute on it


@dataclass(frozen=True, kw_only=True)
class Link:
    """The connection between two GPUs."""

    gpus: tuple[int, int]  # torch's indices, the smaller first
    kind: str | None  # NVLink, or the PCI level: PIX, PXB, PHB, NODE or SYS
    peer_access: bool | None  # whether one can read the other's memory


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """This rank's machine."""

    device: str  # "cuda" or "cpu"
    name: str  # of the GPU, or of the processor
    count: int  # GPUs visible to this process; 0 on a CPU
    memory_gib: float | None  # of one GPU
    peak_bf16_tflops: float | None
    cpu_cores: int
    ram_gib: float
    nccl_version: str | None = None
    driver_version: str | None = None
    driver_gpus: int | None = None  # GPUs that the driver has, including those hidden from this process
    gpus: tuple[Gpu, ...] | None = None  # None if not surveyed (`probe`)
    links: tuple[Link, ...] | None = None  # one per pair
    unknown: Mapping[str, str] = field(default_factory=dict)  # reasons for values that are None

    @property
    def differences(self) -> tuple[str, ...]:
        """Properties in which the GPUs differ, with the value of each GPU; empty for identical GPUs."""
        found = []
        for name in _SPEED_PROPERTIES if self.gpus else ():
            values = [getattr(gpu, name) for gpu in self.gpus or ()]
            if len(set(values)) > 1:
                found.append(f"{name}: {', '.join(map(str, values))}")
        return tuple(found)

    def to_dict(self) -> JsonObject:
        """For JSON; GPUs and links only after a survey."""
        own = asdict(self) | {"unknown": dict(self.unknown)}
        if self.gpus is None:
            for name in ("gpus", "links", "driver_version", "driver_gpus"):
                del own[name]
            return own
        return own | {"identical": not self.differences if self.gpus else None, "differences": list(self.differences)}


# If GPUs differ in one of these, the faster ones wait for the slowest at every step.
_SPEED_PROPERTIES = (
    *("name", "memory_gib", "multiprocessors", "sm_clock_max_mhz", "memory_clock_max_mhz", "power_limit_w"),
    *("pcie_generation_max", "pcie_width"),
)


def probe() -> Hardware:
    """Describe this rank's device through torch, without touching the other GPUs."""
    import torch

    unknown: dict[str, str] = {}
    nccl = _nccl_version(_reader(unknown), unknown)
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if torch.cuda.is_available() else None
    count = torch.cuda.device_count() if gpu else 0
    return Hardware(**_device(gpu, count), nccl_version=nccl, unknown=unknown)


def has_bfloat16(device: str) -> bool:
    """Whether a device has units for bfloat16: Ampere and newer GPUs; CPUs with AMX or AVX-512 BF16 of x86, or BF16 of
    Arm. Elsewhere torch emulates it. As for Unsloth, UNSLOTH_CPU_BF16=0 or 1 decides instead on a CPU."""
    import torch

    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if asked := os.environ.get("UNSLOTH_CPU_BF16"):
        return asked == "1"
    found = getattr(torch.cpu, "get_capabilities", dict)()  # not in the oldest torch
    units = ("amx_bf16", "avx512_bf16", *(("bf16",) if platform.system() == "Linux" else ()))
    return any(found.get(unit) for unit in units)


def memory_outside_torch() -> tuple[float, float]:
    """Memory of this rank's GPU in bytes: in use outside torch's allocator (CUDA context, NCCL, other processes), and
    in total."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return float(max(total - free - torch.cuda.memory_reserved(), 0)), float(total)


def out_of_memory_details(error: BaseException) -> str:
    """The figures of torch's out-of-memory error without its hints, preceded by the memory that other processes use.

    torch lists all processes on the GPU, in a container possibly including this one. They are only reported if a
    notable amount of memory is in use outside torch's allocator.
    """
    import torch

    details = str(error).splitlines()[0].split(" Of the allocated memory")[0]
    if "Process " in details and torch.cuda.is_available():
        outside, total = memory_outside_torch()
        if outside > NOTABLE_OUTSIDE_BYTES:
            details = (
                f"Other processes use {outside / 2**30:.1f} of this GPU's {total / 2**30:.1f} GiB: end them "
                f"(nvidia-smi lists them), or select another GPU with CUDA_VISIBLE_DEVICES. {details}"
            )
    return details


def _device(gpu: Any, count: int) -> JsonObject:
    """The first fields of `Hardware`, from torch's properties of a GPU (None for a CPU)."""
    import psutil

    return {
        "device": "cuda" if gpu else "cpu",
        "name": gpu.name if gpu else platform.processor() or platform.machine(),
        "count": count,
        "memory_gib": gpu.total_memory / 2**30 if gpu else None,
        "peak_bf16_tflops": PEAK_BF16_TFLOPS.get(gpu.name) if gpu else None,
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1),
        "ram_gib": psutil.virtual_memory().total / 2**30,
    }


# --- the whole machine ----------------------------------------------------------------------------------------------


def survey() -> Hardware:
    """Describe all GPUs visible to this process, and the links between them.

    Uses no GPU memory. Call it before this process computes on a GPU: in a container the driver reports the host's
    process ids, so this process would be listed among the others.
    """
    unknown: dict[str, str] = {}
    read = _reader(unknown)
    driver = read("NVML", nvml.load)
    if driver is None:
        unknown["driver"] = "NVML is not available"
    gpus, links, first = _gpus_and_links(driver, read, unknown)
    return Hardware(
        **_device(first, len(gpus)),
        nccl_version=_nccl_version(read, unknown),
        driver_version=read("driver", driver.nvmlSystemGetDriverVersion) if driver else None,
        driver_gpus=read("driver_gpus", driver.nvmlDeviceGetCount) if driver else None,
        gpus=gpus,
        links=links,
        unknown=unknown,
    )


Read = Callable[..., Any]  # (name, function, *arguments): what the function returns; if it fails, None


def _reader(unknown: dict[str, str]) -> Read:
    """A `Read` that keeps the reasons in `unknown`."""

    def read(name: str, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except Exception as error:  # a driver may reject any query and still answer the next one
            unknown[name] = describe(error)
            return None

    return read


def _gpus_and_links(
    driver: ModuleType | None, read: Read, unknown: dict[str, str]
) -> tuple[tuple[Gpu, ...], tuple[Link, ...], Any]:
    """The GPUs, the links, and torch's properties of the first GPU (None without one)."""
    import torch

    if torch.version.cuda is None:
        unknown["devices"] = f"torch {torch.__version__} is built without CUDA"
        return (), (), None
    read("devices", torch.cuda.init)
    if "devices" in unknown:
        return (), (), None
    gpus, handles = [], []
    known = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    for index, properties in enumerate(known):
        handle = read(f"NVML of GPU {index}", nvml.handle_of, driver, properties) if driver else None
        handles.append(handle)
        gpus.append(
            Gpu(
                index=index,
                name=properties.name,
                compute_capability=f"{properties.major}.{properties.minor}",
                multiprocessors=properties.multi_processor_count,
                memory_gib=properties.total_memory / 2**30,
                **{
                    name: read(f"{name} of GPU {index}", query, driver, handle) if handle is not None else None
                    for name, query in nvml.GPU.items()
                },
            )
        )
    pairs = [(one, other) for one in range(len(handles)) for other in range(one + 1, len(handles))]
    links = [
        Link(
            gpus=(one, other),
            kind=read(f"link of GPUs {one} and {other}", nvml.link_between, driver, handles[one], handles[other]),
            peer_access=read(
                f"peer access of link of GPUs {one} and {other}", torch.cuda.can_device_access_peer, one, other
            ),
        )
        for one, other in pairs
    ]
    return tuple(gpus), tuple(links), known[0] if known else None


def _nccl_version(read: Read, unknown: dict[str, str]) -> str | None:
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        unknown["nccl"] = "this torch is built without NCCL"
        return None
    from torch.cuda import nccl

    found = read("nccl", nccl.version)
    return None if found is None else ".".join(map(str, found))


def topology_line(hardware: Hardware) -> str:
    """The machine in one line, such as `8 x NVIDIA H200, NVLink between all pairs, peer access`."""
    gpus, links = hardware.gpus, hardware.links or ()
    if hardware.device == "cpu" or gpus == ():
        why = hardware.unknown.get("devices")
        return f"no GPU, {hardware.cpu_cores} CPU cores" + (f" ({why})" if why else "")
    if gpus is None:
        return f"{hardware.count} x {hardware.name}, links not surveyed"
    names = [gpu.name for gpu in gpus]
    line = " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if not links:
        return line
    kinds = list(dict.fromkeys(link.kind or "unknown link" for link in links))
    between = "between them" if len(links) == 1 else "between all pairs" if len(kinds) == 1 else "between pairs"
    peers = [link.peer_access for link in links]
    if len(set(peers)) == 1:
        access = {True: "peer access", False: "no peer access", None: "peer access unknown"}[peers[0]]
    else:
        access = f"peer access in {peers.count(True)} of {len(peers)} pairs"
    unlike = ", GPUs differ" if hardware.differences else ""
    return f"{line}, {' or '.join(kinds)} {between}, {access}{unlike}"


def free_host_bytes() -> int:
    """Available memory: the host's, or the container's limit if that is lower."""
    import psutil

    limits = [psutil.virtual_memory().available]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or "max"
            limits.append(int(Path(file).read_text(encoding="ascii")))
    return min(limits)
