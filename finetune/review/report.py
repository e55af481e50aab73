"""A review as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from finetune.review import assemble
from finetune.review.assemble import Review, Reviewed
from finetune.review.finding import clock, number, percent
from finetune.review.labels import label
from finetune.runtime import tags
from finetune.text import duration

if TYPE_CHECKING:
    from rich.console import Console

NOT_RECORDED = "not recorded"
NOT_FINITE = "not finite"
NO_EVALUATION = "no evaluation"
STYLES = {"warning": "bold yellow", "note": "bold", "good": "bold green", "unknown": "bold dim"}  # of a verdict
SIDE_BY_SIDE = 6  # runs; of more, each is a line, and settings are compared by --json alone
WIDEST, WIDEST_VALUE = 36, 16  # characters: of the first column, and of the others' words, that are not broken
PARTS = {
    "step_seconds": "step time",
    "peak_memory_gib": "peak memory",
    "tokens_per_second_per_gpu": "tokens/s per device",
}
SHOWN = (  # metrics of the table, in its order
    *("loss", "eval_loss", "eval_token_accuracy", "gradient_norm", "clipped"),
    *("weights_unchanged", "expert_load_max", "experts_unused", "tokens_per_gpu", "tokens_total"),
    *("rows_per_second", "mfu", "step_seconds", "padding", *tags.PHASES, "lost_to_slowest", "peak_of_rank"),
    *("fullest", "allocator_retries", "gpu_utilization", "tokens_seen", "hours"),
)
SUMMARY = ("loss", "eval_loss", "tokens_per_gpu", "mfu", "step_seconds", "padding", "peak_of_rank")


def show(review: Review, console: Console) -> None:
    """Print the review: verdicts, findings by time lost, metrics side by side, comparison, predictions."""
    for one in review.runs:
        _print(console, f"{one.name} ({one.run.status})", "bold")
        for half in one.verdict:
            _print(console, str(half), STYLES[half.level], f"Confidence: {half.confidence}.")
        for problem in one.run.problems:
            _print(console, f"  {problem}", "yellow")
    for one in review.runs:
        _show_findings(one, console)
    names = [one.name for one in review.runs]
    if len(names) <= SIDE_BY_SIDE:
        _table(console, "Metrics", ["", *names], metric_rows(review.runs))
    else:
        each = [(one.name, assemble.metrics(one.run)) for one in review.runs]
        rows = [[name, *(value_with_unit(n, of[n]) if n in of else "-" for n in SUMMARY)] for name, of in each]
        _table(console, "Metrics", ["", *map(label, SUMMARY)], rows)
    compared = assemble.comparison(review.runs)
    if compared:
        rows = [
            [row["run"], row["against"], str(row["world_size"]), f"{row['speed_up']:.2f}", percent(row["efficiency"])]
            for row in compared["scaling"]
        ]
        _table(console, "Speed-up", ["run", "against", "devices", "speed-up", "efficiency"], rows)
    if compared and len(names) <= SIDE_BY_SIDE:
        rows = [
            [row["key"], *(NOT_RECORDED if one is None else str(one) for one in row["values"])]
            for row in compared["configuration"]
        ]
        _table(console, "Settings that differ", ["", *names], rows)
        rows = [
            [f"{row['tokens']:,.0f}", *(_cell(loss, number) for loss in row["loss"])]  # of several models some in each
            for row in compared["at_equal_tokens"]
        ]
        _table(console, "Training loss at equal tokens", ["tokens", *names], rows)
    rows = [row for one in review.runs for row in predicted_rows(one, named=len(review.runs) > 1)]
    _table(console, "Predicted and measured", ["", "predicted", "measured", "error"], rows)


def _print(console: Console, line: str, style: str, more: str = "") -> None:
    from rich.text import Text

    console.print(Text.assemble((line, style), " " if more else "", more), soft_wrap=True)


def _show_findings(one: Reviewed, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    if not one.findings:
        return
    table = Table(title=Text(f"Findings: {one.name}"), title_justify="left", show_lines=True)
    table.add_column("rule", no_wrap=True)
    table.add_column("time lost", justify="right", no_wrap=True)
    table.add_column("evidence, what to change, what that should bring", overflow="fold")
    for found in one.findings:
        style = "yellow" if found.level == "warning" else "dim"
        about = Text(f"{found.evidence}\n").append("Change: ", "bold").append(f"{found.advice}\n")
        about.append("Gain: ", "bold").append(found.gain)
        lost = percent(min(found.lost, 1.0)) if found.lost > 0 else "-"
        table.add_row(Text(found.rule, style), lost, about)
    console.print(table)


def _table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; where its columns do not fit side by side, several, each with the first column."""
    if not rows:
        return
    cells = [*zip(columns, *rows, strict=True)]
    words = [max((len(word) for cell in column for word in cell.split()), default=1) for column in cells[1:]]
    least = [min(max(map(len, cells[0])), WIDEST), *(min(word, WIDEST_VALUE) for word in words)]
    parts = [[0]]
    for place in range(1, len(cells)):
        if len(parts[-1]) > 1 and sum(least[one] + 3 for one in (*parts[-1], place)) >= console.width:
            parts.append([0])
        parts[-1].append(place)
    for part in parts:
        _print_columns(console, title, [cells[one] for one in part], [least[one] for one in part])


def _print_columns(console: Console, title: str, columns: Sequence[Sequence[str]], least: Sequence[int]) -> None:
    from rich.table import Table
    from rich.text import Text

    left = console.width - 1 - sum(width + 3 for width in least)  # for cells of several words
    table = Table(title=Text(title), title_justify="left")
    for place, (column, width) in enumerate(zip(columns, least, strict=True)):
        more = max(min(max(map(len, column)) - width, left), 0)
        left -= more
        table.add_column(Text(column[0]), justify="right" if place else "left", overflow="fold", width=width + more)
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*map(Text, row))
    console.print(table)


# --- rows of tables -----------------------------------------------------------------------------------------------


def metric_rows(reviewed: Sequence[Reviewed]) -> list[list[str]]:
    """A line per metric that one of the runs has, and one for the evaluation: its name, and a value or what is missing
    per run."""
    values = [assemble.metrics(one.run) for one in reviewed]
    rows = []
    for name in SHOWN:
        absent = NO_EVALUATION if name == "eval_loss" else NOT_RECORDED
        if name == "eval_loss" or any(name in one for one in values):
            cells = [value_with_unit(name, one[name]) if name in one else absent for one in values]
            what = label(name) + (", last tenth" if name == "loss" else "")  # of the logged steps, their median
            rows.append([what, *cells])
    return rows


def value_with_unit(name: str, value: float) -> str:
    """A metric's value as people read it: shares in percent, times in a fitting unit."""
    if not math.isfinite(value):
        return NOT_FINITE
    unit = tags.BY_NAME[name].unit
    written: dict[str, Callable[[float], str]] = {"0-1": percent, "s": duration, "1/s": number}
    written |= {"h": lambda hours: clock(3600 * hours)}
    return written.get(unit, lambda one: f"{number(one)} {unit}".strip())(value)


def predicted_rows(one: Reviewed, *, named: bool) -> list[list[str]]:
    """Predicted, measured and error."""
    rows, name = [], f"{one.name}: " if named else ""
    for row in assemble.predicted(one.run):
        error = _cell(row["error"], lambda share: f"{share:+.1%}".replace("%", " %"))
        rows.append([name + PARTS[row["what"]], number(row["predicted"]), number(row["measured"]), error])
    return rows


def _cell(value: float | None, write: Callable[[float], str]) -> str:
    return "-" if value is None else write(value)
