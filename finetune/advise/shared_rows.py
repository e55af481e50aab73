"""What `advise` predicts of rows that several GPUs share: for jobs whose rows do not fit one, or that have fewer rows
in a step than there are GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from finetune.advise import candidates, launch
from finetune.advise.candidates import PER_DEVICE, DryRunner, DryRunResult
from finetune.advise.machine import devices_here
from finetune.config import Config
from finetune.errors import UserError
from finetune.measure import measurements, strategy
from finetune.measure.activations import RANKS
from finetune.measure.measurements import Measurement
from finetune.measure.predict import Prediction, buckets, predict
from finetune.measure.rules import MEMORY_MARGIN
from finetune.runtime.command import print_line
from finetune.runtime.machine import nccl
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
    """Each number of GPUs that may share a row, measured as one of them; nothing if there is none, or for a script."""
    here = devices_here(machine)
    if machine.device != "cuda" or bench.script:
        return []
    return [_measure(config, bench, machine, ranks, here) for ranks in RANKS if here % ranks == 0]


def _measure(config: Config, bench: DryRunner, machine: Hardware, ranks: int, here: int) -> Candidate:
    settings = [SHARED, str(ranks), PER_DEVICE, "1", "--training.gradient_checkpointing", "auto"]
    training = replace(config.training, context_parallel=ranks, per_device_train_batch_size=1)
    world = max(strategy.largest_world(replace(config, training=training), here), ranks)
    result = bench.try_out(settings)
    if result.measured is None:
        return Candidate(ranks=ranks, world_size=world, reason=result.reason)
    try:
        prediction, source = _predict(result.measured, world, ranks, machine)
    except UserError as error:  # the global batch does not divide, or nothing was measured between GPUs
        return Candidate(ranks=ranks, world_size=world, reason=str(error))
    memory = result.measured.memory_bytes
    if memory is not None and prediction.peak_memory_bytes > MEMORY_MARGIN * memory:
        reason = f"above the margin of {MEMORY_MARGIN}"
        return Candidate(ranks=ranks, world_size=world, reason=reason, prediction=prediction, source=source)
    arguments = [*bench.arguments, SHARED, str(ranks), PER_DEVICE, "1", *_mode(result)]
    line = launch.plan(world, machine, arguments, None).line
    return Candidate(ranks=ranks, world_size=world, prediction=prediction, source=source, line=line)


def _mode(result: DryRunResult) -> list[str]:
    """How activations were kept, which the dry run chose."""
    config: Mapping[str, Any] = result.config or {"training": {"gradient_checkpointing": True}, "model": {}}
    kind, tiled = config["training"]["gradient_checkpointing"], config["model"].get("tiled_mlp", False)
    flags = ["--training.gradient_checkpointing", str(kind).lower()]
    return [*flags, "--model.tiled_mlp", "true"] if tiled else flags


def _predict(measured: Measurement, world: int, ranks: int, machine: Hardware) -> tuple[Prediction, str]:
    """The run on so many GPUs, and what the time of exchanges is from.

    Raises:
        UserError: the global batch does not divide, or the collectives could not be measured.
    """
    work = measured.work(world)
    sent = buckets(work.gradients.sizes, work.gradients.cap, work.gradients.first)
    both = ("all_reduce", "all_to_all")
    curves, connecting = candidates.measure_curves(sorted({ranks, world}), machine, sent, both)
    reduced, why = curves[world]
    environment = {**os.environ, **{one.name: one.value for one in nccl.recommend_settings(machine)}}
    exchange, source = measurements.find_exchange(ranks, "nccl", machine.name, environment)
    if reduced is None or exchange is None:
        raise UserError(why if reduced is None else source)
    work = replace(work, start_up_seconds=work.start_up_seconds + connecting)
    return predict(work, world, reduced, exchange), source


def show(found: Sequence[Candidate]) -> None:
    """Print the candidates, and the launch line of the fastest that fits."""
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
    if (best := fastest(found)) is not None:
        print_line(f"The same result with training.context_parallel: {best.ranks} on {best.world_size} GPUs:")
        print_line(f"  {best.line}")


def fastest(found: Sequence[Candidate]) -> Candidate | None:
    """The fastest candidate that fits."""
    fitting = [one for one in found if one.line is not None]
    return max(fitting, key=lambda one: one.prediction.tokens_per_second if one.prediction else 0.0, default=None)
