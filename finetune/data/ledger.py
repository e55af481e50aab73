"""Counts of what happened to the rows: read, kept, dropped (and why), truncated, split, duplicated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

BUCKETS = (
    32,
    64,
    128,
    256,
    512,
    1024,
    2048,
    4096,
    8192,
    16384,
    32768,
)  # upper bounds of the length histogram, tokens


@dataclass
class Ledger:
    """Counts for one split. A row that is cut into pieces counts once as read and once per piece as kept."""

    rows_read: int = 0
    rows_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    examples: dict[str, str] = field(default_factory=dict)  # by reason: place and details of the first row
    notes: Counter[str] = field(default_factory=Counter)  # rows that each note is about
    truncated: int = 0
    split: int = 0
    duplicates: int = 0
    tokens: int = 0
    label_tokens: int = 0
    leaked: dict[str, Any] | None = None  # evaluation rows that are training rows too: how many, where the first is
    histogram: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def drop(self, reason: str, where: str, detail: str) -> None:
        """Count a dropped row; the first row of each reason is kept as an example."""
        self.dropped[reason] += 1
        self.examples.setdefault(reason, f"{where}: {detail}")

    def keep(self, length: int, label_tokens: int) -> None:
        """Count a document that is kept."""
        self.rows_kept += 1
        self.tokens += length
        self.label_tokens += label_tokens
        self.histogram[int(np.searchsorted(BUCKETS, length))] += 1

    def note(self, notes: Iterable[str]) -> None:
        """Count notes about a row that is kept, such as what the chat template leaves out of it."""
        self.notes.update(notes)

    def to_dict(self) -> dict[str, Any]:
        """As stored in the cache, run.json and the --json output."""
        return {
            "rows_read": self.rows_read,
            "rows_kept": self.rows_kept,
            "dropped": dict(self.dropped),
            "examples": self.examples,
            "notes": dict(self.notes),
            "truncated": self.truncated,
            "split": self.split,
            "duplicates": self.duplicates,
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
            "length_histogram": dict(zip([*map(str, BUCKETS), "longer"], self.histogram, strict=True)),
            **({} if self.leaked is None else {"leaked": self.leaked}),
        }


def examples(ledgers: dict[str, dict[str, Any]]) -> list[str]:
    """One sentence per reason for dropping rows, with the first row it applies to."""
    return [
        f"{name}: {count:,} rows dropped ({reason}), first {one['examples'][reason]}"
        for name, one in ledgers.items()
        for reason, count in sorted(one["dropped"].items())
    ]


def notes(ledgers: dict[str, dict[str, Any]]) -> list[str]:
    """One line per note, with the number of rows it is about."""
    return [
        f"{name}: {text} ({count:,} {'row' if count == 1 else 'rows'})"
        for name, one in ledgers.items()
        for text, count in sorted(one.get("notes", {}).items())
    ]


def table(ledgers: dict[str, dict[str, Any]], layouts: dict[str, dict[str, Any]]) -> Table:
    """The ledgers and layouts of the training and evaluation rows, side by side."""
    result = Table(title="Data", title_justify="left")
    result.add_column("")
    for name in ledgers:
        result.add_column(name, justify="right")

    def line(label: str, values: list[str]) -> None:
        result.add_row(label, *values)

    each = list(ledgers.values())
    line("rows read", [f"{one['rows_read']:,}" for one in each])
    line("rows dropped", [f"{sum(one['dropped'].values()):,}" for one in each])
    for reason in sorted({reason for one in each for reason in one["dropped"]}):
        line(f"  {reason}", [f"{one['dropped'].get(reason, 0):,}" for one in each])
    line("documents kept", [f"{one['rows_kept']:,}" for one in each])
    line("  rows truncated", [f"{one['truncated']:,}" for one in each])
    if any(one["split"] for one in each):
        line("  rows split into pieces", [f"{one['split']:,}" for one in each])
    line("  exact duplicates", [f"{one['duplicates']:,}" for one in each])
    if any(one.get("leaked") for one in each):
        line("  also training rows", [f"{one['leaked']['rows']:,}" if one.get("leaked") else "" for one in each])
    line("tokens", [f"{one['tokens']:,}" for one in each])
    shares = [one["label_tokens"] / max(one["tokens"], 1) for one in each]
    line("  supervised", [f"{one['label_tokens']:,} ({share:.0%})" for one, share in zip(each, shares, strict=True)])
    line("mean length (tokens)", [f"{one['tokens'] / max(one['rows_kept'], 1):,.1f}" for one in each])
    packed = [layouts[name] for name in ledgers]
    if any(one["pack_length"] for one in packed):
        line("packs", [f"{one['rows']:,}" for one in packed])
        line("  documents per pack", [f"{one['documents_per_row']:.1f}" for one in packed])
        line("  packing efficiency", [f"{one['packing_efficiency']:.1%}" for one in packed])
    return result
