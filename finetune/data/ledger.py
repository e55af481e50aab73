"""What happened to each row on its way into the plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

BUCKETS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # upper ends of the length histogram, tokens


@dataclass
class Ledger:
    """Counts of one set of rows. A row that is split counts once as read and once per piece as kept."""

    rows_read: int = 0
    rows_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    examples: dict[str, str] = field(default_factory=dict)  # by reason: where it was first met, and how
    truncated: int = 0
    split: int = 0
    duplicates: int = 0
    tokens: int = 0
    label_tokens: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def drop(self, reason: str, where: str, detail: str) -> None:
        """Count a row that is left out, and remember the first of its kind."""
        self.dropped[reason] += 1
        self.examples.setdefault(reason, f"{where}: {detail}")

    def keep(self, length: int, label_tokens: int) -> None:
        """Count a document of the plan."""
        self.rows_kept += 1
        self.tokens += length
        self.label_tokens += label_tokens
        self.histogram[int(np.searchsorted(BUCKETS, length))] += 1

    def to_dict(self) -> dict[str, Any]:
        """For the cache, run.json and --json."""
        return {
            "rows_read": self.rows_read,
            "rows_kept": self.rows_kept,
            "dropped": dict(self.dropped),
            "examples": self.examples,
            "truncated": self.truncated,
            "split": self.split,
            "duplicates": self.duplicates,
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
            "length_histogram": dict(zip([*map(str, BUCKETS), "longer"], self.histogram, strict=True)),
        }


def examples(ledgers: dict[str, dict[str, Any]]) -> list[str]:
    """For each reason to drop rows, one sentence with the first row it was met in."""
    return [
        f"{name}: dropped {count:,} rows, {reason}; the first is {one['examples'][reason]}"
        for name, one in ledgers.items()
        for reason, count in sorted(one["dropped"].items())
    ]


def table(ledgers: dict[str, dict[str, Any]], layouts: dict[str, dict[str, Any]]) -> Table:
    """The ledgers and layouts of the training and held-out rows, side by side, for people."""
    shown = Table(title="Data", title_justify="left")
    shown.add_column("")
    for name in ledgers:
        shown.add_column(name, justify="right")

    def line(label: str, values: list[str]) -> None:
        shown.add_row(label, *values)

    each = list(ledgers.values())
    line("rows read", [f"{one['rows_read']:,}" for one in each])
    for reason in sorted({reason for one in each for reason in one["dropped"]}):
        line(f"  dropped: {reason}", [f"{one['dropped'].get(reason, 0):,}" for one in each])
    line("documents kept", [f"{one['rows_kept']:,}" for one in each])
    line("  rows truncated", [f"{one['truncated']:,}" for one in each])
    if any(one["split"] for one in each):
        line("  rows split into several", [f"{one['split']:,}" for one in each])
    line("  exact duplicates", [f"{one['duplicates']:,}" for one in each])
    line("tokens", [f"{one['tokens']:,}" for one in each])
    shares = [one["label_tokens"] / max(one["tokens"], 1) for one in each]
    line("  supervised", [f"{one['label_tokens']:,} ({share:.0%})" for one, share in zip(each, shares, strict=True)])
    line("mean length (tokens)", [f"{one['tokens'] / max(one['rows_kept'], 1):,.1f}" for one in each])
    packed = [layouts[name] for name in ledgers]
    if any(one["pack_length"] for one in packed):
        line("packs", [f"{one['rows']:,}" for one in packed])
        line("  documents per pack", [f"{one['documents_per_row']:.1f}" for one in packed])
        line("  filled", [f"{one['packing_efficiency']:.1%}" for one in packed])
    return shown
