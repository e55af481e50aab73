"""What `advise` predicts from: the measurement of a job, and the collectives of the devices here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune.advise import candidates, verdict
from finetune.advise.machine import devices_here
from finetune.advise.verdict import Row
from finetune.config import Config
from finetune.config.batch import fewest_ranks
from finetune.errors import RunError, UserError
from finetune.measure import measurements, slices
from finetune.measure.measurements import Measurement
from finetune.measure.predict import Curve, Prediction, Work, all_to_all_curve, buckets, predict
from finetune.runtime.machine import nccl
from finetune.runtime.machine.hardware import Hardware
from finetune.text import counted


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The all-reduce by number of devices, or the reason why it is not known; the all-to-all of those that share each
    row, if any do, and what it is from; and the seconds that several ranks take to connect."""

    all_reduce: Mapping[int, tuple[Curve | None, str]]
    all_to_all: Curve | None
    source: str
    connecting: float


def check_devices(config: Config, machine: Hardware) -> None:
    """Raise a UserError if the job does not run on the devices here."""
    fewest, here = fewest_ranks(config.training), devices_here(machine)
    if fewest > here:
        shared = config.training.context_parallel
        key = f"training.context_parallel: {shared}" if shared > 1 else "training.strategy: shard"
        raise UserError(
            f"A job with {key} needs at least {counted(fewest, 'device')}, and {here} {'is' if here == 1 else 'are'} "
            "here. `finetune dryrun` measures it on one."
        )


def collectives(worlds: Iterable[int], one: Measurement, machine: Hardware, file: Path | None = None) -> Collectives:
    """Those of these numbers of devices, as far as they are here.

    Args:
        one: the job, whose messages count.
        file: of `bench comm --json`, that may have them.
    """
    shared = one.shared_by
    given = {} if file is None else measurements.read_comm(file)
    here = devices_here(machine)
    missing = [world for world in sorted({*worlds, shared}) if 1 < world <= here and world not in given]
    both = ("all_reduce", "all_to_all") if shared > 1 else ("all_reduce",)
    curves, connecting = candidates.measure_curves(missing, machine, _message_sizes(one), both)
    curves |= {world: (curve, str(file)) for world, curve in given.items()}
    exchange, source = None, ""
    if file is not None and shared > 1 and shared in given:
        exchange, source = measurements.read_comm(file, lambda found: all_to_all_curve(found)[0])[shared], str(file)
    elif shared > 1:
        environment = {**os.environ, **{one.name: one.value for one in nccl.recommend_settings(machine)}}
        backend = "nccl" if machine.device == "cuda" else "gloo"
        exchange, source = measurements.find_exchange(shared, backend, machine.name, environment)
    return Collectives(all_reduce=curves, all_to_all=exchange, source=source, connecting=connecting)


def _message_sizes(one: Measurement) -> list[int]:
    sent = buckets(one.gradients.sizes, one.gradients.cap, one.gradients.first)
    return [*sent, *(round(size) for size, _ in one.exchanges)]


def predictor(
    config: Config, measured: Iterable[Measurement], all_to_all: Curve | None
) -> Callable[[Work, int, Curve | None], Prediction]:
    """Predicts one number of devices from the work of each and their all-reduce.

    Args:
        measured: the job, by micro-batch.

    Raises:
        UserError: a model that is sharded has too few layers to be measured in slices.
    """
    if config.training.strategy != "shard":
        return lambda work, world, curve: predict(work, world, curve, all_to_all)
    parts = {one.per_device: slices.find(one.facts)[0] for one in measured}

    def sharded(work: Work, world: int, curve: Curve | None) -> Prediction:
        if (found := parts[work.per_device]) is None:
            raise UserError(
                "A sharded job is predicted from slices of its model, and this model has too few layers for them. "
                "Remove training.strategy to compare numbers of devices that each hold all of it."
            )
        return slices.predict(found, work, world, curve, all_to_all)

    return sharded


def compare(
    config: Config, measured: Mapping[int, Measurement | str], options: argparse.Namespace, machine: Hardware
) -> tuple[list[Row], Row, Collectives]:
    """All numbers of devices, of which the fewest come first; the chosen one; and their collectives.

    Args:
        measured: the job as one of each number of devices, or why it is not known.

    Raises:
        RunError: the fewest devices could not be measured, or none of the numbers can be launched here.
    """
    known = {world: one for world, one in measured.items() if not isinstance(one, str)}
    sharded = config.training.strategy == "shard"  # only then more devices may hold what fewer do not
    fewest = min(known, default=0) if sharded else fewest_ranks(config.training)
    if fewest not in known:
        least = min(measured)
        raise RunError(f"{_name(least)} cannot be measured: {measured[least]}")
    between = collectives(measured, known[fewest], machine, options.comm)
    missing = [] if fewest == 1 or between.all_reduce[fewest][0] is not None else [between.all_reduce[fewest][1]]
    missing += [] if known[fewest].shared_by == 1 or between.all_to_all is not None else [between.source]
    if missing:
        raise RunError(f"{_name(fewest)} cannot be predicted: {missing[0]}")
    rows = verdict.rows(
        {world: one if isinstance(one, str) else one.work(world) for world, one in measured.items()},
        between.all_reduce,
        here=devices_here(machine),
        extra_start_up_seconds=between.connecting,
        price_per_gpu_hour=options.price_per_gpu_hour,
        fewest=fewest,
        predicts=predictor(config, known.values(), between.all_to_all),
        measured=not sharded,
    )
    chosen = verdict.choose(rows, fastest=options.fastest)
    if chosen is None:
        raise RunError(
            f"None of the numbers of devices holds the job: {rows[-1].reason}. Name more with --world-sizes."
        )
    return rows, chosen, between


def _name(devices: int) -> str:
    return "One device" if devices == 1 else f"{devices} devices"


def measured_on(config: Config) -> str:
    """What a prediction is from, in words."""
    shared = config.training.context_parallel
    what = "slices of the model" if config.training.strategy == "shard" else "one device"
    if shared == 1:
        return f"{what} and the all-reduce"
    return f"{what}, as one of {shared} that share each row, and the collectives"
