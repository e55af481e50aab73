"""The one way to open a run and build its trainer: used by train, the dry run, the benchmarks and parity."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from finetune.config import Batch, Config, dump_yaml, scaled_learning_rate
from finetune.data import sources
from finetune.engine import checkpoints, preflight, resume
from finetune.engine.record import RunRecord
from finetune.errors import RunError, UserError, describe
from finetune.runtime import bootstrap, disk, distributed, hang, interrupt, launcher
from finetune.runtime.command import console
from finetune.runtime.hardware import when_full
from finetune.runtime.hooks import NO_HOOKS, Hooks

if TYPE_CHECKING:
    from finetune.engine.callbacks import RunLogger, StopOnRequest
    from finetune.engine.job import Job
    from finetune.engine.trainer import SFTTrainer
    from finetune.runtime.bootstrap import Stack


def check_present(config: Config) -> None:
    """Check that the model's files, the data files and the optimizer's package are there, before any heavy import.

    Raises:
        UserError: one is missing or cannot be read.
    """
    if config.demo:
        return
    preflight.check(config)
    for given in (config.data.train_file, config.data.eval_file):
        if given is not None:
            sources.expand([given] if isinstance(given, str) else given)


def with_demo(config: Config) -> tuple[Config, ModuleType | None]:
    """The configuration and, if it names no model, the demo that fills it in."""
    if not config.demo:
        return config, None
    from finetune.engine import demo

    return demo.configure(config, bootstrap.cache_folder(), distributed.ranks().world_size), demo


def open_session(
    config: Config,
    batch: Batch,
    *,
    demo: ModuleType | None = None,
    hooks: Hooks = NO_HOOKS,
    without: Collection[str] = (),
    on_failure: Callable[..., None] | None = None,
    before_loading: Callable[[Stack], None] | None = None,
) -> Job:
    """Start the backend, prepare the data, join the other ranks and load the model.

    Args:
        demo: of `with_demo`.
        without: names of patches to leave out, needed or not.
        on_failure: called with a message if another rank has failed, just before this process ends.
        before_loading: called when the ranks have met and before the model is loaded.

    Raises:
        UserError, RunError: with what is wrong and what to do.
    """
    stack = bootstrap.start(config.model.backend, config.logging.log_level, without)
    from finetune.engine.job import open_job

    if demo is not None:
        demo.materialize(bootstrap.cache_folder())

    def met() -> None:
        if before_loading is not None:
            before_loading(stack)

    return open_job(config, batch, stack, on_failure=on_failure, hooks=hooks, before_loading=met)


def open_and_compare(
    config: Config,
    batch: Batch,
    demo: ModuleType | None,
    record: RunRecord,
    without: Collection[str],
    hooks: Hooks,
) -> tuple[Job, resume.Start]:
    """The job and where it starts. All that must agree with a checkpoint is compared before the first write.

    Raises:
        UserError, RunError: with what is wrong and what to do; the output folder is unchanged.
    """
    start = resume.Start()

    def choose_start(stack: Stack) -> None:
        from finetune.engine.model import resolve_dtype

        nonlocal start
        start = resume.prepare(config, batch, str(resolve_dtype(config, stack)).removeprefix("torch."))

    job = open_session(
        config, batch, demo=demo, hooks=hooks, without=without, on_failure=record.fail, before_loading=choose_start
    )
    return job, resume.confirm(start, config, job.model, job.plan().digest(), total_steps(job))


def total_steps(job: Job) -> int:
    """Optimizer steps of the whole run."""
    return resume.total_steps(job.config, job.plan().steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class Build:
    """A trainer, what it logs, and what stops it."""

    trainer: SFTTrainer
    logger: RunLogger
    stop: StopOnRequest


def build_trainer(job: Job, output_dir: Path, parity_dump: Path | None = None) -> Build:
    """The trainer with its callbacks.

    Args:
        parity_dump: folder for the first gradients and the last weights, for `finetune parity`.
    """
    from finetune.engine import callbacks
    from finetune.engine.trainer import SFTTrainer, arguments

    config, layout = job.config, job.layout
    plan = job.plan()
    args = arguments(config, job.stack, job.batch, evaluate=job.data.eval is not None)
    total = resume.total_steps(config, plan.steps_per_epoch)
    is_main = distributed.ranks().is_main
    logger = callbacks.RunLogger(
        folder=output_dir / "runs" if is_main else None,
        plan=plan,
        layout=layout,
        hardware=job.hardware,
        size=job.size,
        texts={"configuration": dump_yaml(config), "data": str(job.data.ledgers)},
        progress=callbacks.ProgressLines(console(), total) if is_main else None,
    )
    stop = callbacks.StopOnRequest()
    steps = config.logging.profile_steps
    dump = [callbacks.ParityDump(parity_dump)] if parity_dump else []
    profile = [callbacks.Profile(output_dir / "runs", steps)] if steps else []
    trainer = SFTTrainer(
        model=job.model,
        args=args,
        tokenizer=job.tokenizer,
        stack=job.stack,
        plan=plan,
        layout=layout,
        eval_layout=job.eval_layout,
        callbacks=[logger, stop, callbacks.FirstGradients(), *profile, *dump],
    )
    logger.trainer = trainer
    with bootstrap.quiet_ranks():
        job.hooks.call("trainer", trainer)
    complete_early_stopping(trainer)
    return Build(trainer=trainer, logger=logger, stop=stop)


def complete_early_stopping(trainer: SFTTrainer) -> None:
    """Have an EarlyStoppingCallback of the script watch the held-out loss if the script names no other metric.

    Raises:
        UserError: the run does not evaluate while it trains.
    """
    from transformers import EarlyStoppingCallback

    args = trainer.args
    if not any(isinstance(callback, EarlyStoppingCallback) for callback in trainer.callback_handler.callbacks):
        return
    if str(args.eval_strategy.value) == "no":
        raise UserError(
            "EarlyStoppingCallback needs evaluations while the run trains: there are none. Set data.eval_file or "
            "data.eval_fraction, and training.eval_steps."
        )
    if args.metric_for_best_model is None:
        args.metric_for_best_model = "eval_loss"
    if args.greater_is_better is None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


def check_space(config: Config, model: Any) -> None:
    """Check the room on the disk: for the final weights and, with save_steps, for a checkpoint (weights, two float32
    moments).

    Raises:
        UserError: the disk has less.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    needed, what = sum(parameter.numel() * parameter.element_size() for parameter in trainable), "the final model"
    if config.training.save_steps:
        needed, what = 2 * needed + 8 * sum(parameter.numel() for parameter in trainable), f"a checkpoint and {what}"
    checkpoints.check_space(Path(config.training.output_dir), needed + checkpoints.SPARE_BYTES, what)


