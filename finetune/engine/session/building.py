"""Builds the trainer of a job and its callbacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.engine.checkpoint import checkpoints, resume
from finetune.errors import UserError
from finetune.runtime.command import console
from finetune.runtime.ranks import distributed

if TYPE_CHECKING:
    from finetune.engine.checkpoint.best import BestModel
    from finetune.engine.job import Job
    from finetune.engine.monitoring.callbacks import StopOnRequest
    from finetune.engine.monitoring.run_logger import Dashboard, RunLogger
    from finetune.engine.training.trainer import SFTTrainer


FEW_LINES = 100  # log entries of a run whose figures stay on a terminal unless logging.lines says otherwise


@dataclass(frozen=True, kw_only=True)
class BuiltTrainer:
    """A trainer, the callback that logs it, the one that stops it on a signal, and the one that tracks its best
    evaluation, if asked for."""

    trainer: SFTTrainer
    logger: RunLogger
    stop: StopOnRequest
    best: BestModel | None = None


def build_trainer(
    job: Job,
    output_dir: Path,
    parity_dump: Path | None = None,
    *,
    start_step: int = 0,
    dashboard: Dashboard | None = None,
) -> BuiltTrainer:
    """Build the trainer and its callbacks.

    Args:
        parity_dump: folder for the first gradients and the last weights, for `finetune parity`.
        start_step: optimizer steps that a resumed run starts from.
        dashboard: TensorBoard's pages besides the curves. None for internal runs (dry run, benchmark, parity): no
            trackers, no user callbacks.
    """
    from finetune.engine.checkpoint import best
    from finetune.engine.model.load_arguments import resolve_dtype
    from finetune.engine.monitoring import callbacks, trackers
    from finetune.engine.sharding import shard
    from finetune.engine.training import recompute
    from finetune.engine.training.arguments import configured_arguments
    from finetune.engine.training.trainer import SFTTrainer

    config = job.config
    args = configured_arguments(config, job.stack, job.batch, evaluate=job.data.eval is not None)
    logger = build_run_logger(job, output_dir, start_step=start_step, dashboard=dashboard)
    stop = callbacks.StopOnRequest()
    tracker = best.best_model_callbacks(config.training, evaluates=job.data.eval is not None)
    steps = config.logging.profile_steps
    dump = [callbacks.ParityDump(parity_dump)] if parity_dump else []
    reports = trackers.tracker_callbacks(config.logging.trackers) if dashboard is not None else []
    own = callbacks.user_callbacks(job.user_code) if dashboard is not None else []
    profile = [callbacks.Profile(output_dir / "runs", steps)] if steps else []
    first = callbacks.FirstGradients(shard.is_requested(config), job.master_weights.kind)
    trainer = SFTTrainer(
        model=job.model,
        args=args,
        tokenizer=job.tokenizer,
        stack=job.stack,
        plan=job.plan(),
        layout=job.layout,
        eval_layout=job.eval_layout,
        callbacks=[logger, *tracker, stop, first, *profile, *dump, *reports, *own],
        recomputation=recompute.configured(config),
        reduces_once=shard.reduces_once(config),
        weights=job.master_weights.kind,
        context=job.context,
        saved_dtype=resolve_dtype(config, job.stack) if config.model.full_finetuning else None,
    )
    logger.attach(trainer)
    complete_early_stopping(trainer)
    logger.trackers = trackers.wrap_trackers(trainer.callback_handler.callbacks, logger.records.reported)
    return BuiltTrainer(trainer=trainer, logger=logger, stop=stop, best=tracker[0] if tracker else None)


def build_run_logger(job: Job, output_dir: Path, *, start_step: int, dashboard: Dashboard | None) -> RunLogger:
    """The callback that logs a run to `output_dir` and to the terminal."""
    from finetune.engine.monitoring.progress import ProgressLines
    from finetune.engine.monitoring.run_logger import RunLogger

    is_main = distributed.ranks().is_main
    plan = job.plan()
    total = resume.total_steps(job.config, plan.steps_per_epoch)
    logging = job.config.logging
    few = "logging.lines" not in job.config.given and total / logging.logging_steps <= FEW_LINES
    return RunLogger(
        # TensorBoard shows the name of the innermost folder.
        folder=output_dir / "runs" / output_dir.resolve().name if is_main else None,
        plan=plan,
        layout=job.layout,
        hardware=job.hardware,
        size=job.size,
        progress=ProgressLines(console(), total, start_step, lines=logging.lines or few) if is_main else None,
        start_step=start_step,
        dashboard=dashboard,
        context=job.context,
    )


def complete_early_stopping(trainer: SFTTrainer) -> None:
    """Make the script's EarlyStoppingCallback watch the held-out loss, unless the script names another metric.

    Raises:
        UserError: the run has no evaluations during training.
    """
    from transformers import EarlyStoppingCallback

    args = trainer.args
    if not any(isinstance(callback, EarlyStoppingCallback) for callback in trainer.callback_handler.callbacks):
        return
    if str(args.eval_strategy.value) == "no":
        raise UserError(
            "EarlyStoppingCallback needs evaluations during training: none are configured. Hold out rows and set "
            "eval_steps (in SFTConfig also eval_strategy)."
        )
    if args.metric_for_best_model is None:
        args.metric_for_best_model = "eval_loss"
    if args.greater_is_better is None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


def prepare_resume(trainer: SFTTrainer, start: resume.StartPoint, save_total_limit: int | None) -> str | None:
    """Set what the trainer writes into checkpoints and which ones it keeps. Returns the checkpoint to resume from."""
    checkpoint = start.found.path
    trainer.manifest = start.manifest(steps_per_epoch=trainer.plan.steps_per_epoch, total_steps=trainer.total_steps)
    trainer.retention = checkpoints.Retention(
        limit=save_total_limit,
        protected=frozenset({checkpoint.name} if checkpoint else ()),
        damaged=start.found.damaged,
    )
    return str(checkpoint) if checkpoint else None
