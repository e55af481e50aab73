"""The record as a Markdown table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.quality.cells import CELLS

WITHIN = 0.3  # percent above TRL's loss: as good
HEAD = (
    *("cell", "seeds", "held-out loss", "sd", "to TRL", "exact match", "training, s", "shell to end, s"),
    *("time to quality, s", "tokens/step", "steps", "micro-batch"),
)


def read(file: Path) -> list[dict[str, Any]]:
    """The last line of each cell and seed, in order; one that ended well before one that failed."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in file.read_text().splitlines() if file.is_file() else []:
        one = json.loads(line)
        key = one["cell"], one["seed"]
        if "error" not in one or key not in found:
            found[key] = one
    return list(found.values())


def table(lines: list[dict[str, Any]]) -> str:
    """One row per cell: means over the seeds, medians of times. Times are of runs that had the machine to themselves.

    The difference is to TRL on padded rows in the same mode; (!) marks one of more than 0.3 %. Time to quality is the
    median time from the shell to the end, if the mean loss is at most 0.3 % above TRL's.
    """
    cells = {name: [one for one in lines if one["cell"] == name] for name in CELLS}
    losses = {name: [one["loss"] for one in runs if "error" not in one] for name, runs in cells.items()}
    rows = [HEAD, tuple("---" for _ in HEAD)]
    for name, runs in cells.items():
        good = [one for one in runs if "error" not in one]
        if not good:
            continue
        loss, reference = losses[name], losses.get(CELLS[name].reference)
        compared = CELLS[name].stack and reference
        off = 100 * (statistics.fmean(loss) / statistics.fmean(reference) - 1) if compared and reference else None
        alone = [one for one in good if one["alone"]]
        end = middle(alone, "seconds", "{:.0f}")
        rows.append(
            (
                name,
                str(len(good)) + (f" ({len(runs) - len(good)} failed)" if len(good) < len(runs) else ""),
                f"{statistics.fmean(loss):.4f}",
                f"{statistics.stdev(loss):.4f}" if len(loss) > 1 else "",
                "" if off is None else f"{off:+.2f} %" + (" (!)" if off > WITHIN else ""),
                middle(good, "exact", "{:.1%}", statistics.fmean),
                middle(alone, "train_seconds", "{:.1f}"),
                end,
                end if off is not None and off <= WITHIN else "",
                middle(good, "tokens_per_step", "{:,.0f}"),
                middle(good, "steps", "{:.0f}"),
                middle(good, "micro", "{:.0f}"),
            )
        )
    failed = [f"\n{one['cell']}, seed {one['seed']}: {one['error'][-1]}" for one in lines if "error" in one]
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + failed)


def middle(
    runs: list[dict[str, Any]], key: str, form: str, of: Callable[[list[float]], float] = statistics.median
) -> str:
    """A figure of several runs; empty if none has it."""
    values = [one[key] for one in runs if one.get(key) is not None]
    return form.format(of(values)) if values else ""
