"""What this machine has. What cannot be found out stays None, with the reason."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass

# Dense bf16 matrix rate without sparsity, TFLOP/s, by the name CUDA reports. From NVIDIA's data sheets of each card
# (A100, H100/H200 SXM "with sparsity" halved, L4, L40S, RTX 4090 and 5090: tensor-core rate with fp32 accumulation).
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


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """This rank's machine."""

    device: str  # "cuda" or "cpu"
    name: str  # of the GPU, or of the processor
    count: int  # GPUs that this process can see; 0 on a CPU
    memory_gib: float | None  # of one GPU
    peak_bf16_tflops: float | None
    peak_reason: str  # where the peak comes from, or why it is not known
    cpu_cores: int

    def to_dict(self) -> dict:
        """For run.json."""
        return asdict(self)


def probe() -> Hardware:
    """Look at this rank's device through torch."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if not torch.cuda.is_available():
        return Hardware(
            device="cpu",
            name=platform.processor() or platform.machine(),
            count=0,
            memory_gib=None,
            peak_bf16_tflops=None,
            peak_reason="not defined for a CPU run",
            cpu_cores=cores,
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    peak = PEAK_BF16_TFLOPS.get(properties.name)
    return Hardware(
        device="cuda",
        name=properties.name,
        count=torch.cuda.device_count(),
        memory_gib=properties.total_memory / 2**30,
        peak_bf16_tflops=peak,
        peak_reason="NVIDIA data sheet, dense bf16" if peak else f"no data sheet figure on file for {properties.name}",
        cpu_cores=cores,
    )
