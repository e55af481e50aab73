"""`finetune bench compute`: peak compute and copy rates of this machine, as a reference for a run's own figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rich.table import Table

from finetune.bench import comm, conditions, launch
from finetune.measure.protocol import WARM_UP
from finetune.runtime.command import console, print_line
from finetune.runtime.machine.hardware import survey, topology_line
from finetune.runtime.types import JsonObject
from finetune.text import counted


def run(options: argparse.Namespace, rest: list[str]) -> Iterator[JsonObject]:
    """Measure one device, or several at once with --world-sizes. Yields the content of `--json`."""
    machine = survey()
    world_sizes = options.world_sizes or [1]
    for world in world_sizes:
        comm.check_world(world, machine)
    print_line(topology_line(machine))
    request = {"runs": options.runs, "steps": options.steps, "warm_up": WARM_UP}
    runs = []
    for world in world_sizes:
        found = launch.ranks(
            "finetune.bench.compute_rank", world, request, title=f"compute and copy rates of {counted(world, 'device')}"
        )
        before, after = found.pop("states")
        kept = {"kind": "compute", "world_size": world, "hardware": machine.to_dict()}
        runs.append(kept | {"conditions": conditions.describe(before, after, machine)} | found)
        show(runs[-1])
        yield runs[0] if len(runs) == 1 else {"kind": "compute", "runs": runs}


def show(found: JsonObject) -> None:
    """Print a row per case and a column per rank."""
    table = Table(title="median per device", title_justify="left")
    table.add_column("")
    for rank in range(found["world_size"]):
        table.add_column(f"rank {rank}", justify="right")
    for case in found["cases"]:
        table.add_row(case["name"], *(f"{rate:,.2f} {case['unit']}" for rate in case["rates"]))
    console().print(table)
    for warning in found["conditions"]["warnings"]:
        print_line(f"warning: {warning}", style="yellow")
