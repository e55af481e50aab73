"""A trial of a job: a few real optimizer steps on one device, for peak memory, time per phase and what would fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.config import Batch
from finetune.data.layout import Layout
from finetune.engine.job import Job, assemble
from finetune.engine.monitoring.run_logger import RunLogger
from finetune.engine.session.building import BuiltTrainer, build_trainer
from finetune.engine.sharding import memory_per_rank
from finetune.engine.training.trainer import SFTTrainer
from finetune.measure import held, measurements
from finetune.measure.measurements import Measurement, slowest_rank_seconds
from finetune.measure.predict import line_through
from finetune.measure.probe import longest_rows
from finetune.measure.protocol import WARM_UP, without_outliers

T = TypeVar("T")

WORST_STEPS = 3  # steps on the longest rows; the first compiles
TYPICAL_STEPS = 40  # steps on rows of typical lengths
ENOUGH = 6  # typical steps that are always run and counted; WARM_UP more are skipped if there are as many
BUDGET_SECONDS = 30.0  # after which the typical steps end early
LIMIT_SECONDS = 300.0  # for all measuring: after it the dry run reports what it has
EVALUATED_ROWS = 64  # longest held-out rows: enough to see that evaluation works, and what memory it needs
EVALUATED_TOKENS = 2**18  # of them: one row if it is as long
LONG_TOKENS = 2**16  # of a micro-batch, from which on a pass takes so long that one step on the longest rows is enough


# --- the steps ------------------------------------------------------------------------------------------------------


def typical_micro_batches(job: Job, count: int) -> np.ndarray:
    """A sample of the micro-batches of the job's plan, int64 [count, per_device], in random order. It is spread evenly
    over their size distribution; micro-batches repeat if there are fewer."""
    batch = job.batch
    rows = job.plan().deal_epoch(
        0, world_size=1, per_device=batch.per_device, accumulation=batch.global_batch_size // batch.per_device
    )
    flat = rows.reshape(-1, batch.per_device)
    full = flat[(flat >= 0).all(axis=1)]
    if not len(full):  # fewer rows than one micro-batch
        return np.tile(longest_rows(job.layout, batch.per_device), (count, 1))
    by_size = full[np.argsort(job.layout.micro_batch_tokens(full), kind="stable")]
    places = (np.arange(count) + 0.5) / count * len(by_size)
    return by_size[np.random.default_rng(job.config.training.seed).permutation(places.astype(int))]


def after_warm_up(steps: Sequence[T]) -> Sequence[T]:
    """The typical steps that count: all but the first WARM_UP, which still compile and tune kernels, and at least the
    last ENOUGH."""
    return steps[min(WARM_UP, max(len(steps) - ENOUGH, 0)) :]


class TimeBudget(TrainerCallback):
    """Ends the training when the budget is used up, but not before the step `at_least`; when the limit is reached,
    after any step."""

    def __init__(self, at_least: int, seconds: float = BUDGET_SECONDS, limit: float = LIMIT_SECONDS) -> None:
        self._at_least, self._ends, self._limit = at_least, time.monotonic() + seconds, time.monotonic() + limit

    def postpone(self, seconds: float) -> None:
        """Give the steps the time that was needed before the first."""
        self._ends += seconds

    @property
    def over(self) -> bool:
        """Whether the limit is reached."""
        return time.monotonic() > self._limit

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.over or state.global_step >= self._at_least and time.monotonic() > self._ends:
            control.should_training_stop = control.should_log = True


# --- the whole trial ------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Trial:
    """A trainer on the trial's rows, ready to `train()`, and its instruments."""

    job: Job
    trainer: SFTTrainer
    logger: RunLogger
    memory: held.Memory
    budget: TimeBudget
    tokens: np.ndarray  # per micro-batch, including padding, int64 [steps, accumulation]
    worst_steps: int = WORST_STEPS
    least_steps: int = WORST_STEPS + 1  # to predict from

    @cached_property
    def steps(self) -> list[dict[str, list[float]]]:
        """Seconds of each step by phase, per micro-batch for forward and backward; for use after the training.
        Synchronizes with the device."""
        return self.logger.monitor.steps

    def measure(self, started: float) -> Measurement:
        """Summarize the completed steps as a measurement of the job.

        Args:
            started: start of the process, in seconds since the Unix epoch.
        """
        done = list(zip(self.tokens.tolist(), self.steps, strict=False))
        typical = after_warm_up(done[self.worst_steps :]) or done
        pairs = [
            (float(size), forward + backward)
            for sizes, step in typical
            for size, forward, backward in zip(sizes, step["forward"], step["backward"], strict=True)
        ]
        line, shared = line_through(pairs), self.job.context.size
        if len(done) <= self.worst_steps:  # all are equally long
            line = 0.0, median(seconds / size for size, seconds in pairs)
        residuals = without_outliers([seconds - line[0] - line[1] * size for size, seconds in pairs])
        residuals = [float(one) for one in np.array(residuals) - np.mean(residuals)]
        forwards = [seconds for _, step in typical for seconds in step["forward"]]
        backwards = [seconds for _, step in typical for seconds in step["backward"]]
        accumulation = self.tokens.shape[1]
        job, plan, first_step_at = self.job, self.job.plan(), self.logger.first_step_at
        assert first_step_at is not None
        batch = job.batch
        world_sizes = [w for w in measurements.WORLD_SIZES if batch.global_batch_size % (w * batch.per_device) == 0]
        cap, first = measurements.bucket_limits(job.config.training.extra)
        trained = [p for p in self.trainer.model.parameters() if p.requires_grad]
        state = memory_per_rank.allocated_bytes(self.trainer.model, self.trainer.optimizer).optimizer or 0
        epochs, planned = job.config.training.num_train_epochs, job.config.training.max_steps
        return Measurement(
            facts=measurements.facts(job),
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            per_device=batch.per_device,
            global_batch_size=batch.global_batch_size,
            seconds_per_micro_batch=line[0],
            seconds_per_token=line[1],
            residual_seconds=residuals,
            backward_share=median(b / (f + b) for f, b in zip(forwards, backwards, strict=True)),
            data_seconds=median(sum(step["data"]) for _, step in typical) / accumulation,
            optimizer_seconds=median(sum(step["optimizer"]) for _, step in typical),
            other_seconds=median(sum(step["other"]) for _, step in typical),
            start_up_seconds=first_step_at - started,
            compute_seconds={
                str(world): float(
                    slowest_rank_seconds(
                        plan,
                        job.layout,
                        world_size=world,
                        per_device=batch.per_device,
                        line=line,
                        residuals=residuals,
                        shared_by=shared,
                    ).mean()
                )
                for world in world_sizes
            },
            tokens_per_step=float(job.layout.tokens.sum()) / plan.steps_per_epoch,
            steps=float(planned if planned > 0 else plan.steps_per_epoch * epochs),
            peak_memory_bytes=self.memory.peak_bytes(),
            memory_bytes=None if job.hardware.memory_gib is None else job.hardware.memory_gib * 2**30,
            parameters=job.size.parameters,
            active_parameters=job.size.active_parameters,
            trainable_parameters=job.size.trainable_parameters,
            gradient_bytes=[p.numel() * p.element_size() for p in trained],
            gradient_dtype=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained})),
            # In full fine-tuning the trainer lets DDP hold the gradients in its buckets. The first step holds them
            # twice; the optimizer state, allocated later, takes at least as much memory with most optimizers.
            as_bucket_view=job.config.model.full_finetuning and state >= sum(p.nbytes for p in trained),
            gradients_in_peak=accumulation > 1,
            bucket_cap_bytes=cap,
            first_bucket_bytes=first,
            shared_by=shared,
        )


