"""`accelerate launch -m finetune.train`: the story of a training run, top to bottom."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from finetune.config import Config, resolve_batch
from finetune.engine import checkpoints, invariants, metrics, report, restart, resume, session
from finetune.engine.record import RunRecord
from finetune.errors import describe
from finetune.measure import strategy
from finetune.redact import redact_tree
from finetune.runtime import distributed, interrupt, runlock
from finetune.runtime.command import DONE, INTERRUPTED, console, print_line, run_command
from finetune.runtime.files import write_json
from finetune.runtime.hooks import NO_HOOKS, Hooks

if TYPE_CHECKING:
    from finetune.engine.job import Job
    from finetune.engine.samples import Question
    from finetune.engine.trainer import SFTTrainer

STARTED = time.time()


def main(argv: list[str] | None = None) -> int:
    """Train, or with --dry-run find out whether training would work. Returns the exit code."""
    return run_command("train", argv, run)


def run(config: Config, parity_dump: Path | None = None, without: Collection[str] = (), hooks: Hooks = NO_HOOKS) -> int:
    """Everything after the configuration has been checked: look for files, load, train, save.

    Args:
        parity_dump: folder for the first gradients and the last weights, for `finetune parity`.
        without: names of patches to leave out, needed or not.
        hooks: functions of the user's script.
    """
    session.check_present(config)
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
    """`run`, while no other process writes to the output folder."""
    batch = resolve_batch(config.training, distributed.ranks().world_size, config.data)
    output_dir, asked = Path(config.training.output_dir), config.training.resume_from_checkpoint
    overwrite = config.training.overwrite_output_dir
    checkpoints.check_output(output_dir, resuming=bool(asked), overwrite=overwrite)
    checkpoints.find(output_dir, asked, verify=False)  # a wrong path is refused before anything is loaded
    if demo is not None:
        print_line(demo.introduction())
    record = RunRecord(output_dir)
    job, start = session.open_and_compare(config, batch, demo, record, without, hooks)
    if (done := resume.finished(config, start, job.plan().digest(), session.total_steps(job))) is not None:
        report.print_finished(config.training.output_dir, done)
        write_result(config, done)
        distributed.finish()
        return DONE
    session.check_space(config, job.model)
    checkpoints.take_over(output_dir, overwrite=overwrite)
    report.print_introduction(job, start)
    with session.recorded(record, job, start):
        stopped = train(job, record, start, parity_dump)
    write_result(config, record.content)
    distributed.finish()  # nothing is left for a launcher to cut short when a rank returns another code than 0
    if hooks.save is not None and distributed.ranks().is_main and not stopped:
        export(job, record)
    return INTERRUPTED if stopped else DONE


def write_result(config: Config, result: dict) -> None:
    """The content of run.json to the file of --json."""
    if config.json and distributed.ranks().is_main:
        write_json(config.json, redact_tree(result))


def train(job: Job, record: RunRecord, start: resume.Start, parity_dump: Path | None = None) -> bool:
    """Evaluate, train, save and evaluate again. True when a signal ended it early, after a checkpoint."""
    from finetune.engine import samples
    from finetune.measure import scoring

    output_dir = Path(job.config.training.output_dir)
    built = session.build_trainer(job, output_dir, parity_dump)
    trainer, logger = built.trainer, built.logger
    checkpoint = str(start.found.path) if start.found.path else None
    trainer.manifest = start.manifest(steps_per_epoch=trainer.plan.steps_per_epoch, total_steps=trainer.total_steps)
    trainer.retention = checkpoints.Retention(
        limit=job.config.training.save_total_limit,
        protected=frozenset({start.found.path.name} if start.found.path else ()),
        damaged=start.found.damaged,
    )
    record.update(
        plan=trainer.plan.digest(),
        total_steps=trainer.total_steps,
        resumed_from=checkpoint,
        invariants=invariants.check(trainer),
        loss_normalized_by=invariants.divisor(trainer),
    )
    held_out, count = job.data.eval, job.config.logging.generate_samples
    asked = samples.questions(held_out, job.tokenizer, count) if held_out else []

    with contextlib.closing(logger), session.out_of_memory(job):
        before, answers_before = measure(job, trainer, asked)
        with interrupt.deferred():
            trainer.train(resume_from_checkpoint=checkpoint, rebuild=start.rebuild)
        first_step = logger.first_step_at - STARTED if logger.first_step_at else None
        results = logger.results()
        prediction = scoring.score(job, results)
        scoring.write(logger.writer, prediction, trainer.state.global_step)
        # The model is saved below even if the disk has no room for run.json.
        record.try_update(
            steps=trainer.state.global_step, seconds_to_first_step=first_step, prediction=prediction, **results
        )
        if built.stop.stopped:
            record.update(status="interrupted", interrupted_by=interrupt.reason())
            report.print_stopped(output_dir / f"checkpoint-{trainer.state.global_step}")
            return True
        with interrupt.finishing():
            save(trainer, output_dir)
        after, answers_after = measure(job, trainer, asked)

    scores = {f"{name}_before": before[name] for name in before} | {f"{name}_after": after[name] for name in after}
    record.update(status="done", **scores)
    if asked:
        console().print(samples.table(job.tokenizer, asked, answers_before, answers_after))
    report.print_conclusion(record.content, output_dir, scoring.sentence(record.content["prediction"]))
    return False


def measure(job: Job, trainer: SFTTrainer, asked: list[Question]) -> tuple[dict[str, float | None], list[str]]:
    """Loss and exact match of the current model on the held-out rows, and its answers to `asked`."""
    from finetune.engine import samples

    loss = trainer.evaluate()["eval_loss"] if job.data.eval else None
    answers = samples.answers(job.model, job.tokenizer, asked) if asked else []
    right = metrics.exact_match(answers, [question.reference for question in asked]) if asked else None
    return {"eval_loss": loss, "exact_match": right}, answers


def save(trainer: SFTTrainer, output_dir: Path) -> None:
    """The final adapter or model into `output_dir`, by one rank."""
    if distributed.ranks().is_main:
        with checkpoints.no_space(output_dir, "the final model"), checkpoints.final_files(output_dir) as folder:
            trainer.save_model(str(folder))
    distributed.barrier()


def export(job: Job, record: RunRecord) -> None:
    """The exports of the user's script. The other ranks have ended, so none waits in a collective meanwhile.

    Raises:
        RunError: the script's function failed. The final model is saved already.
    """
    try:
        job.hooks.call("save", job.model, job.tokenizer)
    except BaseException as error:
        record.fail(describe(error))
        raise


if __name__ == "__main__":
    raise SystemExit(main())
