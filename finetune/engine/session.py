"""Opens a run and builds its trainer, for train, the dry run, the benchmarks and parity."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from finetune.config import Batch, Config, scaled_learning_rate
from finetune.config.data_sources import evaluation_sources, training_sources
from finetune.config.rules import STOCHASTIC_OPTIMIZERS
from finetune.data import sources
from finetune.engine import preflight
from finetune.engine.checkpoint import checkpoints, resume
from finetune.engine.record import RunRecord
from finetune.errors import RunError, UserError, describe
from finetune.redact import redact_tree
from finetune.runtime import bootstrap, user_code
from finetune.runtime.command import console, warn
from finetune.runtime.files import checksums, write_json
from finetune.runtime.hooks import NO_HOOKS, Hooks
from finetune.runtime.machine import disk
from finetune.runtime.machine.hardware import out_of_memory_details
from finetune.runtime.ranks import distributed, failures, hang, interrupt, launcher, multinode
from finetune.text import counted

if TYPE_CHECKING:
    from finetune.engine.checkpoint.best import BestModel
    from finetune.engine.job import Job
    from finetune.engine.monitoring.callbacks import StopOnRequest
    from finetune.engine.monitoring.run_logger import Dashboard, RunLogger
    from finetune.engine.monitoring.samples import Question, Result
    from finetune.engine.trainer import SFTTrainer
    from finetune.runtime.bootstrap import Stack


def check_present(config: Config) -> None:
    """Check that the model's files, the data files and the optimizer's package exist, before any heavy import.

    Raises:
        UserError: one of them is missing or unreadable.
    """
    if config.demo:
        return
    preflight.check(config)
    check_files(config)


def check_files(config: Config) -> None:
    """Check that the data files exist.

    Raises:
        UserError: one of them is missing or unreadable.
    """
    for origin in (*training_sources(config.data), *evaluation_sources(config.data)):
        if origin.files:
            sources.expand(origin.files)


def with_demo(config: Config) -> tuple[Config, ModuleType | None]:
    """The configuration and, if it names no model, the demo module, whose model, data and settings are filled in."""
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
    before_loading: Callable[[Stack, str], str] | None = None,
) -> Job:
    """Start the backend, prepare the data, join the other ranks and load the model.

    Args:
        demo: as returned by `with_demo`.
        without: names of patches to skip, even if they are needed.
        on_failure: called with a message if another rank fails, just before this process exits.
        before_loading: called once the ranks can communicate, before the model is loaded, with how the trained weights
            would be kept (`master_weights.Choice.kind`); returns how they are kept.

    Raises:
        UserError, RunError: with what is wrong and what to do.
    """
    # The transformers backend is the one that is proven on sharded models.
    backend, setting = config.model.backend, "model.backend"
    if config.training.strategy == "shard" and backend == "auto":
        backend, setting = "transformers", "training.strategy: shard"
    with bootstrap.library_imports():
        used = (config.training.optim,)
        stack = bootstrap.start(backend, config.logging.log_level, without, setting=setting, optimizers=used)
        multinode.start(config.training.join_timeout)
        from finetune.engine import trainer  # noqa: F401  imports TRL and PEFT
        from finetune.engine.job import open_job

    named = user_code.configured(config.logging)
    loaded = [(key, name, user_code.load(key, name, config.config_file)) for key, name in named]
    if demo is not None:
        demo.materialize(bootstrap.cache_folder())

    def connected(weights: str) -> str:
        return weights if before_loading is None else before_loading(stack, weights)

    job = open_job(config, batch, stack, on_failure=on_failure, hooks=hooks, before_loading=connected)
    job.user_code = loaded
    return job


def open_and_compare(
    config: Config,
    batch: Batch,
    demo: ModuleType | None,
    record: RunRecord,
    without: Collection[str],
    hooks: Hooks,
) -> tuple[Job, resume.Start]:
    """Open the job and find where it starts. Compares everything that must match the checkpoint, and writes nothing.

    Raises:
        UserError, RunError: with what is wrong and what to do; the output folder is unchanged.
    """
    start = resume.Start()

    def choose_start(stack: Stack, weights: str) -> str:
        from finetune.engine.model.loading import resolve_dtype

        nonlocal start
        checkpoints.check_shared(Path(config.training.output_dir))
        start = resume.prepare(config, batch, str(resolve_dtype(config, stack)).removeprefix("torch."), weights)
        return start.settings["training.master_weights"]

    job = open_session(
        config, batch, demo=demo, hooks=hooks, without=without, on_failure=record.fail, before_loading=choose_start
    )
    return job, resume.confirm(start, config, job.model, job.plan().digest(), total_steps(job))


def total_steps(job: Job) -> int:
    """Optimizer steps of the whole run."""
    return resume.total_steps(job.config, job.plan().steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class Build:
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
) -> Build:
    """Build the trainer and its callbacks.

    Args:
        parity_dump: folder for the first gradients and the last weights, for `finetune parity`.
        start_step: optimizer steps that a resumed run starts from.
        dashboard: what TensorBoard shows beside the curves. Without it this is no run of the user's: it reports to no
            tracker, and the user's callbacks are left out.
    """
    from finetune.engine.checkpoint import best
    from finetune.engine.model.loading import resolve_dtype
    from finetune.engine.monitoring import callbacks, trackers
    from finetune.engine.sharding import shard
    from finetune.engine.trainer import SFTTrainer, arguments

    config = job.config
    args = arguments(config, job.stack, job.batch, evaluate=job.data.eval is not None)
    logger = run_logger(job, output_dir, start_step=start_step, dashboard=dashboard)
    stop = callbacks.StopOnRequest()
    tracker = best.callbacks(config.training, evaluates=job.data.eval is not None)
    steps = config.logging.profile_steps
    dump = [callbacks.ParityDump(parity_dump)] if parity_dump else []
    reports = trackers.callbacks(config.logging.trackers) if dashboard is not None else []
    own = callbacks.of_the_user(job.user_code) if dashboard is not None else []
    profile = [callbacks.Profile(output_dir / "runs", steps)] if steps else []
    first = callbacks.FirstGradients(shard.wanted(config), job.master_weights.kind)
    trainer = SFTTrainer(
        model=job.model,
        args=args,
        tokenizer=job.tokenizer,
        stack=job.stack,
        plan=job.plan(),
        layout=job.layout,
        eval_layout=job.eval_layout,
        callbacks=[
            logger,
            *tracker,
            stop,
            first,
            *profile,
            *dump,
            *reports,
            *own,
        ],
        reduces_once=shard.reduces_once(config),
        weights=job.master_weights.kind,
        saved_dtype=resolve_dtype(config, job.stack) if config.model.full_finetuning else None,
    )
    with bootstrap.quiet_ranks():
        job.hooks.call("trainer", trainer)
    logger.attach(trainer)  # after the hook: what that replaces is timed as well
    complete_early_stopping(trainer)
    logger.trackers = trackers.adopt(trainer.callback_handler.callbacks, logger.reported)
    return Build(trainer=trainer, logger=logger, stop=stop, best=tracker[0] if tracker else None)


def run_logger(job: Job, output_dir: Path, *, start_step: int, dashboard: Dashboard | None) -> RunLogger:
    """The callback that logs a run to `output_dir` and to the terminal."""
    from finetune.engine.monitoring.run_logger import ProgressLines, RunLogger

    is_main = distributed.ranks().is_main
    plan = job.plan()
    total = resume.total_steps(job.config, plan.steps_per_epoch)
    return RunLogger(
        # TensorBoard shows the name of the innermost folder.
        folder=output_dir / "runs" / output_dir.resolve().name if is_main else None,
        plan=plan,
        layout=job.layout,
        hardware=job.hardware,
        size=job.size,
        progress=ProgressLines(console(), total, start_step, lines=job.config.logging.lines) if is_main else None,
        start_step=start_step,
        dashboard=dashboard,
    )


def dashboard(
    job: Job,
    record: RunRecord,
    questions: list[Question],
    review: ModuleType,
) -> Dashboard:
    """The pages of TensorBoard.

    Args:
        record: run.json, as far as it is known when training begins.
        review: `finetune.review`, which reviews the run and, with training.stop_on_divergence, judges its losses.
    """
    from finetune.engine.job import layouts
    from finetune.engine.monitoring import tensorboard_pages
    from finetune.engine.monitoring.run_logger import Dashboard

    config, known = job.config, redact_tree(record.content)
    resolved = {name: section for name, section in known["config"].items() if isinstance(section, dict)}
    facts = ("backend", "backend_reason", "dtype", "world_size", "batch", "learning_rate", "hardware", "versions")
    run = {name: known[name] for name in facts}
    run["patches"] = {one["name"]: one["reason"] for one in known["patches"] if one.get("applied")}
    run["invariants"] = known.get("invariants")
    if config.logging.profile_steps:
        run["traces"] = str(Path("runs", "trace-rank-N.json"))
    first = {
        "learning rate": known["learning_rate"],
        "LoRA rank (0: all weights)": 0 if config.model.full_finetuning else config.lora.r,
        "global batch size": job.batch.global_batch_size,
        "epochs": total_steps(job) / job.plan().steps_per_epoch,
    }
    in_first = ("training.learning_rate", "lora.r", "training.global_batch_size", "training.num_train_epochs")
    given = {
        name: value for name, value in tensorboard_pages.flat(resolved) if name in config.given and name not in in_first
    }
    about = {"world_size": known["world_size"], "device": job.hardware.name, "backend": job.stack.backend}

    return Dashboard(
        texts={
            "2 data": tensorboard_pages.data_page(
                job.data.ledgers, layouts(job), include_rows=config.logging.include_rows
            ),
            "3 run": tensorboard_pages.facts_page(run),
            "4 configuration": tensorboard_pages.configuration_page(resolved, config.given),
        },
        first_hyperparameters=first,
        hyperparameters=given | about,
        review=lambda: review.markdown(record.path.parent),
        divergence=review.divergence if config.training.stop_on_divergence else None,
        samples=(lambda: examine(job, questions)) if questions else None,
        include_rows=config.logging.include_rows,
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


def check_space(config: Config, model: Any) -> None:
    """Check the free disk space: the final weights and, with save_steps, one checkpoint (weights and two float32
    moments) must fit.

    Raises:
        UserError: they do not.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    needed, what = sum(parameter.numel() * parameter.element_size() for parameter in trainable), "the final model"
    if config.training.save_steps:
        needed, what = 2 * needed + 8 * sum(parameter.numel() for parameter in trainable), f"a checkpoint and {what}"
    checkpoints.check_space(Path(config.training.output_dir), needed + checkpoints.SPARE_BYTES, what)


