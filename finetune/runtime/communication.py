"""Exposed and overlapped gradient communication, from DDP's own logging."""

from __future__ import annotations

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
