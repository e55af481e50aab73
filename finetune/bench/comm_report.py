"""`finetune bench comm`: what it measures and prints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rich.table import Table

from finetune.bench import comm
from finetune.bench.launch import default_world_sizes
from finetune.errors import UserError
from finetune.measure import measurements
from finetune.runtime.command import console, print_line
from finetune.runtime.machine.hardware import survey, topology_line
from finetune.runtime.machine.nccl import recommend_settings
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject
from finetune.text import counted, duration


def run(options: argparse.Namespace) -> Iterator[JsonObject]:
    """Measure everything requested. Yields the content of `--json`: one run, or {"kind": "comm", "runs": [...]}."""
    if distributed.ranks().world_size > 1:
        yield across_machines(options)
        return
    machine = survey()
    world_sizes = options.world_sizes or default_world_sizes(machine.count)
    for world in world_sizes:  # all are checked before the first starts
        comm.check_world(world, machine)
    print_line(topology_line(machine))
    for gpu in machine.gpus or ():
        if gpu.other_processes:
            print_line(f"warning: GPU {gpu.index} is shared with other processes", style="yellow")
    advised = recommend_settings(machine)
    for one in advised:
        print_line(f"{one.name}={one.value}: {one.reason}")
    environment = {one.name: one.value for one in advised}
    runs: list[JsonObject] = []
    for world in world_sizes:
        runs.append(comm.measure(world, options.sizes, options.runs, options.steps, environment, machine=machine))
        if options.sizes is None:  # a complete curve, which predictions for this machine use
            measurements.save_comm(runs[-1], machine.name)
        show(runs[-1])
        yield runs[0] if len(runs) == 1 else {"kind": "comm", "runs": runs}


def across_machines(options: argparse.Namespace) -> JsonObject:
    """Measure the ranks that a launcher has started, and keep the result on each of their machines.

    Raises:
        UserError: the options ask for ranks that this command starts itself, or all ranks are on one machine.
    """
    me = distributed.ranks()
    if options.world_sizes or not me.on_several_machines:
        what = "--world-sizes" if options.world_sizes else "a launcher on one machine"
        raise UserError(
            f"`bench comm` was started by a launcher, and got {what}. Under a launcher it measures the ranks of "
            "several machines, with --sizes, --runs, --steps and --json alone; start it without one for the rest."
        )
    found = comm.measure_here(options.sizes, options.runs, options.steps)
    if me.is_local_main and options.sizes is None:
        measurements.save_comm(found, found["hardware"]["name"])
    show(found)
    return found


def show(found: JsonObject) -> None:
    """Print one run as a table: a row per size with latency and bus bandwidth of each collective."""
    ranks = counted(found["world_size"], "rank")
    where = f" on {counted(found['machines'], 'machine')}" if "machines" in found else ""
    title = f"{ranks}{where}, {found['backend']}: median time, bus bandwidth in GB/s"
    # Six columns of figures in 80 characters.
    table = Table(title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column("bytes", justify="right")
    for name in found["collectives"]:
        table.add_column(name.replace("_", "-"), justify="right")
    for rows in zip(*found["collectives"].values(), strict=True):
        cells = [f"{duration(row['seconds']['median'])}\n{row['busbw_gb_s']:.2f}" for row in rows]
        table.add_row(f"{rows[0]['bytes']:,}", *cells)
    console().print(table)
