"""Runs made of plain numbers: healthy unless a test says otherwise. No file, no trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from finetune.review import events
from finetune.review import ranks as rank_records
from finetune.review.run import Run
from finetune.runtime import tags

STEPS, EVERY = 200, 10
HEALTHY = {
    "data_wait": 0.01,
    "forward": 0.30,
    "backward": 0.60,
    "communication": 0.02,
    "optimizer": 0.05,
    "other": 0.02,
}  # seconds: a step of 1 s
GPU = {"utilization": 0.97, "sm_clock_mhz": 1900.0, "power_w": 600.0, "temperature_c": 60.0, "throttled": 0.0}


def lines(
    world: int = 2,
    *,
    gpu: bool = True,
    count: int = STEPS // EVERY,
    phases: dict[str, float] | None = None,
    slow: dict[int, dict[str, float]] | None = None,
    by_rank: dict[int, dict[str, Any]] | None = None,
    gpu_of: dict[int, dict[str, Any]] | None = None,
    jitter: float = 0.0,
    **of_record: Any,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Start and record entries of ranks.jsonl.

    Args:
        phases: seconds of a step on every rank, over HEALTHY.
        slow: rank -> phase -> additional seconds; the other ranks wait for the slowest one.
        by_rank: rank -> fields over the usual ones.
        gpu_of: rank -> fields of its GPU.
        jitter: standard deviation of each rank's forward phase, relative to a step.
    """
    random = np.random.default_rng(0)
    about = [
        {"rank": rank, "host": f"host{rank // 8}", "device": "NVIDIA H200" if gpu else "x86_64"}
        | ({"gpu": rank % 8, "memory_gib": 100.0} if gpu else {"gpu": None, "memory_gib": None})
        for rank in range(world)
    ]
    starts = [{"kind": "start", "time": 0.0, "step": 0, "world_size": world, "logging_steps": EVERY, "ranks": about}]
    found = []
    for place in range(count):
        own = [dict(HEALTHY | (phases or {})) for _ in range(world)]
        for rank, more in (slow or {}).items():
            for phase, seconds in more.items():
                own[rank][phase] += seconds
        for one in own:
            one["forward"] += jitter * abs(random.normal())
        longest = max(sum(one.values()) for one in own)
        entries = []
        for rank, one in enumerate(own):
            one["communication"] += longest - sum(one.values())
            entry: dict[str, Any] = {"rank": rank, "step": longest, **one}
            entry |= {"own_work": longest - one["communication"], "wait": 0.5 if gpu else 0.0}
            entry |= {"tokens": 10_000, "squared_lengths": 1_000_000, "peak_gib": 40.0}
            entry |= {"reserved_gib": 60.0 if gpu else None, "allocator_retries": 0}
            entry["gpu"] = GPU | {"samples": 2, "reasons": []} | (gpu_of or {}).get(rank, {}) if gpu else None
            entries.append(entry | (by_rank or {}).get(rank, {}))
        found.append(
            {"kind": "record", "time": float(EVERY * (place + 1)), "step": EVERY * (place + 1), "steps": EVERY}
            | {"step_seconds": [longest] * EVERY, "evaluation_seconds": 0.0, "saving_seconds": 0.0}
            | {"begun": EVERY * (place + 1), "ranks": entries}
            | of_record
        )
    return starts, found


def losses(count: int = STEPS, *, start: float = 3.0, end: float = 1.0, noise: float = 0.02) -> np.ndarray:
    """A loss that falls quickly and levels off, with normal noise."""
    steps = np.arange(count)
    return end + (start - end) * np.exp(-8 * steps / count) + np.random.default_rng(1).normal(0, noise, count)


def run(
    *,
    world: int = 2,
    gpu: bool = True,
    loss: Any = None,
    series: dict[str, tuple[list[int], list[float]]] | None = None,
    record: dict[str, Any] | None = None,
    ranks: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None,
    **more: Any,
) -> Run:
    """A healthy finished run.

    Args:
        loss: of each step.
        series: metric -> (steps, values), over the healthy ones; empty lists remove a metric.
        record: of run.json, over the healthy one.
        ranks: of `lines`; more arguments are passed to it.
    """
    values = losses() if loss is None else np.asarray(loss)
    steps = list(range(1, len(values) + 1))
    cosine = 1e-3 * 0.5 * (1 + np.cos(np.pi * np.arange(len(values)) / len(values)))
    found = {
        "loss": (steps, list(values)),
        "gradient_norm": (steps, [0.5] * len(values)),
        "learning_rate": (steps, list(cosine)),
        "clipped": (steps[9::10], [0.0] * len(steps[9::10])),
        "padding": (steps[9::10], [0.02] * len(steps[9::10])),
        "fullest": (steps[9::10] if gpu else [], [0.6] * len(steps[9::10])),
    } | (series or {})
    config = {
        "training": {"learning_rate": 1e-3, "max_grad_norm": 1.0, "max_steps": len(values), "warmup_steps": 0},
        "data": {"max_length": 1024, "packing": False},
    }
    content = {"status": "done", "steps": len(values), "world_size": world, "config": config, "dtype": "bfloat16"}
    content |= {"hardware": {"device": "cuda" if gpu else "cpu", "name": "NVIDIA H200" if gpu else "x86_64"}}
    content |= {"batch": {"per_device": 4, "accumulation": 2, "global_batch_size": 8 * world}}
    content |= {"evaluation_seconds": 5.0, "saving_seconds": 1.0, "training_seconds": 210.0}
    return Run(
        folder=Path("out"),
        name="out",
        record=content | (record or {}),
        scalars={tags.tag(name): events.of(*pair) for name, pair in found.items() if pair[0]},
        ranks=rank_records.from_lines(*(ranks or lines(world, gpu=gpu, **more))),
        now=0.0,
    )
