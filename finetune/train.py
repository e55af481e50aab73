"""`accelerate launch -m finetune.train`: the story of a training run, top to bottom."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from finetune.config import Config
from finetune.engine import checkpoints, invariants, read_ahead, report, restart, resume, session
from finetune.engine.record import RunRecord
from finetune.errors import RunError
from finetune.measure import strategy
from finetune.runtime import distributed, interrupt, process_group, runlock, startup
from finetune.runtime.command import DONE, INTERRUPTED, console, print_line, run_command
from finetune.runtime.hooks import NO_HOOKS, Hooks

if TYPE_CHECKING:
    from finetune.engine.job import Job
    from finetune.measure import micro_batch


def main(argv: list[str] | None = None) -> int:
    """Train, or with --dry-run check whether training would work. Returns the exit code."""
    return run_command("train", argv, run)


def run(config: Config, parity_dump: Path | None = None, without: Collection[str] = (), hooks: Hooks = NO_HOOKS) -> int:
    """Everything after the configuration has been checked: find the files, load, train, save. Returns the exit code.

    Args:
        parity_dump: folder for the first gradients and the last weights, for `finetune parity`.
        without: names of patches to skip, even if their defects are present.
        hooks: functions of the user's script.
    """
    session.check_present(config)
    read_ahead.start(config)
    if config.dry_run:
        from finetune import dryrun

        return dryrun.run(config, hooks)
    strategy.apply(config)
    config, demo = session.with_demo(config)
    with runlock.held(Path(config.training.output_dir)):
        return run_locked(restart.continued(config), demo, parity_dump, without, hooks)


def run_locked(
    config: Config, demo: ModuleType | None, parity_dump: Path | None, without: Collection[str], hooks: Hooks
) -> int:
    """`run`, while holding the lock on the output folder."""
    from finetune.measure import micro_batch  # imports torch

    output_dir, resume_from = Path(config.training.output_dir), config.training.resume_from_checkpoint
    overwrite = config.training.overwrite_output_dir
    checkpoints.check_output(output_dir, resuming=bool(resume_from), overwrite=overwrite)
    found = checkpoints.find(output_dir, resume_from, verify=False)  # report a wrong path before anything is loaded
    batch = resume.batch_of(config, found.manifest, distributed.ranks().world_size)
    if demo is not None:
        print_line(demo.introduction())
    record = RunRecord(output_dir)
    job, start = session.open_and_compare(config, batch, demo, record, without, hooks)
    if (done := resume.finished(config, start, job.plan().digest(), session.total_steps(job))) is not None:
        report.print_finished(config.training.output_dir, done)
        session.write_result(config, done)
        process_group.finish()
        return DONE
    session.check_space(config, job.model)
    session.check_saving(job)
    size = micro_batch.choose(job, start.per_device, distributed.ranks().world_size)
    job.batch = micro_batch.divided(job.batch, size.per_device)
    checkpoints.take_over(output_dir, overwrite=overwrite)
    report.print_introduction(job, start)
    with session.recorded(record, job, start):
        stopped = train(job, record, start, size, parity_dump)
    session.write_result(config, record.content)
    process_group.finish()  # before any rank returns a code other than 0, on which a launcher ends the other ranks
    if hooks.save is not None and distributed.ranks().is_main and not stopped:
        session.export(job, record)
    return INTERRUPTED if stopped else DONE


def train(
    job: Job, record: RunRecord, start: resume.Start, size: micro_batch.Choice, parity_dump: Path | None = None
) -> bool:
    """Evaluate, train, save and evaluate again. True if a signal ended training early, after a checkpoint."""
    from finetune import review
    from finetune.engine import best, samples, shard
    from finetune.measure import measurements, micro_batch, scoring
    from finetune.review.rules.learning import divergence

    output_dir = Path(job.config.training.output_dir)
    held_out, count = job.data.eval, job.config.logging.generate_samples
    questions = samples.questions(held_out, job.tokenizer, count) if held_out else []
    pages = session.dashboard(job, record, questions, review.markdown, divergence)
    built = session.build_trainer(job, output_dir, parity_dump, start_step=start.found.step, dashboard=pages)
    trainer, logger = built.trainer, built.logger
    checkpoint = session.prepare_resume(trainer, start, job.config.training.save_total_limit)
    record.update(
        plan=trainer.plan.digest(),
        total_steps=trainer.total_steps,
        resumed_from=checkpoint,
        invariants=invariants.check(trainer),
        sharding=shard.record(trainer.model, job.config.training.optim, trainer.weights) if trainer.sharded else None,
        loss_normalized_by=invariants.divisor(trainer),
        micro_batch=size.to_dict(),
    )

    def find_size() -> None:
        found = micro_batch.find(job, trainer)
        job.batch = micro_batch.divided(job.batch, found.per_device)
        trainer.set_batch(job.batch)
        report.print_micro_batch(job, found)
        record.update(batch=vars(job.batch), micro_batch=found.to_dict())
        start_up.ended("micro-batch")

    if size.searches:
        trainer.before_first_step = find_size
    start_up = startup.of_this_process()
    start_up.ended("trainer")
    with logger, session.out_of_memory(job):
        before, answers_before = session.evaluate(job, built, questions)
        start_up.ended("evaluation")
        with interrupt.deferred():
            trainer.train(resume_from_checkpoint=checkpoint, rebuild=start.rebuild)
        results = logger.results()
        prediction = scoring.score(job, results)
        scoring.write(logger.writer, prediction, trainer.state.global_step)
        # If the disk has no room for run.json, the model is still saved below.
        record.try_update(
            steps=trainer.state.global_step,
            prediction=prediction,
            micro_batch_search=measurements.find_sizes(measurements.facts(job)),
            attention=session.attention_computed(job, trainer),
            **results,
        )
        if logger.diverged is not None:
            checkpoint = output_dir / f"checkpoint-{trainer.state.global_step}"
            raise RunError(f"{logger.diverged} {checkpoint} is saved. Lower training.learning_rate.")
        if built.stop.stopped:
            record.update(status="interrupted", interrupted_by=interrupt.reason())
            report.print_stopped(output_dir / f"checkpoint-{trainer.state.global_step}")
            return True
        found, stopped_at = best.summary(trainer), built.best.stopped_at if built.best else None
        rule = job.config.training.early_stopping
        record.try_update(best=found, early_stopping=rule | {"step": stopped_at} if rule and stopped_at else None)
        logger.show_best(report.print_best(found, stopped_at, trainer.total_steps), trainer.state.global_step)
        with interrupt.finishing():
            sums = session.save_final(trainer, output_dir)
        after, answers_after = session.evaluate(job, built, questions)
        if answers_after is not None:
            logger.show_samples(answers_after, trainer.state.global_step)

    scores = {f"{name}_before": before[name] for name in before} | {f"{name}_after": after[name] for name in after}
    record.update(status="done", final_files=sums, answers_scored=len(questions) or None, **scores)
    if answers_before is not None and answers_after is not None:
        console().print(samples.table(answers_before, answers_after))
    report.print_conclusion(record.content, output_dir, scoring.sentence(record.content["prediction"]))
    return False


if __name__ == "__main__":
    raise SystemExit(main())
