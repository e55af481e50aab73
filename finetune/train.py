"""`accelerate launch -m finetune.train`: the story of a training run, top to bottom."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from finetune import (
    distributed,
    interrupt,
    invariants,
    keeping,
    launcher,
    metrics,
    model_files,
    optimizers,
    restart,
    resume,
    runlock,
    strategy,
)
from finetune.config import Batch, Config, dump_yaml, resolve_batch, scaled_learning_rate
from finetune.errors import RunError, UserError, describe
from finetune.hardware import when_full
from finetune.hooks import NO_HOOKS, Hooks
from finetune.record import RunRecord, write_json
from finetune.redact import redact_tree
from finetune.verb import DONE, INTERRUPTED, console, run_verb

if TYPE_CHECKING:
    from finetune.bootstrap import Stack
    from finetune.job import Job
    from finetune.samples import Question
    from finetune.trainer import SFTTrainer

STARTED = time.time()


def main(argv: list[str] | None = None) -> int:
    """Train, or with --dry-run find out whether training would work. Returns the exit code."""
    return run_verb("train", argv, run)


def run(config: Config, witness: Path | None = None, without: Collection[str] = (), hooks: Hooks = NO_HOOKS) -> int:
    """Everything after the configuration is known to be sound: check, load, train, save.

    Args:
        witness: folder for the first gradients and the last weights, for `finetune parity`.
        without: names of patches to leave out, needed or not.
        hooks: functions of the user's script.
    """
    if not config.demo:
        check_present(config)
    if not config.dry_run:
        strategy.apply(config)
    else:
        from finetune import dryrun

        return dryrun.run(config, hooks)
    config, demo = with_demo(config)
    with runlock.held(Path(config.training.output_dir)):
        return run_alone(config, demo, witness, without, hooks)


def run_alone(
    config: Config, demo: ModuleType | None, witness: Path | None, without: Collection[str], hooks: Hooks
) -> int:
    """`run`, as the only one that writes to the output folder."""
    config = restart.continued(config)
    batch = resolve_batch(config.training, distributed.ranks().world_size, config.data)
    output_dir = Path(config.training.output_dir)
    asked = config.training.resume_from_checkpoint
    keeping.check_output(output_dir, resuming=bool(asked), overwrite=config.training.overwrite_output_dir)
    keeping.find(output_dir, asked, verify=False)  # a path that is wrong is refused before anything is loaded

    from finetune import bootstrap

    stack = bootstrap.start(config.model.backend, config.logging.log_level, without)
    if demo:
        console().print(demo.introduction(), highlight=False, soft_wrap=True)
        demo.materialise(bootstrap.cache_folder())
    record = RunRecord(output_dir)
    job, start = open_checked(config, batch, stack, record, hooks)
    if (done := resume.finished(config, start, job.plan().digest(), total_steps(job))) is not None:
        say_finished(config, done)
        distributed.finish()
        return DONE
    check_space(config, job.model)
    take_over(output_dir, overwrite=config.training.overwrite_output_dir)
    introduce(job, start)
    with recorded(record, job, start):
        stopped = train(job, record, start, witness)
    if config.json and distributed.ranks().is_main:
        write_json(config.json, redact_tree(record.content))
    distributed.finish()  # nothing is left for a launcher to cut short when a rank returns another code than 0
    if hooks.save is not None and distributed.ranks().is_main and not stopped:
        export(job, record)
    return INTERRUPTED if stopped else DONE


def open_checked(
    config: Config, batch: Batch, stack: Stack, record: RunRecord, hooks: Hooks
) -> tuple[Job, resume.Start]:
    """The job and where it starts: everything that must agree with a checkpoint is compared before the first write.

    Raises:
        UserError, RunError: with what is wrong and what to do; the output folder is as it was.
    """
    from finetune.job import open_job
    from finetune.model import resolve_dtype

    start = resume.Start()

    def choose_start() -> None:
        nonlocal start
        start = resume.prepare(config, batch, str(resolve_dtype(config, stack)).removeprefix("torch."))

    job = open_job(
        config,
        batch,
        stack,
        on_failure=lambda message: record.fail(message),
        hooks=hooks,
        before_loading=choose_start,
    )
    return job, resume.confirm(start, config, job.model, job.plan().digest(), total_steps(job))


def total_steps(job: Job) -> int:
    """Optimizer steps of the whole run."""
    return resume.total_steps(job.config, job.plan().steps_per_epoch)


def take_over(output_dir: Path, *, overwrite: bool) -> None:
    """Remove what earlier runs left behind: partial files, and with `overwrite` the whole run. All ranks call it."""
    if distributed.ranks().is_main:
        keeping.remove_leftovers(output_dir)
        if overwrite:
            keeping.clear(output_dir)
    distributed.barrier()


def with_demo(config: Config) -> tuple[Config, ModuleType | None]:
    """The configuration and, where no model is named, the demo that fills it in."""
    if not config.demo:
        return config, None
    from finetune import demo
    from finetune.bootstrap import cache_folder

    return demo.configure(config, cache_folder(), distributed.ranks().world_size), demo


def check_present(config: Config) -> None:
    """The model's files, the data files and the optimiser's package are there: known before anything heavy is imported.

    Raises:
        UserError: one is missing, or is nothing that can be read or trained.
    """
    from finetune.data import sources

    optimizers.check(config.training.optim)
    model_files.check(config)
    model_files.check_data(config)
    for given in (config.data.train_file, config.data.eval_file):
        if given is not None:
            sources.expand([given] if isinstance(given, str) else given)


def train(job: Job, record: RunRecord, start: resume.Start, witness: Path | None = None) -> bool:
    """Evaluate, train, save and evaluate again. True when a signal ended it early, after a checkpoint."""
    from finetune import samples, scoring

    output_dir = Path(job.config.training.output_dir)
    trainer, telling, stop = build_trainer(job, output_dir, witness)
    checkpoint = str(start.found.path) if start.found.path else None
    trainer.manifest = start.manifest(steps_per_epoch=trainer.plan.steps_per_epoch, total_steps=trainer.total_steps)
    trainer.retention = keeping.Retention(
        limit=job.config.training.save_total_limit,
        protected=frozenset({start.found.path.name} if start.found.path else ()),
        damaged=start.found.damaged,
    )
    record.update(
        plan=trainer.plan.digest(),
        total_steps=trainer.total_steps,
        resumed_from=checkpoint,
        invariants=invariants.check(trainer),
        loss_normalised_by=invariants.divisor(trainer),
    )
    held_out, count = job.data.eval, job.config.logging.generate_samples
    asked = samples.questions(held_out, job.tokenizer, count) if held_out else []

    with contextlib.closing(telling), out_of_memory(job):
        before, answers_before = measure(job, trainer, asked)
        with interrupt.deferred():
            trainer.train(resume_from_checkpoint=checkpoint, rebuild=start.rebuild)
        first_step = telling.first_step_at - STARTED if telling.first_step_at else None
        results = telling.results()
        prediction = scoring.score(job, results)
        scoring.write(telling.writer, prediction, trainer.state.global_step)
        # The model is saved below even if the disk has no room for run.json.
        record.try_update(
            steps=trainer.state.global_step, seconds_to_first_step=first_step, prediction=prediction, **results
        )
        if stop.stopped:
            record.update(status="interrupted", interrupted_by=interrupt.reason())
            say_stopped(output_dir / f"checkpoint-{trainer.state.global_step}")
            return True
        with interrupt.finishing():
            save(trainer, output_dir)
        after, answers_after = measure(job, trainer, asked)

    scores = {f"{name}_before": before[name] for name in before} | {f"{name}_after": after[name] for name in after}
    record.update(status="done", **scores)
    if asked:
        console().print(samples.table(job.tokenizer, asked, answers_before, answers_after))
    conclude(record.content, output_dir)
    return False


def measure(job: Job, trainer: SFTTrainer, asked: list[Question]) -> tuple[dict[str, float | None], list[str]]:
    """The model as it is now on the held-out rows: loss, exact match, and its answers to `asked`."""
    from finetune import samples

    loss = trainer.evaluate()["eval_loss"] if job.data.eval else None
    answers = samples.answers(job.model, job.tokenizer, asked) if asked else []
    right = metrics.exact_match(answers, [question.reference for question in asked]) if asked else None
    return {"eval_loss": loss, "exact_match": right}, answers


def build_trainer(job: Job, output_dir: Path, witness: Path | None = None) -> tuple[SFTTrainer, Any, Any]:
    """The trainer with its callbacks: (trainer, what it records, what stops it)."""
    from finetune import bootstrap, callbacks
    from finetune.trainer import SFTTrainer, arguments

    config, layout = job.config, job.layout
    plan = job.plan()
    args = arguments(config, job.stack, job.batch, evaluate=job.data.eval is not None)
    total = resume.total_steps(config, plan.steps_per_epoch)
    is_main = distributed.ranks().is_main
    telling = callbacks.Record(
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
    watching = [callbacks.Witness(witness)] if witness else []
    profile = [callbacks.Profile(output_dir / "runs", steps)] if steps else []
    trainer = SFTTrainer(
        model=job.model,
        args=args,
        tokenizer=job.tokenizer,
        stack=job.stack,
        plan=plan,
        layout=layout,
        eval_layout=job.eval_layout,
        callbacks=[telling, stop, callbacks.FirstGradients(), *profile, *watching],
    )
    telling.trainer = trainer
    with bootstrap.quiet_ranks():
        job.hooks.call("trainer", trainer)
    complete_early_stopping(trainer)
    return trainer, telling, stop


def complete_early_stopping(trainer: SFTTrainer) -> None:
    """Let an EarlyStoppingCallback of the script's watch the held-out loss if the script names no other metric.

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


