"""Packing and planning: seconds, memory, packing efficiency, padding, and how level the ranks are.

    python benchmarks/data_plan.py [--documents 1000000] [--json FILE]

Lengths are drawn from a seed: lognormal(6.0, 0.8) clipped to 32..2048 (instruction mixtures), and for GSM8K
lognormal(5.11, 0.36) + 30 tokens of chat template clipped to 90..570, the shape of its 7,473 training rows.
Cost is tokens + squares / (12 * 2048): a model of hidden size 2048. "Uneven" is the costliest rank's sum over one
global step divided by the mean of the ranks, minus 1; whole steps only, since the last of an epoch may be short.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from finetune.data.packs import Packs, one_per_row, pack
from finetune.data.plan import Plan

HIDDEN_SIZE = 2048
WORLD_SIZE = 8
PLACES = [(1, 1), (1, 2), (2, 1), (4, 1), (2, 2), (8, 1)]  # (accumulation, per_device)


def lognormal(n: int) -> np.ndarray:
    return np.random.default_rng(0).lognormal(6.0, 0.8, n).round().clip(32, 2048).astype(np.int64)


def gsm8k_like(n: int = 7473) -> np.ndarray:
    return (np.random.default_rng(0).lognormal(5.11, 0.36, n).round() + 30).clip(90, 570).astype(np.int64)


def plan_of(packs: Packs, global_batch_size: int, grouped: bool = False, lengths: np.ndarray | None = None) -> Plan:
    return Plan(
        costs=packs.costs(HIDDEN_SIZE),
        label_tokens=packs.tokens,
        global_batch_size=global_batch_size,
        seed=0,
        fingerprint="benchmark",
        lengths=lengths,
        group_by_length=grouped,
    )


def uneven(costs: np.ndarray, dealt: np.ndarray) -> dict[str, float]:
    """costs [n_rows]; dealt [steps, accumulation, ranks, per_device], whole steps."""
    placed = costs[dealt].sum(axis=3)
    step = placed.sum(axis=1)
    step = step.max(axis=1) / step.mean(axis=1) - 1
    micro = placed.max(axis=2) / placed.mean(axis=2) - 1
    return {
        "step_mean": step.mean(),
        "step_p99": np.percentile(step, 99),
        "step_max": step.max(),
        "steps_within_1_percent": (step <= 0.01).mean(),
        "micro_step_mean": micro.mean(),
    }


def packed_and_planned(name: str, lengths: np.ndarray, pack_length: int) -> tuple[dict, Packs]:
    """Packs, orders, deals (8 ranks, global batch 64) and digests one epoch."""
    begin = time.perf_counter()
    packs = pack(lengths, pack_length, "benchmark")
    packing = time.perf_counter() - begin
    begin = time.perf_counter()
    plan = plan_of(packs, 64)
    plan.deal_epoch(0, world_size=WORLD_SIZE, per_device=1, accumulation=8)
    plan.digest()
    planning = time.perf_counter() - begin
    best = -(-int(lengths.sum()) // pack_length)
    figures = {
        "lengths": name,
        "documents": len(lengths),
        "pack_length": pack_length,
        "packs": len(packs),
        "fewest_packs_any_packing_could_need": best,
        "efficiency": packs.efficiency,
        "pack_seconds": packing,
        "plan_seconds": planning,
    }
    return figures, packs


def padding(lengths: np.ndarray, per_device: int, grouped: bool) -> dict:
    """Unpacked: share of the positions that are padding, and how uneven the padded ranks are; global batch 64."""
    rows = one_per_row(lengths)
    begin = time.perf_counter()
    plan = plan_of(rows, WORLD_SIZE * per_device, grouped, lengths)
    dealt = plan.deal_epoch(0, world_size=WORLD_SIZE, per_device=per_device, accumulation=1)
    seconds = time.perf_counter() - begin
    dealt = dealt[: plan.n_rows // plan.global_batch_size]
    longest = lengths[dealt].max(axis=3)
    ranks = longest.sum(axis=1)
    return {
        "documents": len(lengths),
        "per_device": per_device,
        "group_by_length": grouped,
        "padding_share": 1 - lengths[dealt].sum() / (longest.sum() * per_device),
        "padded_step_uneven_mean": (ranks.max(axis=1) / ranks.mean(axis=1) - 1).mean(),
        "plan_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    console = Console(width=220, highlight=False)
    lengths = lognormal(arguments.documents)
    figures: dict = {"packing": [], "uneven": [], "unpacked": []}

    def report(section: str, values: dict) -> None:
        values = {key: round(float(value), 5) if isinstance(value, float) else value for key, value in values.items()}
        figures[section].append(values)
        console.print(section + ": " + "  ".join(f"{key} {value}" for key, value in values.items()), soft_wrap=True)

    for name, drawn, pack_length in (
        ("lognormal", lengths, 16384),
        ("lognormal", lengths, 2048),
        ("gsm8k", gsm8k_like(), 16384),
        ("gsm8k", gsm8k_like(), 2048),
    ):
        values, packs = packed_and_planned(name, drawn, pack_length)
        report("packing", values)
        if name == "gsm8k":
            continue
        for accumulation, per_device in PLACES:
            plan = plan_of(packs, WORLD_SIZE * accumulation * per_device)
            dealt = plan.deal_epoch(0, world_size=WORLD_SIZE, per_device=per_device, accumulation=accumulation)
            whole = dealt[: plan.n_rows // plan.global_batch_size]
            places = {"accumulation": accumulation, "per_device": per_device}
            report("uneven", {"pack_length": pack_length, **places, **uneven(plan.costs, whole)})

    for per_device in (1, 8):
        for grouped in (False, True):
            report("unpacked", padding(lengths, per_device, grouped))

    plan = plan_of(one_per_row(lengths), 64)
    places = {"world_size": WORLD_SIZE, "per_device": 1, "accumulation": 8}
    begin = time.perf_counter()
    plan.deal(0, plan.steps_per_epoch // 2, **places)
    figures["first_step_of_an_epoch_seconds"] = time.perf_counter() - begin
    begin = time.perf_counter()
    for step in range(1000):
        plan.deal(0, step, **places)
        plan.label_tokens_of_step(0, step)
    figures["any_other_step_microseconds"] = (time.perf_counter() - begin) * 1e3
    figures["peak_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    for key in ("first_step_of_an_epoch_seconds", "any_other_step_microseconds", "peak_memory_gib"):
        console.print(f"{key} {figures[key]:.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