@contextlib.contextmanager
def recorded(record: RunRecord, job: Job, start: resume.Start) -> Iterator[None]:
    """Inside, the run is on record in run.json as running; an error is added to it."""
    from finetune.engine.job import layouts
    from finetune.engine.model import resolve_dtype

    with disk.no_space(record.path.parent, record.path.name):
        record.update(
            status="running",
            launch=launcher.launch_id(),
            config=job.config.to_dict(),
            script=str(job.hooks.script) if job.hooks.script else None,
            versions=bootstrap.versions(),
            world_size=distributed.ranks().world_size,
            batch=vars(job.batch),
            learning_rate=scaled_learning_rate(job.config.training, job.batch.global_batch_size),
            backend=job.stack.backend,
            backend_reason=job.stack.reason,
            dtype=str(resolve_dtype(job.config, job.stack)).removeprefix("torch."),
            hardware=job.hardware.to_dict(),
            patches=[verdict.to_dict() for verdict in job.stack.patches],
            ledger={name: job.data.ledgers[name] | {"layout": layout} for name, layout in layouts(job).items()},
            data_fingerprint=job.data.fingerprint,
            settings=start.settings,
            resumed_with_changes=list(start.history),
        )
    interrupt.on_stuck(record.fail)
    try:
        with hang.reporting(record.path.parent / "hang"):
            yield
    except BaseException as error:
        with interrupt.deferred():  # a signal meanwhile must not leave run.json at "running"
            record.fail(distributed.first_failure(describe(error)))
        raise


@contextlib.contextmanager
def out_of_memory(job: Job) -> Iterator[None]:
    """Inside, a full GPU becomes a RunError that names what to change."""
    import torch

    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        half = max(job.batch.per_device // 2, 1)
        less = (
            f"set training.per_device_train_batch_size to {half} (the global batch stays {job.batch.global_batch_size}:"
            " more accumulation, the same result)"
            if job.batch.per_device > 1
            else "set data.max_length lower"
        )
        model, training = job.config.model, job.config.training
        others = [] if training.gradient_checkpointing else ["training.gradient_checkpointing: unsloth"]
        if model.full_finetuning:
            others += ["training.optim: adamw_8bit"] if training.adam_in_full else []
            others.append("LoRA (model.full_finetuning: false)")
        elif not model.load_in_4bit:
            others.append("model.load_in_4bit: true")
        raise RunError(
            f"CUDA ran out of memory with {job.batch.per_device} rows of up to {job.config.data.max_length} tokens per "
            f"GPU. To go on, {less}" + (f"; {' or '.join(others)} needs less memory" if others else "") + ". "
            f"({when_full(error)})"
        ) from error