def _longest_of(layout: Layout) -> Layout:
    count = min(EVALUATED_ROWS, EVALUATED_TOKENS // int(layout.tokens.max()), len(layout))
    return layout.take(longest_rows(layout, max(count, 1)))


def prepare(
    job: Job,
    folder: Path,
    memory: held.Memory | None = None,
    build: Callable[[Job, Path], BuiltTrainer] = build_trainer,
) -> Trial:
    """Build the real trainer, to run on the longest rows first and then on typical ones.

    Args:
        build: builds it for a job that has these rows only.
    """
    per_device = job.batch.per_device
    longest = longest_rows(job.layout, per_device)
    shared = job.context.size
    is_long = int(job.layout.micro_batch_tokens(longest, shared)) // shared >= LONG_TOKENS
    # Two are enough to hold gradients while the next are computed.
    accumulation = 1 if is_long else min(2, job.batch.accumulation)
    worst_steps = 1 if is_long else WORST_STEPS
    worst = np.tile(longest, (worst_steps * accumulation, 1))
    micro_batches = np.concatenate([worst, typical_micro_batches(job, TYPICAL_STEPS * accumulation)])
    tokens = job.layout.micro_batch_tokens(micro_batches, shared).reshape(-1, accumulation)
    training = replace(
        job.config.training,
        output_dir=str(folder),
        max_steps=len(tokens),
        save_steps=0,
        eval_steps=0,
        resume_from_checkpoint=False,
    )
    held_out = job.eval_layout
    if isinstance(held_out, Mapping):
        evaluated = {name: _longest_of(one) for name, one in held_out.items()}
    else:
        evaluated = None if held_out is None else _longest_of(held_out)
    # Losses are read once, at the end: logging costs a host-device sync, and most steps of a real run do not log.
    logging = replace(job.config.logging, logging_steps=len(tokens), profile_steps=0)
    layouts = replace(job.layouts, train=job.layout.take(micro_batches.reshape(-1)), eval=evaluated, in_order=True)
    batch = Batch(per_device=per_device, accumulation=accumulation, global_batch_size=per_device * accumulation)
    config = replace(job.config, training=training, logging=logging)
    trial = assemble(config, job.stack, job.model, job.data, **job.parts(batch=batch, layouts=layouts))
    built = build(trial, folder)
    trainer = built.trainer
    built.logger.monitor.keep_steps()
    budget = TimeBudget(at_least=1 if is_long else WORST_STEPS + ENOUGH)
    trainer.add_callback(budget)
    # The plan sorts the micro-batches of a step by size, so their order is read from it.
    order = trainer.plan.deal_epoch(0, world_size=1, per_device=per_device, accumulation=accumulation)
    return Trial(
        job=job,
        trainer=trainer,
        logger=built.logger,
        memory=memory or held.Memory(job.stack.device),
        budget=budget,
        tokens=trial.layout.micro_batch_tokens(order[:, :, 0], shared),
        worst_steps=worst_steps,
        least_steps=1 if is_long else WORST_STEPS + 1,
    )
