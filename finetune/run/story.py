"""The one story of a run, behind both front doors: lock, resume, record, training, end.

A door says what it does in its own way (`Door`). `train` opens a configuration, `drop_in` the trainer of a script.
"""

from __future__ import annotations

import abc
import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import review
from finetune.config import Config
from finetune.engine.checkpoint import restart, resume
from finetune.engine.record import RunRecord
from finetune.engine.session import building, disk_checks, opening, out_of_memory, report
from finetune.errors import RunError
from finetune.run import final_model, recording
from finetune.runtime import runlock, startup
from finetune.runtime.command import console, print_line
from finetune.runtime.ranks import distributed, interrupt
from finetune.runtime.types import JsonObject

if TYPE_CHECKING:
    from finetune.engine.checkpoint.resume import StartPoint
    from finetune.engine.job import Job
    from finetune.engine.monitoring.run_logger import Dashboard
    from finetune.engine.monitoring.samples import Question, SampleResult
    from finetune.engine.session.building import BuiltTrainer


class Door(abc.ABC):
    """What a front door does in its own way. It need not override what a run from a configuration does."""

    def named(self, text: str) -> str:
        """A text with the settings in it called as the user calls them."""
        return text

    @abc.abstractmethod
    def enter(self, config: Config, record: RunRecord) -> tuple[Job, StartPoint]:
        """The job and where it starts. Compares everything that must match the checkpoint, and writes nothing."""

    def finished(self, job: Job, start: StartPoint) -> JsonObject | None:
        """The run.json of the run that is asked for, if it is finished already."""
        return resume.finished_record(job.config, start, job.plan().digest(), opening.total_steps(job))

    @abc.abstractmethod
    def leave_finished(self, job: Job, start: StartPoint, done: JsonObject) -> object:
        """Change nothing of a finished run, whose run.json is `done`. Returns what the trainer would return."""

    @abc.abstractmethod
    def take_folder(self, job: Job, start: StartPoint) -> None:
        """Make room in the output folder."""

    @abc.abstractmethod
    def trainer(self, job: Job, start: StartPoint, pages: Dashboard) -> AbstractContextManager[BuiltTrainer]:
        """The trainer with the callbacks of this run, for the time of the run."""

    @abc.abstractmethod
    def resume_with(self, job: Job) -> str:
        """How the user resumes a run that was stopped."""

    def settled(self, job: Job) -> None:  # noqa: B027  nothing to do for most
        """Called with what was measured before the first step."""

    def train(self, trainer: Any, checkpoint: str | None, *, rebuild: bool) -> object:
        """Train to the end. Returns what the trainer returns."""
        return trainer.train(resume_from_checkpoint=checkpoint, rebuild=rebuild)

    def evaluate(
        self, job: Job, built: BuiltTrainer, questions: list[Question], *, trained: bool
    ) -> tuple[JsonObject, SampleResult | None]:
        """Loss and scores of the model before or after training, for run.json, and its answers to `questions`."""
        loss = built.trainer.evaluate()["eval_loss"] if job.data.eval else None
        if not questions:
            return {"eval_loss": loss, "exact_match": None}, None
        result = answer_and_score(job, questions)
        built.logger.log_scores(result, built.trainer.state)
        scores = dict(result.scores)
        found = {"eval_loss": loss, "exact_match": scores.pop("exact_match"), "broken_answers": result.broken}
        return found | ({"metric": scores} if scores else {}), result

    def save(self, trainer: Any, output_dir: Path) -> dict[str, str] | None:
        """Save the final model. Returns the checksum of each file by name, on rank 0; None if that is left to the
        script."""
        with interrupt.finishing():
            return final_model.save_final(trainer, output_dir)

    @abc.abstractmethod
    def close(self, job: Job, record: RunRecord, *, ended: bool) -> None:
        """The last thing that is done under the lock, after training if it has `ended`."""