def check_saving(job: Job) -> None:
    """Save everything but the weights into a temporary folder: what cannot be saved must not be found at the end.

    Raises:
        UserError: names what cannot be saved.
    """
    from finetune.engine.checkpoint import tokenizer_files
    from finetune.engine.model import generation_config

    model = job.model
    adapters = getattr(model, "peft_config", None)
    with tempfile.TemporaryDirectory(prefix="finetune-save-") as folder:
        tokenizer_files.save(job.tokenizer, Path(folder))
        generation_config.write(Path(folder), model, [])
        configs = [model.config] if adapters is None else list(adapters.values())
        for config in configs:
            try:
                config.save_pretrained(folder)
            except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
                name = preflight.SHAPES[0] if adapters is None else preflight.ADAPTER
                raise UserError(
                    f"The {name} of this model cannot be saved: {' '.join(str(error).split())[:300]}. Correct "
                    f"{'it in the folder of the model' if adapters is None else 'the lora section'}."
                ) from error


def attention_computed(job: Job, trainer: SFTTrainer) -> dict[str, Any]:
    """The kernel of packs for run.json at the end of training; a warning if it is not the chosen one."""
    from finetune.engine.kernels import attention

    trained = trainer.state.global_step > trainer.resumed_step
    found = attention.computed(job.attention) if trained else job.attention
    if found != job.attention and distributed.ranks().is_main:
        warn(f'{found.reason}. run.json records "{found.kernel}".')
    return found.to_dict()


