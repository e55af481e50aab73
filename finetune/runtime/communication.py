"""How long gradients travel, how much of it hidden behind computation: by DDP's own account, and by traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DDP_SAMPLES, DDP_INTERVAL = 10, 100  # DDP accounts by itself for its first ten steps, and then for one of a hundred


def exposed_and_hidden(model: Any) -> tuple[float, float] | None:
    """Seconds of the last step that DDP has accounted for in which gradients were reduced: after this rank's backward
    computation had ended, and while it went on. None where there is no account: one rank, or no step yet.

    DDP's communication begins when the first bucket is full and ends when the last one has been reduced on all ranks:
    waiting for a slower rank is in it. An account becomes available when the next step's forward pass begins. Reading
    it waits for nothing; `torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data` gives nanoseconds.
    """
    if not hasattr(model, "_get_ddp_logging_data"):
        return None
    data = model._get_ddp_logging_data()
    if "backward_comm_time" not in data:
        return None
    hidden = min(data["backward_compute_comm_overlap_time"], data["backward_comm_time"])
    return (data["backward_comm_time"] - hidden) / 1e9, hidden / 1e9


def split_of_kernels(events: Sequence[Any], steps: int) -> dict[str, float] | None:
    """Seconds a step in which kernels of NCCL ran: in all, and while no other kernel did. None without any.

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
    exposed = covered([*nccl, *others]) - covered(others)
    return {"communication_seconds": covered(nccl) / steps / 1e6, "exposed_seconds": exposed / steps / 1e6}


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals (start, end)."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
