"""Figures of a record: medians with intervals, ratios to each peer, and a plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks import figures
from finetune.measure import protocol

PEERS = {
    "ours_over_ours_before": "ours_before",
    "ours_over_ours_padded": "ours_padded",
    "ours_over_unsloth_fixed": "unsloth_fixed",
    "ours_over_unsloth_packed": "unsloth_packed",
    "ours_over_unsloth_padded": "unsloth_padded",
    "ours_over_unsloth_documented": "unsloth_documented",
    "ours_over_trl_liger": "trl_liger",
    "ours_over_trl_documented": "trl_documented",
}


def complete(record: dict[str, Any]) -> None:
    """Fill in each cell's summary and the ratios of `record`, from its runs."""
    record["ratios"] = {}
    for name, cell in record["cells"].items():
        cell["summary"] = {variant: summary(cell, variant) for variant in variants_of(cell)}
        cell["ratios"] = ratios(cell, "ours") | {f"fp8_{key}": value for key, value in ratios(cell, "ours_fp8").items()}
        size, method, lengths = name.split()
        prefix = "" if method == "lora" else f"{method}_"
        suffix = "" if lengths == ("4096" if size == "8b" else "real") else f"_{lengths}"
        named = {f"{prefix}{key}{suffix}": value["ratio"] for key, value in cell["ratios"].items()}
        record["ratios"].setdefault(size, {}).update(named)


def variants_of(cell: dict[str, Any]) -> list[str]:
    """Names of the variants that ran, in the order of their first run."""
    return list(dict.fromkeys(one["variant"] for one in cell["runs"]))


def good(cell: dict[str, Any], variant: str) -> list[dict[str, Any]]:
    """Runs of a variant that did not fail, by round."""
    found = [one for one in cell["runs"] if one["variant"] == variant and "error" not in one]
    return sorted(found, key=lambda one: one["round"])


def summary(cell: dict[str, Any], variant: str) -> dict[str, Any] | None:
    """Means over a variant's runs. The interval of the step time is that of `finetune.measure.protocol`: Student's t
    over the means of the runs. None where every run failed."""
    runs = good(cell, variant)
    if not runs:
        return None
    return {
        "setting": runs[0]["setting"],
        "tokens_per_second": [one["tokens_per_second"] for one in runs],
        "tflops": statistics.fmean(one["tflops"] for one in runs) if runs[0]["tflops"] else None,
        "step_seconds": protocol.summarize([one["step_seconds"] for one in runs]).to_dict(),
        "step_seconds_ci95_within": [within(one["step_seconds"]) for one in runs],
        "peak_memory_gib": max((one["peak_memory_gib"] for one in runs if one["peak_memory_gib"]), default=None),
        "first_step_seconds": [one["first_step_seconds"] for one in runs],
    }


def within(seconds: list[float]) -> tuple[float, float]:
    """The 95 % interval of a run's mean step time by Student's t over its steps. It knows nothing of what differs
    between runs, so it is the narrower one."""
    mean, half = statistics.fmean(seconds), statistics.stdev(seconds) / len(seconds) ** 0.5
    half *= protocol.student_t(len(seconds) - 1)
    return mean - half, mean + half


def ratios(cell: dict[str, Any], own: str) -> dict[str, dict[str, Any]]:
    """Tokens/s of `own` over those of each peer: the mean of the rounds' ratios, and each of them.

    A peer that ran in fewer rounds is compared in those; one that ran in none of them, with `own` on torch's kernel.
    """
    found = {}
    for name, peer in PEERS.items():
        for mine in (own, f"{own}_flash_2"):
            speeds = {one["round"]: one["tokens_per_second"] for one in good(cell, mine)}
            peers = {one["round"]: one["tokens_per_second"] for one in good(cell, peer)}
            each = [speeds[number] / peers[number] for number in sorted(speeds.keys() & peers.keys())]
            if each:
                found[name] = {"ratio": statistics.fmean(each), "rounds": each, "own": mine}
                break
    return found


def line(one: dict[str, Any]) -> str:
    """One run in words."""
    if "error" in one:
        return f"{one['error']}: {' | '.join(one['output'][-3:])}"
    memory = f"{one['peak_memory_gib']:.1f} GiB" if one["peak_memory_gib"] else "CPU"
    setting = one["setting"]
    speed = f"{one['tflops']:.1f} TFLOP/s, " if one["tflops"] else ""
    return (
        f"{one['tokens_per_second']:,.0f} tokens/s, {speed}{memory}, first step after "
        f"{one['first_step_seconds']:.0f} s, {setting['batch']} x {setting['length']}, loss {one['losses'][-1]:.3f}"
        f"{'; packs: ' + one['packs']['reason'] if one.get('packs') else ''}"
    )


def plot(record: dict[str, Any], path: Path) -> None:
    """Tokens/s by variant, a panel per cell; nothing where matplotlib is not installed."""
    done = {name: cell for name, cell in record["cells"].items() if any(cell.get("summary", {}).values())}
    figure = figures.new_figure(4 * len(done) + 2) if done else None
    if figure is None:
        return
    panels = figure.subplots(len(done), 1, squeeze=False)[:, 0]
    for axes, (name, cell) in zip(panels, done.items(), strict=True):
        shown = {variant: found for variant, found in cell["summary"].items() if found}
        names = sorted(shown, key=lambda variant: statistics.fmean(shown[variant]["tokens_per_second"]))
        means = [statistics.fmean(shown[variant]["tokens_per_second"]) for variant in names]
        colors = ["#1b6ca8" if variant.startswith("ours") else "#b0b7bf" for variant in names]
        axes.barh([variant.replace("_", " ") for variant in names], means, color=colors)
        for place, mean in enumerate(means):
            axes.annotate(f" {mean:,.0f}", (mean, place), va="center", fontsize=8)
        axes.set(title=name, xlabel="tokens/s")
        axes.margins(x=0.15)
    figures.save(figure, path)
