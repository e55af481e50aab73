"""What `advise` predicts from: the measurement of a job, and the all-reduce of the devices here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
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


def check_job(config: Config) -> None:
    """Raise a UserError for a job whose GPUs do not each train whole rows with the whole model."""
    shared = config.training.context_parallel
    if shared > 1 or config.training.strategy == "shard":
        key = f"training.context_parallel: {shared}" if shared > 1 else "training.strategy: shard"
        raise UserError(
            f"`advise` compares GPUs that each train whole rows with the whole model: got {key}. `finetune dryrun` "
            "measures this job on one GPU, and of a sharded one predicts 2, 4 and 8."
        )


def all_reduces(
    worlds: list[int], one: Measurement, machine: Hardware, file: Path | None = None
) -> tuple[dict[int, tuple[Curve | None, str]], float]:
    """The all-reduce by number of devices, as far as they are here, or the reason why it is not known; and the seconds
    that several ranks take to connect.

    Args:
        one: the job, whose messages count.
        file: of `bench comm --json`, that may have them.
    """
    given = {} if file is None else measurements.read_comm(file)
    missing = [world for world in worlds if 1 < world <= devices_here(machine) and world not in given]
    sent = buckets(one.gradients.sizes, one.gradients.cap, one.gradients.first)
    curves, connecting = candidates.measure_curves(missing, machine, sent)
    return curves | {world: (curve, str(file)) for world, curve in given.items()}, connecting


def compare(
    measured: Mapping[int, Measurement | str], options: argparse.Namespace, machine: Hardware
) -> tuple[list[Row], Row, float]:
    """All numbers of devices, of which one comes first; the chosen one; and the seconds that several ranks take to
    connect.

    Args:
        measured: the job as one of each number of devices, or why it is not known.

    Raises:
        RunError: one device could not be measured.
    """
    one = measured[1]
    if isinstance(one, str):
        raise RunError(f"One device cannot be measured: {one}")
    curves, connecting = all_reduces(sorted(measured), one, machine, options.comm)
    rows = verdict.rows(
        {world: found if isinstance(found, str) else found.work(world) for world, found in measured.items()},
        curves,
        here=devices_here(machine),
        extra_start_up_seconds=connecting,
        price_per_gpu_hour=options.price_per_gpu_hour,
    )
    return rows, verdict.choose(rows, fastest=options.fastest), connecting
