"""Bars of the time per phase of a step, one per rank: as text, and as an image if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from finetune.runtime.command import console, print_line

WIDTH = 60  # characters of the longest bar
COLORS = {
    **{"data": "#8c564b", "forward": "#1f77b4", "backward": "#ff7f0e", "exposed communication": "#d62728"},
    **{"optimizer": "#2ca02c", "other": "#7f7f7f"},
}
LETTERS = {name: name[0] for name in COLORS} | {"exposed communication": "X", "other": "."}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The step of one rank."""

    label: str
    parts: Mapping[str, float]  # milliseconds by the names in COLORS, in their order
    hidden: float  # milliseconds of communication overlapped with the backward pass, not part of the step time


def bar(label: str, seconds: Mapping[str, Mapping[str, float] | None]) -> Bar:
    """From the medians of the phases (as in `bench step`); exposed communication is taken out of the backward pass."""

    def milliseconds(name: str) -> float:
        found = seconds.get(name)
        return 1e3 * found["median"] if found else 0.0

    exposed = min(milliseconds("exposed"), milliseconds("backward"))
    parts = {name: milliseconds(name) for name in COLORS} | {"exposed communication": exposed}
    return Bar(label=label, parts=parts | {"backward": parts["backward"] - exposed}, hidden=milliseconds("hidden"))


def show(bars: Sequence[Bar]) -> None:
    """Print a row of milliseconds per bar, with hidden communication last; then the bars, drawn with letters (d data,
    f forward, b backward, X exposed communication, o optimizer, . other), in color on a terminal."""
    legend = ", ".join(name if LETTERS[name] == name[0] else f"{LETTERS[name]} {name}" for name in COLORS)
    print_line(f"milliseconds per step (medians): {legend}")
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in (*LETTERS.values(), "sum", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in bars:  # a row per rank: eight columns would not fit side by side
        values = (*(one.parts[name] for name in COLORS), sum(one.parts.values()), one.hidden)
        table.add_row(one.label, *(f"{value:.2f}" for value in values))
    console().print(table)
    longest = max(sum(one.parts.values()) for one in bars)
    width = max(len(one.label) for one in bars)
    for one in bars:
        line = Text(f"{one.label:>{width}} ")
        for name, length in pieces(one, longest):
            line.append(LETTERS[name] * length, style=COLORS[name])
        print_line(line)


def pieces(one: Bar, longest: float) -> list[tuple[str, int]]:
    """Characters of each part, rounded such that they add up to the rounded total."""
    found, reached, drawn = [], 0.0, 0
    for name in COLORS:
        reached += one.parts[name]
        end = round(WIDTH * reached / longest) if longest else 0
        found.append((name, end - drawn))
        drawn = end
    return found


def write(path: Path, title: str, bars: Sequence[Bar]) -> bool:
    """Write the bars as a PNG. Returns False, and prints what to install, if matplotlib is missing."""
    figure = new_figure(len(bars))
    if figure is None:
        return False
    axes = figure.add_subplot()
    for place, one in enumerate(bars):
        left = 0.0
        for name, color in COLORS.items():
            label = name if place == 0 else None
            axes.barh(place, one.parts[name], left=left, color=color, label=label, height=0.6)
            left += one.parts[name]
        start = one.parts["data"] + one.parts["forward"]
        end = start + one.parts["backward"]
        axes.barh(  # ends where exposed communication begins
            *(place + 0.36, min(one.hidden, end - start)),
            **{"left": end - min(one.hidden, end - start), "color": "#d62728", "alpha": 0.35, "height": 0.12},
            label="hidden communication" if place == 0 else None,
        )
    axes.set_yticks(range(len(bars)), [one.label for one in bars])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds (medians)")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save(figure, path)
    return True


def new_figure(rows: int, wide: float = 9.0) -> Any:
    """An empty figure for `rows` bars, or None if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        console().print("no plot: matplotlib is not installed; pip install '.[plots]'", markup=False)
        return None
    from matplotlib.figure import Figure  # type: ignore[reportMissingImports]  # not pyplot, which needs a display

    return Figure(figsize=(wide, 2.0 + 0.4 * rows), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print_line(f"wrote {path}")