def save(trainer: SFTTrainer, output_dir: Path) -> None:
    """The final adapter or model into `output_dir`, by one rank."""
    if distributed.ranks().is_main:
        with keeping.no_space(output_dir, "the final model"), keeping.final_files(output_dir) as folder:
            trainer.save_model(str(folder))
    distributed.barrier()


def export(job: Job, record: RunRecord) -> None:
    """The script's own exports. The other ranks have gone, so that none waits in a collective however long they take.

    Raises:
        RunError: the script's function failed. The final model is saved already.
    """
    try:
        job.hooks.call("save", job.model, job.tokenizer)
    except BaseException as error:
        record.fail(describe(error))
        raise


def check_space(config: Config, model: Any) -> None:
    """Room for the final weights and, where there are checkpoints, for one (weights, and two float32 moments of each).

    Raises:
        UserError: the disk has less.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    needed, what = sum(parameter.numel() * parameter.element_size() for parameter in trainable), "the final model"
    if config.training.save_steps:
        needed, what = 2 * needed + 8 * sum(parameter.numel() for parameter in trainable), f"a checkpoint and {what}"
    keeping.check_space(Path(config.training.output_dir), needed + keeping.SPARE_BYTES, what)


# --- what is said and recorded --------------------------------------------------------------------------------------


def introduce(job: Job, start: resume.Start) -> None:
    """Say what is about to run."""
    from finetune.data import ledger

    say = console().print
    for sentence in (*start.found.skipped, *start.notes):
        say(f"warning: {sentence}", style="yellow", highlight=False, soft_wrap=True, markup=False)
    for change in start.changes:
        text = f"changed since {start.found.path}: {change['key']} was {change['was']}, now {change['now']}"
        say(text, style="yellow", highlight=False, soft_wrap=True, markup=False)
    if job.config.training.resume_from_checkpoint and start.found.path is None:
        say("warning: there is no checkpoint to resume from; the run starts at step 0", style="yellow", soft_wrap=True)
    world = distributed.ranks().world_size
    kind = (
        "full fine-tuning"
        if job.config.model.full_finetuning
        else ("QLoRA" if job.config.model.load_in_4bit else "8-bit LoRA" if job.config.model.load_in_8bit else "LoRA")
    )
    say(
        f"{kind} of {job.config.model.model_name_or_path} with {job.stack.backend} ({job.stack.reason}) on {world} x "
        f"{job.hardware.name}: {job.size.trainable_parameters:,} trainable parameters",
        highlight=False,
        soft_wrap=True,
    )
    batch = job.batch
    rows = "rows" if job.unpacked_because else f"packs of {job.layout.packs.pack_length} tokens"
    say(
        f"A step is {batch.global_size} {rows} = {world} ranks x {batch.per_device} rows x {batch.accumulation} "
        "accumulated",
        highlight=False,
        soft_wrap=True,
    )
    training = job.config.training
    if training.learning_rate_rule != "none":
        say(
            f"Learning rate {scaled_learning_rate(training, batch.global_size):.3g}: {training.learning_rate:.3g} for "
            f"a global batch of {training.base_global_batch_size}, by the rule {training.learning_rate_rule}",
            highlight=False,
            soft_wrap=True,
        )
    if job.unpacked_because:
        warned = job.config.data.packing  # asked for, and not what happens
        say(
            ("warning: " if warned else "") + f"Rows are padded documents, not packs: {job.unpacked_because}",
            style="yellow" if warned else None,
            highlight=False,
            soft_wrap=True,
        )
    for verdict in job.stack.patches:
        if verdict.applied:
            say(f"patched: {verdict.name} ({verdict.reason})", soft_wrap=True)
    if job.config.rows_from_script:
        say(f"Rows: made by {job.config.script}, and kept in {job.data.folder}", highlight=False, soft_wrap=True)
    say(f"Row format: {job.data.format}", highlight=False, soft_wrap=True, markup=False)
    say(ledger.table(job.data.ledgers, layouts(job)))


def layouts(job: Job) -> dict[str, dict[str, Any]]:
    """What the rows of each split are made of."""
    found = {"train": job.layout.to_dict()}
    return found | ({"eval": job.eval_layout.to_dict()} if job.eval_layout else {})


def say_finished(config: Config, done: dict[str, Any]) -> None:
    """Say that there is nothing to do, and write the earlier results where --json asks for them."""
    if not distributed.ranks().is_main:
        return
    steps = done.get("steps")
    console().print(
        f"The run in {config.training.output_dir} is already finished: {steps} of {done.get('total_steps', steps)} "
        "steps. Nothing was changed. A higher training.max_steps (or training.num_train_epochs) continues it.",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    if config.json:
        write_json(config.json, done)


def say_stopped(checkpoint: Path) -> None:
    """Say where a run that was interrupted can go on."""
    console().print(
        f"Stopped by {interrupt.reason()}; {checkpoint} is saved. Go on with --training.resume_from_checkpoint true.",
        soft_wrap=True,
    )


def conclude(results: dict[str, Any], output_dir: Path) -> None:
    """Say how it ended."""
    from finetune import scoring

    parts = [f"{results['steps']} steps, {results['tokens']:,} tokens"]
    for name, label in (("eval_loss", "held-out loss"), ("exact_match", "held-out exact match")):
        early, late = results[f"{name}_before"], results[f"{name}_after"]
        if late is not None:
            parts.append(f"{label} {early:.4f} -> {late:.4f}")
    if results["tokens_per_second_per_gpu"]:
        parts.append(f"{results['tokens_per_second_per_gpu']:,.0f} tokens/s per device")
    console().print("; ".join(parts) + ".", highlight=False, soft_wrap=True)
    console().print(scoring.sentence(results["prediction"]), highlight=False, soft_wrap=True)
    console().print(
        f"The model, run.json and runs/ (tensorboard --logdir {output_dir}) are in {output_dir}.", soft_wrap=True
    )


@contextlib.contextmanager
def recorded(record: RunRecord, job: Job, start: resume.Start) -> Iterator[None]:
    """run.json from the first moment, with the error when there is one."""
    from finetune import bootstrap
    from finetune.model import resolve_dtype

    with keeping.no_space(record.path.parent, record.path.name):
        record.update(
            status="running",
            launch=launcher.launch_id(),
            config=job.config.to_dict(),
            script=str(job.hooks.script) if job.hooks.script else None,
            versions=bootstrap.versions(),
            world_size=distributed.ranks().world_size,
            batch=vars(job.batch),
            learning_rate=scaled_learning_rate(job.config.training, job.batch.global_size),
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
    try:
        yield
    except BaseException as error:
        record.fail(distributed.first_failure(describe(error)))
        raise


@contextlib.contextmanager
def out_of_memory(job: Job) -> Iterator[None]:
    """Say what to change when the GPU is full."""
    import torch

    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        half = max(job.batch.per_device // 2, 1)
        less = (
            f"set training.per_device_train_batch_size to {half} (the global batch stays {job.batch.global_size}: more "
            "accumulation, the same result)"
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
            f"GPU. To go on, {less}" + (f"; {' or '.join(others)} needs less, too" if others else "") + ". "
            f"({when_full(error)})"
        ) from error


if __name__ == "__main__":
    raise SystemExit(main())
