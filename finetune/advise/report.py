"""The output of `advise` on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from finetune.advise import verdict
from finetune.advise.verdict import Row
from finetune.engine.monitoring.metrics import parameters_text
from finetune.measure.dry_run_report import print_longest_rows
from finetune.measure.measurements import Measurement
from finetune.runtime.command import print_line
from finetune.text import duration


def gradients(measured: Measurement) -> str:
    """The gradients that DDP sends in each step."""
    total = sum(measured.gradient_bytes)
    size = f"{total / 2**20:,.1f} MiB of {measured.gradient_dtype} gradients"
    if measured.trainable_parameters == measured.parameters:  # the configuration of the demo does not show it
        return f"Each step sends {size}: every weight is trained."
    share = measured.trainable_parameters / measured.parameters
    return (
        f"Each step sends {size}: only those of the adapter, {share:.2%} of the model's "
        f"{measured.parameters / 1e6:,.1f} M parameters."
    )


def active_parameters(measured: Measurement) -> list[str]:
    """What of a mixture of experts decides the time of a step, and what its memory; nothing of a dense model."""
    if measured.active_parameters == measured.parameters:
        return []
    size = parameters_text(measured.parameters, measured.active_parameters)
    return [f"Mixture of experts: {size}. A step computes with the active ones; the weights of all are in memory."]


def print_advice(advice: Mapping[str, Any], found: Sequence[Row], chosen: Row, *, priced: bool) -> None:
    """Print the advice: the table of world sizes, the decision."""
    if advice["longest_rows"] is not None:
        print_longest_rows(advice["longest_rows"])
    shown = Table(title="Predicted from one device and the all-reduce", title_justify="left")
    columns = ["devices", "tokens/s", "whole run", "GiB/rank", "exposed", "efficiency", *(["cost"] if priced else [])]
    for column in columns:
        shown.add_column(column, justify="right")
    for row in sorted(found, key=lambda row: row.world_size):
        shown.add_row(*cells(row, priced), style="bold" if row is chosen else None)
    print_line(shown)
    said = verdict.nearest_here(found) if chosen is found[0] else chosen
    for row in found[1:]:
        if row is not said:
            print_line(f"{verdict.describe(row)}.")
    for text in advice["notes"]:
        print_line(text)
    print_line(f"ADVICE: {advice['reason']}.", style="green")
    if advice["launch"]:
        print_line(f"  {advice['launch']}")


def cells(row: Row, priced: bool) -> list[str]:
    """The cells of one row of the table."""
    if row.prediction is None:
        return [str(row.world_size), *["-"] * (6 if priced else 5)]
    return [
        str(row.world_size),
        f"{row.prediction.tokens_per_second:,.0f}",
        duration(3600 * row.prediction.hours),
        f"{row.prediction.peak_memory_bytes / 2**30:.2f}",
        f"{row.prediction.exposed_fraction:.1%}",
        f"{row.efficiency:.0%}",
        *([] if row.cost is None else [f"{row.cost:,.2f}"]),
    ]
