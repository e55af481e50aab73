"""What `advise` predicts of rows that other numbers of GPUs share than the configuration says: for jobs whose rows do
not fit, that have fewer rows in a step than there are GPUs, or that share rows already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from finetune.advise import launch, prediction
from finetune.advise.candidates import PER_DEVICE, DryRunner, DryRunResult
from finetune.advise.machine import devices_here
from finetune.advise.verdict import LEAST_GAIN
from finetune.config import Config
from finetune.config.batch import fewest_ranks
from finetune.errors import UserError
from finetune.measure import strategy
from finetune.measure.activations import RANKS
from finetune.measure.measurements import Measurement
from finetune.measure.predict import Prediction
from finetune.measure.rules import MEMORY_MARGIN
from finetune.runtime.command import print_line
from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.types import JsonObject

SHARED = "--training.context_parallel"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """All GPUs here (as far as the global batch allows), of which so many share each row; or the reason why not."""

    ranks: int
    world_size: int
    reason: str | None = None
    prediction: Prediction | None = None
    source: str | None = None  # of the time of exchanges
    line: str | None = None  # that launches it

    def to_dict(self) -> JsonObject:
        """For the report."""
        found: JsonObject = {"context_parallel": self.ranks, "world_size": self.world_size, "reason": self.reason}
        if (one := self.prediction) is None:
            return found
        found |= {"tokens_per_second": one.tokens_per_second, "peak_memory_gib": one.peak_memory_bytes / 2**30}
        return found | {"exposed_fraction": one.exposed_fraction, "source": self.source, "launch": self.line}


def find(config: Config, bench: DryRunner, machine: Hardware) -> list[Candidate]:
    """Each other number of GPUs that may share a row than the job has, measured as one of them; nothing if there is
    none, or for a script."""
    here, now = devices_here(machine), config.training.context_parallel
    if machine.device != "cuda" or bench.script:
        return []
    return [
        _measure(config, bench, machine, ranks, here) for ranks in (1, *RANKS) if here % ranks == 0 and ranks != now
    ]


def _measure(config: Config, bench: DryRunner, machine: Hardware, ranks: int, here: int) -> Candidate:
    settings = [SHARED, str(ranks), PER_DEVICE, "1"]
    sharded = config.training.strategy == "shard"
    kept = [] if sharded else ["--training.gradient_checkpointing", "auto"]  # slices do not decide it
    training = replace(config.training, context_parallel=ranks, per_device_train_batch_size=1)
    other = replace(config, training=training)
    world = max(strategy.largest_world(other, here), fewest_ranks(training))
    result = bench.try_out([*settings, *kept])
    if result.measured is None:
        return Candidate(ranks=ranks, world_size=world, reason=result.reason)
    try:
        predicted, source = _predict(other, result.measured, world, machine)
    except UserError as error:  # the global batch does not divide, or nothing was measured between GPUs
        return Candidate(ranks=ranks, world_size=world, reason=str(error))
    memory = result.measured.memory_bytes
    if memory is not None and predicted.peak_memory_bytes > MEMORY_MARGIN * memory:
        reason = f"above the margin of {MEMORY_MARGIN}"
        return Candidate(ranks=ranks, world_size=world, reason=reason, prediction=predicted, source=source)
    arguments = [*bench.arguments, *settings, *([] if sharded else _mode(result))]
    line = launch.plan(world, machine, arguments, None).line
    return Candidate(ranks=ranks, world_size=world, prediction=predicted, source=source, line=line)


def _mode(result: DryRunResult) -> list[str]:
    """How activations were kept, which the dry run chose."""
    config: Mapping[str, Any] = result.config or {"training": {"gradient_checkpointing": True}, "model": {}}
    kind, tiled = config["training"]["gradient_checkpointing"], config["model"].get("tiled_mlp", False)
    flags = ["--training.gradient_checkpointing", str(kind).lower()]
    return [*flags, "--model.tiled_mlp", "true"] if tiled else flags


def _predict(config: Config, measured: Measurement, world: int, machine: Hardware) -> tuple[Prediction, str]:
    """The run on so many GPUs, and what the time of exchanges is from.

    Raises:
        UserError: the global batch does not divide, or the collectives could not be measured.
    """
    work = measured.work(world)
    between = prediction.collectives([world], measured, machine)
    reduced, why = between.all_reduce.get(world, (None, ""))
    if world > 1 and reduced is None:
        raise UserError(why)
    if measured.shared_by > 1 and between.all_to_all is None:
        raise UserError(between.source)
    work = replace(work, start_up_seconds=work.start_up_seconds + between.connecting)
    return prediction.predictor(config, [measured], between.all_to_all)(work, world, reduced), between.source


def show(found: Sequence[Candidate], config: Config, given: Prediction | None = None) -> None:
    """Print the candidates, and the launch line of the fastest that fits, if it is faster than the job as given.

    Args:
        given: of the job, if it fits.
    """
    if not found:
        return
    shown = Table(title="Rows that several GPUs share, predicted from one of them", title_justify="left")
    for name in ("training.context_parallel", "devices", "tokens/s", "GiB/rank", "exposed"):
        shown.add_column(name, justify="right")
    for one in found:
        cells = ["-"] * 3
        if (expected := one.prediction) is not None:
            gib = f"{expected.peak_memory_bytes / 2**30:.2f}{'' if one.line else ' (does not fit)'}"
            cells = [f"{expected.tokens_per_second:,.0f}", gib, f"{expected.exposed_fraction:.1%}"]
        shown.add_row(str(one.ranks), str(one.world_size), *cells)
    print_line(shown)
    for one in found:
        if one.reason is not None:
            print_line(f"training.context_parallel: {one.ranks}: {one.reason}")
    best, now = fastest(found), config.training.context_parallel
    speed = 0.0 if best is None or best.prediction is None else best.prediction.tokens_per_second
    if given is not None and now > 1 and speed < LEAST_GAIN * given.tokens_per_second:
        print_line(f"None of these is faster than training.context_parallel: {now}.")
    elif best is not None:
        print_line(f"The same result with training.context_parallel: {best.ranks} on {best.world_size} GPUs:")
        print_line(f"  {best.line}")


def fastest(found: Sequence[Candidate]) -> Candidate | None:
    """The fastest candidate that fits."""
    fitting = [one for one in found if one.line is not None]
    return max(fitting, key=lambda one: one.prediction.tokens_per_second if one.prediction else 0.0, default=None)
