"""`finetune bench step`: where the time of a training step goes, on one rank and on several."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from finetune.bench import comm, conditions, launch, timeline
from finetune.bench.launch import choose_world_sizes
from finetune.config import Config, load, resolve_batch
from finetune.errors import UserError
from finetune.measure.protocol import MEASURED, RUNS, WARM_UP
from finetune.runtime.command import print_line
from finetune.runtime.machine.hardware import Hardware, survey, topology_line
from finetune.runtime.machine.nccl import recommend_settings
from finetune.runtime.types import JsonObject
from finetune.text import counted


def run(options: argparse.Namespace, rest: list[str]) -> Iterator[JsonObject]:
    """Measure every world size. Yields the content of `--json`: {"kind": "step", "runs": [...]}."""
    config = load(rest, command="bench")
    machine = survey()
    world_sizes = fitting_world_sizes(
        config, choose_world_sizes(options.world_sizes, machine.count), asked=bool(options.world_sizes)
    )
    for world in world_sizes:
        comm.check_world(world, machine)
    print_line(topology_line(machine))
    runs = []
    for world in world_sizes:
        runs.append(measure(rest, world, options.runs, options.steps, machine=machine))
        show(runs[-1])
        yield {"kind": "step", "config_file": config.config_file, "runs": runs}
    if options.out:
        timeline.write(options.out / "step.png", "Training step by rank", bars(runs))


def fitting_world_sizes(config: Config, world_sizes: Sequence[int], *, asked: bool) -> list[int]:
    """The world sizes that divide the global batch evenly.

    Raises:
        UserError: with `asked`, one does not; otherwise, none does.
    """
    kept = []
    for world in world_sizes:
        try:
            if not config.demo:
                resolve_batch(config.training, world, config.data)
            kept.append(world)
        except UserError as error:
            if asked:
                raise
            print_line(f"skipping {counted(world, 'rank')}: {error}")
    if not kept:
        raise UserError(f"no world size divides the global batch: {list(world_sizes)}. Set --world-sizes to see why.")
    return kept


def measure(
    arguments: Sequence[str],
    world_size: int,
    runs: int = RUNS,
    steps: int = MEASURED,
    environment: dict[str, str] | None = None,
    *,
    warm_up: int = WARM_UP,
    machine: Hardware | None = None,
) -> JsonObject:
    """Train a configuration on `world_size` ranks and time its steps.

    Args:
        arguments: the configuration, as arguments of `finetune train`.
        environment: environment variables of the ranks; None for those of `nccl.recommend_settings`.

    Returns:
        kind, world_size, hardware, environment, conditions, backend, batch, tokens_per_step, tokens_per_second_per_gpu,
        exposed_communication_fraction (of rank 0; None if DDP reported no sample), and for each rank under `ranks`:
        seconds of the step and of its phases data, forward, backward (including exposed communication), optimizer
        (including clipping) and other; exposed and hidden communication (None for one rank); peak_memory_gib.

    Raises:
        UserError, RunError: as in training, or because a rank died.
    """
    machine = machine or survey()
    if environment is None:
        environment = {one.name: one.value for one in recommend_settings(machine)} if world_size > 1 else {}
    request = {"arguments": list(arguments), "runs": runs, "steps": steps, "warm_up": warm_up}
    title = f"{runs} x {counted(steps, 'training step')} on {counted(world_size, 'rank')}"
    found = launch.ranks("finetune.bench.step_rank", world_size, request, title=title, environment=environment)
    states = [one.pop("states") for one in found["ranks"]]
    seconds = found["ranks"][0]["seconds"]
    step, exposed = seconds["step"]["median"], seconds["exposed"]
    return {
        "kind": "step",
        "world_size": world_size,
        "hardware": machine.to_dict(),
        "environment": comm.communication_environment(environment),
        "conditions": conditions.describe([one[0] for one in states], [one[-1] for one in states], machine),
        **found,
        "tokens_per_second_per_gpu": found["tokens_per_step"] / step / world_size,
        "exposed_communication_fraction": exposed["median"] / step if exposed else 0.0 if world_size == 1 else None,
    }


def bars(runs: Sequence[JsonObject]) -> list[timeline.Bar]:
    """A bar per rank of each world size, in milliseconds."""
    return [
        timeline.bar(f"rank {rank} of {run['world_size']}", one["seconds"])
        for run in runs
        for rank, one in enumerate(run["ranks"])
    ]


def show(run: JsonObject) -> None:
    """Print the timeline of a world size, and its rates."""
    timeline.show(bars([run]))
    share = run["exposed_communication_fraction"]
    peak = max(one["peak_memory_gib"] for one in run["ranks"])
    parts = [f"{run['tokens_per_second_per_gpu']:,.0f} tokens/s per device", f"peak memory {peak:.2f} GiB"]
    if share is not None and run["world_size"] > 1:
        parts.append(f"{share:.1%} of a step is exposed communication")
    print_line("; ".join(parts))
    for warning in run["conditions"]["warnings"]:
        print_line(f"warning: {warning}", style="yellow")