@contextlib.contextmanager
def recorded(record: RunRecord, job: Job, start: resume.Start) -> Iterator[None]:
    """Mark the run as running in run.json; if the block raises, as failed, with the error."""
    from finetune.data.layout import batch_mix
    from finetune.engine.job import layouts
    from finetune.engine.model import adapter_targets
    from finetune.engine.model.loading import resolve_dtype

    hosts = multinode.hosts()
    with disk.disk_errors(record.path.parent, record.path.name):
        record.update(
            status="running",
            launch=launcher.launch_id(),
            hosts=hosts,
            config=job.config.to_dict(),
            script=str(job.hooks.script) if job.hooks.script else None,
            versions=bootstrap.versions(),
            world_size=distributed.ranks().world_size,
            batch=vars(job.batch),
            learning_rate=scaled_learning_rate(job.config.training, job.batch.global_batch_size),
            backend=job.stack.backend,
            backend_reason=job.stack.reason,
            attention=job.attention.to_dict(),
            layer_kernels=job.layer_kernels.to_dict(),
            master_weights=job.master_weights.to_dict(),
            lora_coverage=covered.share if (covered := adapter_targets.coverage(job.model)) else None,
            dtype=str(resolve_dtype(job.config, job.stack)).removeprefix("torch."),
            hardware=job.hardware.to_dict(),
            patches=[verdict.to_dict() for verdict in job.stack.patches],
            ledger={name: job.data.ledgers[name] | {"layout": layout} for name, layout in layouts(job).items()},
            batch_mix=batch_mix(job.layout, job.plan()),
            data_fingerprint=job.data.fingerprint,
            data_folder=str(job.data.folder.resolve()),  # where an export finds the held-out rows
            settings=start.settings,
            resumed_with_changes=list(start.history),
        )
    interrupt.on_stuck(record.fail)
    try:
        with hang.reporting(record.path.parent / "hang"):
            yield
    except BaseException as error:
        with interrupt.deferred():  # a signal here must not leave the status at "running"
            record.fail(failures.first_failure(describe(error)))
        raise


