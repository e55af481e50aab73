"""`finetune bench comm`: what it measures and prints, and the message sizes of the user's own job."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rich.table import Table

from finetune.bench import comm
from finetune.bench.launch import default_world_sizes
from finetune.errors import RunError, UserError
from finetune.measure import measurements
from finetune.measure.predict import BUCKET_BYTES
from finetune.measure.protocol import intervals_disjoint
from finetune.runtime.command import console, print_line
from finetune.runtime.machine.hardware import Hardware, survey, topology_line
from finetune.runtime.machine.nccl import explain_settings, recommend_settings
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject
from finetune.text import counted, duration


def run(options: argparse.Namespace, rest: list[str]) -> Iterator[JsonObject]:
    """Measure everything requested. Yields the content of `--json`: one run, or {"kind": "comm", "runs": [...]}."""
    if distributed.ranks().world_size > 1:
        yield across_machines(options, rest)
        return
    sent = job_buckets(rest) if rest else []
    machine = survey()
    world_sizes = options.world_sizes or default_world_sizes(machine.count)
    for world in world_sizes:  # all are checked before the first starts
        comm.check_world(world, machine)
    print_line(topology_line(machine))
    print_line(explain_settings(machine, recommend_settings(machine)))
    if sent:
        total = sum(sent)
        console().print(f"gradients of a step: {total:,} bytes in {counted(len(sent), 'bucket')}", highlight=False)
    if options.settings:
        tried = comm.variants(machine)
    else:
        tried = (
            comm.Variant(name="as advised", environment={one.name: one.value for one in recommend_settings(machine)}),
        )
    runs, failed = [], []
    for world in world_sizes:
        for place, variant in enumerate(tried):
            try:
                runs.append(measure(options, world, variant, sent, machine))
                show(runs[-1])
            except RunError as error:
                if place == 0:
                    raise
                # NCCL rejects settings that the topology does not support; measure the others anyway.
                failed.append({"world_size": world, "variant": variant.name, "error": str(error)})
                console().print(f"{variant.name} failed: {error}", style="red", highlight=False, markup=False)
            yield runs[0] if len(runs) == 1 and not failed else {"kind": "comm", "runs": runs, "failed": failed}
        if options.settings:
            compare([found for found in runs if found["world_size"] == world])


def across_machines(options: argparse.Namespace, rest: list[str]) -> JsonObject:
    """Measure the ranks that a launcher has started, and keep the result on each of their machines.

    Raises:
        UserError: the options ask for ranks that this command starts itself, or all ranks are on one machine.
    """
    me = distributed.ranks()
    given = [name for name in ("world_sizes", "settings") if getattr(options, name)] + ["configuration"] * bool(rest)
    if given or not me.on_several_machines:
        what = f"--{given[0].replace('_', '-')}" if given else "a launcher on one machine"
        raise UserError(
            f"`bench comm` was started by a launcher, and got {what}. Under a launcher it measures the ranks of "
            "several machines, with --sizes, --runs, --steps and --json alone; start it without one for the rest."
        )
    found = comm.measure_here(options.sizes, options.runs, options.steps)
    if me.is_local_main and options.sizes is None:
        measurements.save_comm(found, found["hardware"]["name"])
    found |= {"variant": counted(found["machines"], "machine"), "gradient_buckets": []}
    show(found)
    return found


def measure(
    options: argparse.Namespace, world: int, variant: comm.Variant, sent: list[int], machine: Hardware
) -> JsonObject:
    """Measure one world size with one set of variables."""
    found = comm.measure(
        world,
        sorted({*(options.sizes or comm.default_sizes(machine)), *sent}),
        options.runs,
        options.steps,
        variant.environment,
        collectives=variant.collectives,
        machine=machine,
    )
    if options.sizes is None:  # a complete curve, which predictions for this machine use
        measurements.save_comm(found, machine.name)
    return found | {"variant": variant.name, "gradient_buckets": sent}


def job_buckets(arguments: list[str]) -> list[int]:
    """Bytes of each gradient bucket of a configuration's model, without loading its weights.

    Raises:
        UserError: the configuration is invalid, or the model is not found.
    """
    from finetune.config import load

    config = load(arguments, command="bench")
    if config.demo:
        raise UserError(
            "the configuration names no model whose gradients could be measured: model.model_name_or_path is not set. "
            "Set it, or remove the configuration."
        )
    from finetune.bench.gradients import trainable_bytes
    from finetune.measure.predict import buckets

    return buckets(trainable_bytes(config))


def show(found: JsonObject) -> None:
    """Print one run as a table: a row per size with latency and bus bandwidth of each collective."""
    ranks = counted(found["world_size"], "rank")
    title = f"{ranks}, {found['backend']}, {found['variant']}: median time, bus bandwidth in GB/s"
    # Six columns of figures in 80 characters.
    table = Table(title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column("bytes", justify="right")
    for name in found["collectives"]:
        table.add_column(name.replace("_", "-"), justify="right")
    unit = 4 * found["world_size"]  # sizes are rounded up to the same number of elements on every rank
    sent = {-(-size // unit) * unit for size in found["gradient_buckets"]}
    for rows in zip(*found["collectives"].values(), strict=True):
        cells = [f"{duration(row['seconds']['median'])}\n{row['busbw_gb_s']:.2f}" for row in rows]
        mark = " *" if rows[0]["bytes"] in sent else ""
        table.add_row(f"{rows[0]['bytes']:,}{mark}", *cells)
    console().print(table)
    if found["gradient_buckets"]:
        console().print("* a gradient bucket of this job", highlight=False)
    for warning in found["conditions"]["warnings"]:
        print_line(f"warning: {warning}", style="yellow")


def compare(runs: list[JsonObject]) -> None:
    """Print all-reduce of every variant relative to the first, at the smallest size, DDP's bucket size and the largest.

    A factor is shown only if the 95% intervals do not overlap: small sizes measure the host, and vary.
    """
    first = runs[0]["collectives"]["all_reduce"]
    bucket = min(range(len(first)), key=lambda place: abs(first[place]["bytes"] - BUCKET_BYTES))
    places = sorted({0, bucket, len(first) - 1})
    title = f"{counted(runs[0]['world_size'], 'rank')}, all-reduce by setting (=: 95% intervals overlap)"
    table = Table(title=title, title_justify="left")
    table.add_column("setting")
    for place in places:
        table.add_column(f"{first[place]['bytes']:,} bytes", justify="right")
    for found in runs:
        rows = found["collectives"]["all_reduce"]
        pairs = [(first[place], rows[place]) for place in places]
        cells = [f"{duration(row['seconds']['median'])} ({factor(base, row)})" for base, row in pairs]
        table.add_row(found["variant"], *cells)
    console().print(table)


def factor(base: JsonObject, row: JsonObject) -> str:
    """Speed relative to `base`; "=" if the difference is within the intervals."""
    one, other = base["seconds"], row["seconds"]
    if not intervals_disjoint(one["ci95"], other["ci95"]):
        return "="
    return f"{one['median'] / other['median']:.2f} x"
