"""What `advise` predicts from: the measurement of a job, and the all-reduce of the devices here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune.advise import candidates, verdict
from finetune.advise.machine import devices_here
from finetune.advise.verdict import Row
from finetune.config import Config
from finetune.errors import RunError, UserError
from finetune.measure import measurements
from finetune.measure.measurements import Measurement
from finetune.measure.predict import Curve, buckets
from finetune.runtime.machine.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The all-reduce by number of devices, or the reason why it is not known; and the seconds that several ranks take
    to connect."""

    all_reduce: Mapping[int, tuple[Curve | None, str]]
    connecting: float


def check_job(config: Config) -> None:
    """Raise a UserError for a job whose GPUs do not each train whole rows with the whole model."""
    shared = config.training.context_parallel
    if shared > 1 or config.training.strategy == "shard":
        key = f"training.context_parallel: {shared}" if shared > 1 else "training.strategy: shard"
        raise UserError(
            f"`advise` compares GPUs that each train whole rows with the whole model: got {key}. `finetune dryrun` "
            "measures this job on one GPU, and of a sharded one predicts 2, 4 and 8."
        )


def collectives(worlds: list[int], one: Measurement, machine: Hardware, file: Path | None = None) -> Collectives:
    """Those of these numbers of devices, as far as they are here.

    Args:
        one: the job, whose messages count.
        file: of `bench comm --json`, that may have them.
    """
    given = {} if file is None else measurements.read_comm(file)
    missing = [world for world in worlds if 1 < world <= devices_here(machine) and world not in given]
    sent = buckets(one.gradients.sizes, one.gradients.cap, one.gradients.first)
    curves, connecting = candidates.measure_curves(missing, machine, sent)
    curves |= {world: (curve, str(file)) for world, curve in given.items()}
    return Collectives(all_reduce=curves, connecting=connecting)


def compare(
    measured: Mapping[int, Measurement | str], options: argparse.Namespace, machine: Hardware
) -> tuple[list[Row], Row, Collectives]:
    """All numbers of devices, of which one comes first; the chosen one; and their collectives.

    Args:
        measured: the job as one of each number of devices, or why it is not known.

    Raises:
        RunError: one device could not be measured.
    """
    one = measured[1]
    if isinstance(one, str):
        raise RunError(f"One device cannot be measured: {one}")
    between = collectives(sorted(measured), one, machine, options.comm)
    rows = verdict.rows(
        {world: found if isinstance(found, str) else found.work(world) for world, found in measured.items()},
        between.all_reduce,
        here=devices_here(machine),
        extra_start_up_seconds=between.connecting,
        price_per_gpu_hour=options.price_per_gpu_hour,
    )
    return rows, verdict.choose(rows, fastest=options.fastest), between
