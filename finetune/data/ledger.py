"""Counts of what happened to the rows: read, kept, dropped (and why), truncated, split, duplicated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
from rich.table import Table

from finetune.errors import listed
from finetune.runtime.types import JsonObject
from finetune.text import counted

BUCKETS = tuple(2**power for power in range(5, 16))  # upper bounds of the length histogram, tokens


@dataclass
class SourceCounts:
    """Counts for one source of a split."""

    formats: list[str] = field(default_factory=list)  # as its files were read
    unread: list[str] = field(default_factory=list)  # columns with values that no format reads
    rows_read: int = 0
    rows_kept: int = 0
    rows_dropped: int = 0
    tokens: int = 0
    supervised_tokens: int = 0


@dataclass
class Ledger:
    """Counts for one split. A row that is cut into pieces counts once as read and once per piece as kept."""

    rows_read: int = 0
    rows_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    examples: dict[str, str] = field(default_factory=dict)  # by reason: place and details of the first row
    notes: Counter[str] = field(default_factory=Counter)  # kept rows that each note is about
    truncated: int = 0
    split: int = 0
    duplicates: int = 0
    templated: int = 0  # kept rows that are in the chat template
    tokens: int = 0
    supervised_tokens: int = 0
    sources: dict[str, SourceCounts] = field(default_factory=dict)  # by name, in the order in which they are read
    leaked: JsonObject | None = None  # evaluation rows that are training rows too: how many, where the first is
    largest: JsonObject = field(default_factory=lambda: {"id": -1, "where": None})  # token id or label, and its row
    histogram: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def source(self, name: str) -> SourceCounts:
        """The counts of a source, zero at first."""
        return self.sources.setdefault(name, SourceCounts())

    def read(self, source: str, format: str, count: int) -> None:
        """Count a row that is read, `count` times."""
        for counts in (self, self.source(source)):
            counts.rows_read += count
        if format not in self.source(source).formats:
            self.source(source).formats.append(format)

    def drop(self, source: str, reason: str, where: str, detail: str, count: int = 1) -> None:
        """Count a dropped row; the first row of each reason is kept as an example."""
        self.dropped[reason] += count
        self.source(source).rows_dropped += count
        printable = detail.encode(errors="backslashreplace").decode()  # a row may have half of a character
        self.examples.setdefault(reason, f"{where}: {printable}")

    def keep(self, source: str, length: int, supervised_tokens: int, *, templated: bool = True) -> None:
        """Count a document that is kept."""
        self.templated += templated
        for counts in (self, self.source(source)):
            counts.rows_kept += 1
            counts.tokens += length
            counts.supervised_tokens += supervised_tokens
        self.histogram[int(np.searchsorted(BUCKETS, length))] += 1

    def ids(self, largest: int, where: str) -> None:
        """Note the largest token id or label of a document."""
        if largest > self.largest["id"]:
            self.largest = {"id": largest, "where": where}

    def formats(self) -> list[str]:
        """The formats that were read, each with its evidence."""
        return list(dict.fromkeys(format for counts in self.sources.values() for format in counts.formats))

    def to_dict(self) -> JsonObject:
        """As stored in the cache, run.json and the --json output."""
        found = {**vars(self), "dropped": dict(self.dropped), "notes": dict(self.notes)}
        found["sources"] = [{"name": name, **asdict(counts)} for name, counts in self.sources.items()]
        names = [*map(str, BUCKETS), "longer"]
        found["length_histogram"] = dict(zip(names, found.pop("histogram"), strict=True))
        if self.leaked is None:
            del found["leaked"]
        return found


def examples(ledgers: dict[str, JsonObject], remedies: Mapping[str, str]) -> list[str]:
    """One sentence per reason for dropping rows, with the first row it applies to, and what to do about it."""
    return [
        f"{name}: {counted(count, 'row')} dropped ({reason}), first {one['examples'][reason]}"
        + (f"; {remedies[reason]}" if reason in remedies else "")
        for name, one in ledgers.items()
        for reason, count in sorted(one["dropped"].items())
    ]


def is_templated(record: Mapping[str, object]) -> bool | None:
    """Whether any training row of a run was in the chat template, from its run.json; None if it does not say."""
    ledger = record.get("ledger")
    train = ledger.get("train") if isinstance(ledger, dict) else None
    count = train.get("templated") if isinstance(train, dict) else None
    return count > 0 if type(count) is int else None


def notes(ledgers: dict[str, JsonObject]) -> list[str]:
    """The columns that are not read, and one line per note, with the number of rows it is about."""
    unread: dict[str, list[str]] = {}  # columns, as text -> the sources that have them
    for name, one in ledgers.items():
        for source in one.get("sources", ()):
            if columns := listed(map(repr, dict.fromkeys(source.get("unread", ())))):
                unread.setdefault(columns, []).append(name if len(one["sources"]) == 1 else f"{name}, {source['name']}")
    return [f"{'; '.join(where)}: columns that are not read: {columns}" for columns, where in unread.items()] + [
        f"{name}: {text} ({count:,} {'row' if count == 1 else 'rows'})"
        for name, one in ledgers.items()
        for text, count in sorted(one.get("notes", {}).items())
    ]


def rows(ledgers: dict[str, JsonObject], layouts: dict[str, JsonObject]) -> list[list[str]]:
    """A line per figure of the ledgers and layouts of the training and evaluation rows, side by side."""
    found: list[list[str]] = []

    def line(label: str, values: list[str]) -> None:
        found.append([label, *values])

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
    shares = [one["supervised_tokens"] / max(one["tokens"], 1) for one in each]
    line("  supervised", [f"{one['supervised_tokens']:,} ({part:.0%})" for one, part in zip(each, shares, strict=True)])
    line("mean length (tokens)", [f"{one['tokens'] / max(one['rows_kept'], 1):,.1f}" for one in each])
    packed = [layouts[name] for name in ledgers]
    if any(one["pack_length"] for one in packed):
        line("packs", [f"{one['rows']:,}" for one in packed])
        line("  documents per pack", [f"{one['documents_per_row']:.1f}" for one in packed])
        line("  packing efficiency", [f"{one['packing_efficiency']:.1%}" for one in packed])
    return found


def table(ledgers: dict[str, JsonObject], layouts: dict[str, JsonObject]) -> Table:
    """`rows` for the terminal."""
    result = Table(title="Data", title_justify="left")
    result.add_column("")
    for name in ledgers:
        result.add_column(name, justify="right")
    for one in rows(ledgers, layouts):
        result.add_row(*one)
    return result


def sources_table(ledgers: dict[str, JsonObject]) -> Table | None:
    """One row per source of each split; None if no split has several."""
    if all(len(one["sources"]) < 2 for one in ledgers.values()):
        return None
    result = Table(title="Sources", title_justify="left")
    for name in ("split", "source", "format"):
        result.add_column(name, overflow="fold")
    for name in ("kept", "dropped", "tokens", "share", "supervised"):
        result.add_column(name, justify="right", no_wrap=True)
    for split, one in ledgers.items():
        short = [row["name"].rpartition("/")[2] for row in one["sources"]]  # without the folder, if that is enough
        names = short if len(set(short)) == len(short) else [row["name"] for row in one["sources"]]
        for name, row in zip(names, one["sources"], strict=True):
            formats = ", ".join(dict.fromkeys(format.partition(" ")[0] for format in row["formats"]))
            counts = [f"{row[name]:,}" for name in ("rows_kept", "rows_dropped", "tokens")]
            share = f"{row['tokens'] / max(one['tokens'], 1):.0%}"
            result.add_row(split, name, formats, *counts, share, f"{row['supervised_tokens']:,}")
    return result
