"""What a configuration leaves open, decided before the first step: how activations are kept, then the micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from finetune.engine.checkpoint.resume import StartPoint
from finetune.engine.job import Choice, Job
from finetune.measure import longest_row, micro_batch

if TYPE_CHECKING:
    from finetune.config.rules import Mode
    from finetune.engine.training.trainer import SFTTrainer


def settle(
    job: Job,
    world: int,
    start: StartPoint,
    trainer: SFTTrainer | None = None,
    measured: Choice[Mode] | None = None,
) -> Job:
    """The job as it trains. What only a trainer can measure is left open until there is one. Every rank calls it.

    Args:
        world: number of ranks of the run; a dry run is one of them.
        start: what a checkpoint had decided holds.
        trainer: of the job, settled once before: what is open is measured with it, before its first step.
        measured: how a dry run keeps activations by its own measurement; its micro-batch stays.

    Raises:
        RunError: no way to keep activations holds the longest rows.
    """
    mode, size = job.activations, job.micro_batch
    if measured is not None:
        mode = measured
    elif mode is None or size is None or trainer is None:
        mode, size = longest_row.choose(job, start.activations), None
    elif mode.searches:
        mode, size = longest_row.search_before_first_step(job, trainer), None
    job = replace(job, activations=mode, config=mode.value.set_in(job.config) if mode.made else job.config)
    size = size or micro_batch.choose(job, start.per_device, world)
    if trainer is not None and size.searches:
        size = micro_batch.search_before_first_step(job, trainer)
    return replace(job, micro_batch=size, batch=job.batch.divided(size.value))
