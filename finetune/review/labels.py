"""What the review calls a metric, and what that means: for tables, which have more room than TensorBoard's cards."""

from __future__ import annotations

from finetune.runtime import tags

_LABELS = {
    "loss": "training loss",
    "eval_loss": "held-out loss",
    "clipped": "clipped steps",
    "tokens_per_gpu": "tokens/s per device",
    "tokens_total": "tokens/s in total",
    "rows_per_second": "rows/s",
    "step_seconds": "step time",
    "hours": "training time",
    "lost_to_slowest": "waiting for the slowest rank",
    "peak_of_rank": "peak memory, fullest rank",
    "reserved_of_rank": "reserved memory, fullest rank",
    "gpu_utilization": "GPU utilization",
    "sm_clock_mhz": "SM clock [MHz]",
    "power_w": "power [W]",
    "temperature_c": "temperature [C]",
}
_MEANINGS = {
    "hours": "Wall time of training, evaluation and saving included. Of a resumed run, the sum of its sessions.",
    "loss": "Mean training loss per supervised token: median of the last tenth of the logged steps.",
    "eval_loss": "Mean loss per supervised token of the held-out rows, at the last evaluation.",
    "own_work": "Step time of the rank minus communication. All ranks have the same step time: the one with the most "
    "own work holds the others up.",
    "utilization": "Share of the time in which any kernel ran on the GPU of the rank.",
    "throttled": "Share of the samples in which heat or the board lowered the clock of the GPU.",
    "tokens": "Tokens that the rank processes in a step, without padding.",
    "peak_gib": "Most memory that tensors held on the rank; on a CPU, most memory of the process.",
    "reserved_gib": "Most memory that torch's allocator held on the rank.",
    "reasons": "Why the clock was lowered, as NVML reports it.",
}


def label(name: str) -> str:
    """What people call a metric: its tag without group and unit, unless there is a better name."""
    if name in _LABELS:
        return _LABELS[name]
    return tags.BY_NAME[name].tag.partition("/")[2].partition(" [")[0].removesuffix(" of rank {n}")


def described() -> dict[str, dict[str, str]]:
    """Label, unit and meaning of each metric and of each column of the table of ranks; "" where there is none."""
    units = {one.name: one.unit for one in tags.METRICS}
    return {
        name: {
            "label": label(name) if name in units else _LABELS.get(name, ""),
            "unit": units.get(name, ""),
            "meaning": _MEANINGS.get(name) or (tags.BY_NAME[name].meaning if name in units else ""),
        }
        for name in units.keys() | _LABELS.keys() | _MEANINGS.keys()
    }
