"""The figures of the published study as printed, and the contradictions among them.

Two RTX 4070 Ti SUPER behind a PCIe host bridge without peer access; TensorFlow 2.19, NCCL 2.18.5; 50 runs of 100 steps.
Nothing here was measured by this project; `python -m benchmarks.study` repeats the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.runtime.machine.nccl import Setting

MACHINE = "2 x RTX 4070 Ti SUPER, PHB, no peer access (TensorFlow 2.19, NCCL 2.18.5)"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One batch of a table: samples/s on one and on two GPUs, with the ratios as printed."""

    batch: int  # global: samples/s times step time gives the printed batch
    one: int
    two: int
    speed_up: float
    efficiency: float
    step_ms: tuple[float, float] | None  # one GPU, two GPUs


TABLES: dict[str, tuple[Row, ...]] = {
    "258K": (
        Row(batch=16, one=2422, two=2039, speed_up=0.84, efficiency=0.42, step_ms=None),
        Row(batch=32, one=4156, two=3567, speed_up=0.86, efficiency=0.43, step_ms=None),
        Row(batch=64, one=8234, two=6789, speed_up=0.82, efficiency=0.41, step_ms=None),
        Row(batch=128, one=16883, two=12345, speed_up=0.73, efficiency=0.37, step_ms=None),
    ),
    "6.9M": (
        Row(batch=8, one=431, two=336, speed_up=0.78, efficiency=0.39, step_ms=(18.6, 23.8)),
        Row(batch=16, one=789, two=678, speed_up=0.86, efficiency=0.43, step_ms=(20.3, 23.6)),
        Row(batch=32, one=1245, two=1123, speed_up=0.90, efficiency=0.45, step_ms=(25.7, 28.5)),
        Row(batch=64, one=2101, two=1841, speed_up=0.88, efficiency=0.44, step_ms=(30.5, 34.8)),
    ),
}
# Its timelines in ms: (batch, one GPU, two GPUs) per model.
TIMELINES: dict[str, tuple[int, dict[str, float], dict[str, float]]] = {
    "258K": (
        64,
        {"forward": 3.2, "backward": 3.1, "optimizer": 1.2, "other": 0.3},
        {"forward": 1.8, "backward": 1.7, "exposed communication": 5.2, "optimizer": 0.6, "other": 0.1},
    ),
    "6.9M": (
        32,
        {"forward": 11.2, "backward": 10.8, "optimizer": 3.1, "other": 0.6},
        {"forward": 6.1, "backward": 5.9, "exposed communication": 7.8, "optimizer": 1.6, "other": 0.3},
    ),
}
# Its "overhead per step" in ms, lowest and highest.
OVERHEADS: dict[str, dict[str, tuple[float, float]]] = {
    "258K": {
        **{"gathering gradients": (15, 20), "all-reduce": (25, 35), "broadcast": (10, 15)},
        **{"synchronization": (5, 10), "buffers": (3, 5)},
    },
    "6.9M": {
        **{"gathering gradients": (25, 35), "all-reduce": (35, 50), "broadcast": (15, 25)},
        **{"synchronization": (8, 15), "buffers": (5, 10)},
    },
}

# NCCL's variables in the study, and whether `nccl.recommend_settings` sets them as well.
SETTINGS = (
    Setting(name="NCCL_P2P_DISABLE", value="1", reason="used if no pair has peer access, as there"),
    Setting(
        name="NCCL_ALGO",
        value="Tree",
        reason="not used: with two ranks a tree equals a ring, and NCCL implements Tree for all-reduce only, so other "
        "collectives are left without an algorithm. Since 2.24 `allreduce:tree` restricts it to all-reduce",
    ),
    Setting(
        name="NCCL_PROTO",
        value="Simple",
        reason="not used: it rules out LL, the protocol with the lowest latency, which small gradients need most. "
        "NCCL's documentation advises against setting it, except to exclude a protocol suspected of a bug",
    ),
    Setting(
        name="NCCL_BUFFSIZE",
        value="33554432",
        reason="not used without a measurement: eight times the default of 4 MiB of GPU memory per channel and pair; "
        "`finetune bench comm --settings` measures its effect",
    ),
    Setting(
        name="NCCL_NTHREADS",
        value="16",
        reason="invalid: allowed values are 64, 128, 256 and 512 (default 512), so 16 cannot have had an effect",
    ),
    Setting(name="NCCL_DEBUG", value="INFO", reason="not used: for debugging; it prints hundreds of lines per rank"),
)


def contradictions() -> tuple[str, ...]:
    """Contradictions among the figures, computed from them, and an assessment of the study's NCCL settings."""
    found = []
    for model, parts in OVERHEADS.items():
        low, high = (sum(bounds[place] for bounds in parts.values()) for place in (0, 1))
        longest = max(row.batch / row.two * 1e3 for row in TABLES[model])
        found.append(
            f"{model}: the overheads add up to {low:.0f}-{high:.0f} ms per step, but the slowest step on two GPUs "
            f"takes only {longest:.1f} ms"
        )
    for model, (batch, _, two) in TIMELINES.items():
        stated = next(row.batch / row.two * 1e3 for row in TABLES[model] if row.batch == batch)
        if abs(sum(two.values()) / stated - 1) > 0.05:
            found.append(
                f"{model}: the timeline of two GPUs at batch {batch} adds up to {sum(two.values()):.1f} ms, but "
                f"the table has {stated:.1f} ms"
            )
    best = max(row.efficiency for rows in TABLES.values() for row in rows)
    found.append(
        f"rules: no configuration gained from the second GPU (best efficiency {best:.0%}), and none above 6.9 M "
        "parameters was measured; a gain from 10 M parameters, and a clear one from 50 M, is extrapolated"
    )
    small = {row.batch: row.batch / row.one * 1e3 for row in TABLES["258K"]}
    found.append(
        f"258K: one GPU takes {min(small.values()):.1f}-{max(small.values()):.1f} ms per step at any batch from 16 to "
        "128: kernel launches on the host seem to be the limit, not the GPU"
    )
    found += [f"{setting.name}={setting.value}: {setting.reason}" for setting in SETTINGS]
    return tuple(found)