@contextlib.contextmanager
def out_of_memory(job: Job) -> Iterator[None]:
    """Turn an out-of-memory error of the GPU into a RunError that names the settings to change."""
    import torch

    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        half = max(job.batch.per_device // 2, 1)
        remedy = (
            f"set training.per_device_train_batch_size to {half} (same global batch of "
            f"{job.batch.global_batch_size}, same result)"
            if job.batch.per_device > 1
            else f"{'lower' if job.config.data.max_length else 'set'} data.max_length"
        )
        model, training = job.config.model, job.config.training
        longest = job.config.data.max_length or int(job.layout.rows.lengths.max())
        sharded = training.strategy == "shard"
        kind, optimizer = ("true", "adamw_torch_8bit") if sharded else ("unsloth", "adamw_8bit")
        alternatives = [] if training.gradient_checkpointing else [f"training.gradient_checkpointing: {kind}"]
        if model.full_finetuning:
            if training.master_weights == "float32" and training.optim in STOCHASTIC_OPTIMIZERS:
                alternatives.append("training.master_weights: stochastic")
            alternatives += [f"training.optim: {optimizer}"] if training.adam_in_full else []
            alternatives.append("LoRA (model.full_finetuning: false)")
        elif not model.load_in_4bit:
            alternatives.append("model.load_in_4bit: true")
        if not sharded and not (model.load_in_4bit or model.load_in_8bit or model.load_in_fp8):
            alternatives.append("training.strategy: shard on several GPUs")
        raise RunError(
            f"CUDA ran out of memory: {counted(job.batch.per_device, 'row')} of up to {longest} tokens per GPU. "
            f"To use less, {remedy}" + (f", or use {' or '.join(alternatives)}" if alternatives else "") + ". "
            f"({out_of_memory_details(error)})"
        ) from error


# --- before and after training --------------------------------------------------------------------------------------


def prepare_resume(trainer: SFTTrainer, start: resume.Start, save_total_limit: int | None) -> str | None:
    """Set what the trainer writes into checkpoints and which ones it keeps. Returns the checkpoint to resume from."""
    checkpoint = start.found.path
    trainer.manifest = start.manifest(steps_per_epoch=trainer.plan.steps_per_epoch, total_steps=trainer.total_steps)
    trainer.retention = checkpoints.Retention(
        limit=save_total_limit,
        protected=frozenset({checkpoint.name} if checkpoint else ()),
        damaged=start.found.damaged,
    )
    return str(checkpoint) if checkpoint else None


def evaluate(job: Job, built: Build, questions: list[Question]) -> tuple[dict[str, Any], Result | None]:
    """Loss and scores of the current model on the held-out rows, for run.json, and its answers to `questions`."""
    loss = built.trainer.evaluate()["eval_loss"] if job.data.eval else None
    if not questions:
        return {"eval_loss": loss, "exact_match": None}, None
    result = examine(job, questions)
    built.logger.log_scores(result, built.trainer.state)
    scores = dict(result.scores)
    found = {"eval_loss": loss, "exact_match": scores.pop("exact_match")}
    return found | ({"metric": scores} if scores else {}), result


def examine(job: Job, questions: list[Question]) -> Result:
    """The current model's answers to held-out prompts, with their scores. Every rank calls it."""
    from finetune.engine.monitoring import samples

    metric = next(
        (samples.Metric(name=name, function=one) for key, name, one in job.user_code if "metric" in key), None
    )
    return samples.examine(job.model, job.tokenizer, questions, metric)


def save_final(trainer: SFTTrainer, output_dir: Path) -> dict[str, str]:
    """Save the final adapter or model into `output_dir`: on rank 0, while the other ranks wait; on all ranks if the
    model is sharded. Returns the checksum of each file by name, on rank 0."""
    sums: dict[str, str] = {}
    main = trainer.args.should_save
    if main or trainer.sharded:
        with (
            checkpoints.no_space(output_dir, "the final model"),
            checkpoints.final_files(output_dir, main=main) as folder,
        ):
            if trainer.sharded:
                distributed.barrier()  # the folder exists
            trainer.save_model(str(folder), _internal_call=True)  # nothing is pushed to the hub
            if main:  # every rank's files are written when save_model returns
                written = sorted(path for path in folder.iterdir() if path.is_file())
                sums = dict(zip((path.name for path in written), checksums(written), strict=True))
    distributed.barrier()
    return sums


def export(job: Job, record: RunRecord) -> None:
    """Call the `save` function of the user's script. The other ranks have exited, so none waits in a collective.

    Raises:
        RunError: the function failed. The final model is saved already.
    """
    try:
        job.hooks.call("save", job.model, job.tokenizer)
    except BaseException as error:
        record.fail(describe(error))
        raise


def write_result(config: Config, result: dict[str, Any]) -> None:
    """Write the content of run.json to the file of --json, on rank 0."""
    if config.json and distributed.ranks().is_main:
        write_json(config.json, redact_tree(result))
