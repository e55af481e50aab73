"""Exposed and overlapped gradient communication, from DDP's own logging and from profiler traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DDP_SAMPLES, DDP_INTERVAL = 10, 100  # DDP collects statistics in its first 10 steps, then in every 100th step


def exposed_and_hidden(model: Any) -> tuple[float, float] | None:
    """Exposed and overlapped communication time of the last step that DDP logged, in seconds: the time gradients were
    reduced after this rank's backward pass had ended, and during it. None with one rank or before the first step.

    DDP counts communication from the first full bucket until the last one has been reduced on all ranks, so waiting for
    a straggler is included. A step's statistics become available when the next forward pass begins; reading them does
    not block (`torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data`, in nanoseconds).
    """
    if not hasattr(model, "_get_ddp_logging_data"):
        return None
    data = model._get_ddp_logging_data()
    if "backward_comm_time" not in data:
        return None
    hidden = min(data["backward_compute_comm_overlap_time"], data["backward_comm_time"])
    return (data["backward_comm_time"] - hidden) / 1e9, hidden / 1e9


def kernel_communication(events: Sequence[Any], steps: int) -> dict[str, float] | None:
    """Seconds per step in which NCCL kernels ran, in total and while no other kernel ran; None without NCCL kernels.

    Args:
        events: `torch.profiler.profile.events()` of `steps` steps.
    """
    from torch.autograd import DeviceType

    kernels = [
        event
        for event in events
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    nccl = [(event.time_range.start, event.time_range.end) for event in kernels if event.name.startswith("nccl")]
    others = [(event.time_range.start, event.time_range.end) for event in kernels if not event.name.startswith("nccl")]
    if not nccl:
        return None
    exposed = union_length([*nccl, *others]) - union_length(others)
    return {"communication_seconds": union_length(nccl) / steps / 1e6, "exposed_seconds": exposed / steps / 1e6}


def union_length(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals (start, end)."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