def answer_and_score(job: Job, questions: list[Question]) -> SampleResult:
    """The current model's answers to held-out prompts, with their scores. Every rank calls it."""
    from finetune.engine.monitoring import samples

    metric = next(
        (samples.Metric(name=name, function=one) for key, name, one in job.user_code if "metric" in key), None
    )
    return samples.answer_and_score(job.model, job.tokenizer, questions, metric)


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended: whether a signal stopped it, after a checkpoint; the run.json of a run that was finished
    already; and what the trainer returned."""

    stopped: bool = False
    done: JsonObject | None = None
    output: Any = None


def run(door: Door, config: Config, record: RunRecord) -> RunOutcome:
    """Train as `config` says.

    Raises:
        UserError, RunError: with what is wrong and what to do. run.json has the error if training had begun.
    """
    with runlock.lock(record.path.parent, functools.partial(print_line, style="yellow")):
        job, start = door.enter(restart.resume_after_restart(config), record)
        if (done := door.finished(job, start)) is not None:
            report.print_finished(job.config, done, door.named)
            return RunOutcome(done=done, output=door.leave_finished(job, start, done))
        disk_checks.check_space(job.config, job.model)
        disk_checks.check_saving(job)
        from finetune.measure.settle import settle  # after the backend, which the door has started

        job = settle(job, distributed.ranks().world_size, start)
        door.take_folder(job, start)
        report.print_introduction(job, start)
        report.print_activations(job)
        story = _Run(door=door, record=record, start=start, job=job)
        with recording.record_run(record, job, start):
            outcome = story.train()
        door.close(story.job, record, ended=not outcome.stopped)
        return outcome


@dataclass(kw_only=True)
class _Run:
    """A run from its record on. `job` is settled again, by measurements, before the first step."""

    door: Door
    record: RunRecord
    start: StartPoint
    job: Job

    def train(self) -> RunOutcome:
        """Evaluate, train, save and evaluate again."""
        from finetune.engine.job import layout_facts
        from finetune.engine.monitoring import samples, tensorboard_pages
        from finetune.engine.monitoring.run_logger import Dashboard
        from finetune.measure import longest_row, scoring

        door, record, job = self.door, self.record, self.job
        output_dir, held_out, count = record.path.parent, job.data.eval, job.config.logging.generate_samples
        questions = samples.questions(held_out, job.tokenizer, count) if held_out and count else []
        rows = job.config.logging.include_rows
        pages = Dashboard(
            texts={"1 data": tensorboard_pages.data_page(job.data.ledgers, layout_facts(job), include_rows=rows)},
            divergence=review.divergence if job.config.training.stop_on_divergence else None,
            samples=(lambda: answer_and_score(job, questions)) if questions else None,
            include_rows=rows,
        )
        explained = out_of_memory.explain_out_of_memory(lambda: self.job, longest_row.known_remedy)
        with door.trainer(job, self.start, pages) as built, built.logger, explained:
            trainer, logger = built.trainer, built.logger
            checkpoint = building.prepare_resume(trainer, self.start, job.config.training.save_total_limit)
            self._begin(trainer, checkpoint)
            before, answers_before = door.evaluate(job, built, questions, trained=False)
            startup.current().ended("evaluation")
            with interrupt.deferred():
                output = door.train(trainer, checkpoint, rebuild=self.start.rebuild)
            self._record_results(built)
            if built.stop.stopped:
                record.update(status="interrupted", interrupted_by=interrupt.reason())
                saved = f"{output_dir / f'checkpoint-{trainer.state.global_step}'} is saved"
                print_line(f"Stopped by {interrupt.reason()}; {saved}. Resume with:\n  {door.resume_with(self.job)}")
                return RunOutcome(stopped=True)
            sums = door.save(trainer, output_dir)
            after, answers_after = door.evaluate(job, built, questions, trained=True)
            if answers_after is not None:
                logger.show_samples(answers_after, trainer.state.global_step)
            scores = {f"{name}_before": before[name] for name in before}
            scores |= {f"{name}_after": after[name] for name in after}
            # A disk without room for run.json must not keep a script from saving its model.
            write = record.update if sums is not None else record.try_update
            # Before the logger ends: its last page reviews the run by this record.
            write(status="done", final_files=sums, answers_scored=len(questions) or None, **scores)

        if answers_before is not None and answers_after is not None:
            console().print(samples.table(answers_before, answers_after))
        report.print_conclusion(record.content, output_dir, scoring.sentence(record.content["prediction"]))
        if distributed.ranks().is_main:
            halves, change = review.conclusion(output_dir)
            report.print_verdict(halves, change and door.named(change), output_dir, saved=sums is not None)
        return RunOutcome(output=output)

    def _begin(self, trainer: Any, checkpoint: str | None) -> None:
        """Check and record the trainer, and have it measure before the first step what is open."""
        from finetune.measure import longest_row

        recording.record_trainer(self.record, self.job, trainer, checkpoint)
        assert self.job.activations is not None
        if self.job.activations.made:  # a script has built its trainer before it was known
            longest_row.apply(trainer, self.job.activations.value)
        self._note(trainer)
        # After an earlier run of this trainer DDP has the model: a rank without memory would leave the others waiting.
        first = trainer.model_wrapped is trainer.model
        searches = self.job.searches and first
        trainer.before_first_step = functools.partial(self._measure, trainer, searches) if first else None
        if not searches:
            recording.write_configuration(self.job, self.record.path.parent)
        startup.current().ended("trainer")

    def _measure(self, trainer: Any, searches: bool) -> None:
        """Settle what is open, with the trainer, and record its passes."""
        from finetune.measure import graphs, measurements

        if searches:
            self._settle(trainer)
        found = graphs.record(trainer, trainer.total_steps, measurements.facts(self.job))
        if trainer.args.device.type == "cuda":
            print_line(found.line)
        self.record.update(cuda_graphs=vars(found))
        if found.seconds:
            startup.current().ended("graphs")

    def _settle(self, trainer: Any) -> None:
        """Settle what is open, with the trainer."""
        from finetune.measure.settle import settle

        before, world = self.job, distributed.ranks().world_size
        job = self.job = settle(before, world, self.start, trainer)
        self.door.settled(job)
        trainer.set_batch(job.batch)
        if job.activations != before.activations:
            report.print_activations(job)
        report.print_micro_batch(job)
        self._note(trainer)
        self.record.update(batch=vars(job.batch), config=job.config.to_dict())
        recording.write_configuration(job, self.record.path.parent)
        startup.current().ended("micro-batch")

    def _note(self, trainer: Any) -> None:
        """Note in run.json, and for checkpoints, what is known of what was open."""
        mode, size = self.job.activations, self.job.micro_batch
        assert mode is not None and size is not None
        activations = mode.to_dict(vars(mode.value))
        trainer.manifest |= {"activations": activations}
        self.record.update(micro_batch=size.to_dict({"per_device": size.value}), activations=activations)

    def _record_results(self, built: BuiltTrainer) -> None:
        """Note what training has yielded. If the disk has no room for run.json, the model is still saved afterwards.

        Raises:
            RunError: the loss diverged.
        """
        from finetune.engine.checkpoint import best
        from finetune.measure import micro_batch, scoring

        job, record, trainer, logger = self.job, self.record, built.trainer, built.logger
        step, results = trainer.state.global_step, logger.results()
        prediction = scoring.score(job, results)
        scoring.write(logger.records.events, prediction, step)
        record.try_update(
            steps=step,
            prediction=prediction,
            micro_batch_search=micro_batch.earlier_search(job),
            attention=recording.attention_used(job, trainer),
            **results,
        )
        if logger.diverged is not None:
            checkpoint = record.path.parent / f"checkpoint-{step}"
            raise RunError(f"{logger.diverged} {checkpoint} is saved. Lower training.learning_rate.")
        if built.stop.stopped:
            return
        found, stopped_at = best.best_summary(trainer), built.best.stopped_at if built.best else None
        rule = job.config.training.early_stopping
        record.try_update(best=found, early_stopping=rule | {"step": stopped_at} if rule and stopped_at else None)
        report.print_best(found, stopped_at, trainer.total_steps)
