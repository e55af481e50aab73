"""The front door of a script: what a run of its trainer does in its own way. The story is `run.story`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import transformers
from transformers import TrainerState

from finetune.config import Config
from finetune.drop_in.commands import JobTrainer
from finetune.drop_in.names import with_script_names
from finetune.engine.checkpoint import best, output_folder, resume
from finetune.engine.job import Job
from finetune.engine.monitoring import trackers
from finetune.engine.monitoring.callbacks import FirstGradients, Profile, StopOnRequest
from finetune.engine.monitoring.run_logger import Dashboard, RunLogger
from finetune.engine.record import RunRecord
from finetune.engine.session import building
from finetune.engine.session.building import BuiltTrainer
from finetune.engine.training.trainer import SFTTrainer
from finetune.errors import UserError
from finetune.run import story
from finetune.runtime import startup
from finetune.runtime.command import print_line
from finetune.runtime.ranks import activity, interrupt
from finetune.runtime.types import JsonObject

_NOTHING = {"eval_loss": None, "exact_match": None}


class ScriptRun(story.Door):
    """One call of a trainer's `train`. The script's callbacks and its log see what they see with TRL, and the script
    goes on afterwards.

    run.json has the fields of any run. `eval_loss_before` and `eval_loss_after` (by name, of several sets) are null
    unless the script evaluates while it trains: an evaluation that it does not ask for would cost its time.
    `final_files` is null until the script saves the model into `output_dir`, then the checksum of each file of weights.
    """

    def resume_with(self, job: Job) -> str:
        return "trainer.train(resume_from_checkpoint=True)"

    def named(self, text: str) -> str:
        return with_script_names(text)

    def __init__(
        self,
        trainer: JobTrainer,
        take_job: Callable[[Config, JsonObject], Job],
        train: Callable[..., object],
    ) -> None:
        """
        Args:
            take_job: has the trainer take this configuration, and the step of a checkpoint's manifest.
            train: the engine's `train` of this trainer, which the script's own class may call otherwise.
        """
        self._trainer, self._take_job, self._train = trainer, take_job, train

    def enter(self, config: Config, record: RunRecord) -> tuple[Job, resume.StartPoint]:
        trainer, training = self._trainer, config.training
        resuming = bool(training.resume_from_checkpoint)
        output_folder.check_output(record.path.parent, resuming=resuming, overwrite=True)
        output_folder.check_shared(record.path.parent)
        start = resume.prepare(config, trainer.job.batch, config.model.dtype, training.master_weights)
        job = self._take_job(config, start.found.manifest)
        return job, resume.confirm(start, job.config, trainer.model, trainer.plan.digest(), trainer.total_steps)

    def finished(self, job: Job, start: resume.StartPoint) -> JsonObject | None:
        """Only with a checkpoint: the script goes on with the trained weights.

        Raises:
            UserError: the run is finished, and has no checkpoint.
        """
        output_dir, resuming = Path(job.config.training.output_dir), job.config.training.resume_from_checkpoint
        if start.found.path is None and resuming and resume.done_record(output_dir) is not None:
            raise UserError(
                f"resume_from_checkpoint=True: {output_dir} holds a finished run, and no checkpoint. Load its model "
                "from there, or leave resume_from_checkpoint out: train() then starts a new run, and moves this one to "
                "a folder next to it."
            )
        if start.found.path is None or start.found.step < self._trainer.total_steps:
            return None
        return super().finished(job, start)

    def leave_finished(self, job: Job, start: resume.StartPoint, done: JsonObject) -> object:
        return self._train(str(start.found.path))  # no step is left: it loads the weights

    def take_folder(self, job: Job, start: resume.StartPoint) -> None:
        output_dir = Path(job.config.training.output_dir)
        if start.found.path is None:
            if (moved := output_folder.archive_earlier_run(output_dir)) is not None:
                print_line(f"The files of an earlier run in {output_dir} are in {moved} now.")
        output_folder.prepare_output(output_dir, overwrite=False)

    @contextlib.contextmanager
    def trainer(self, job: Job, start: resume.StartPoint, pages: Dashboard) -> Iterator[BuiltTrainer]:
        """The script's trainer, with the run's own callbacks and the logger's hold on its methods."""
        trainer, output_dir = self._trainer, Path(job.config.training.output_dir)
        trainer.job = job
        trainer.set_batch(job.batch)
        logger = building.build_run_logger(job, output_dir, start_step=start.found.step, dashboard=pages)
        stop = StopOnRequest()
        steps = job.config.logging.profile_steps
        profile = [Profile(output_dir / "runs", steps)] if steps else []
        own = [logger, TrlMetrics(logger), stop, FirstGradients(), *profile]
        # Before the script's, which then see TRL's metrics too.
        trainer.callback_handler.callbacks[:0] = own
        logger.attach(trainer)
        logger.trackers = trackers.wrap_trackers(trainer.callback_handler.callbacks, logger.records.reported)
        startup.current().ended("script")
        try:
            yield BuiltTrainer(trainer=trainer, logger=logger, stop=stop)
        finally:
            logger.detach()
            for callback in own:
                trainer.remove_callback(callback)

    def settled(self, job: Job) -> None:
        self._trainer.job = job

    def train(self, trainer: object, checkpoint: str | None, *, rebuild: bool) -> object:
        return self._train(checkpoint, rebuild=rebuild)

    def evaluate(self, job: Job, built: BuiltTrainer, questions: list, *, trained: bool) -> tuple[JsonObject, None]:
        """Unseen by the script's callbacks and its log. A signal meanwhile must not cost the script its model."""
        trainer, logger = built.trainer, built.logger
        held_out = trainer.eval_layout
        if held_out is None or str(getattr(trainer.args.eval_strategy, "value", trainer.args.eval_strategy)) == "no":
            return _NOTHING, None
        sets = held_out if isinstance(held_out, Mapping) else {"": held_out}
        state = trainer.state if trained else TrainerState()
        losses = _evaluated(trainer, logger) if trained else {}
        if losses.keys() != sets.keys():  # else the run has evaluated these weights already
            with torch.no_grad(), interrupt.deferred(), interrupt.busy(), activity.during("evaluation"):
                for name, layout in sets.items():
                    metrics = trainer.evaluate_layout(layout, f"eval_{name}" if name else "eval")
                    logger.on_log(trainer.args, state, trainer.control, metrics)
                    losses[name] = metrics[f"eval_{name}_loss" if name else "eval_loss"]
        return _NOTHING | {"eval_loss": losses if isinstance(held_out, Mapping) else losses[""]}, None

    def save(self, trainer: object, output_dir: Path) -> None:
        """Left to the script, whose `save_model` adds `final_files` to run.json."""

    def close(self, job: Job, record: RunRecord, *, ended: bool) -> None:
        """Nothing: the script goes on."""


def _evaluated(trainer: SFTTrainer, logger: RunLogger) -> dict[str, float]:
    """The losses by name of each set that this run has evaluated with the weights it ended with."""
    found = best.best_summary(trainer)
    step = found["step"] if found is not None and found["loaded"] else trainer.state.global_step
    return {one.get("set", ""): one["loss"] for one in logger.run.evaluations if one["step"] == step}


class TrlMetrics(transformers.TrainerCallback):
    """Adds the metrics of training that TRL logs: `num_tokens`; if the loss yields them, `entropy` and
    `mean_token_accuracy`, per supervised token of the global batch; `aux_loss` of a mixture of experts."""

    def __init__(self, logger: RunLogger) -> None:
        self._logger = logger

    def on_log(
        self,
        args: transformers.TrainingArguments,
        state: TrainerState,
        control: transformers.TrainerControl,
        logs: JsonObject | None = None,
        **kwargs: object,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        metrics = {"num_tokens": float(self._logger.run.tokens_seen), **self._logger.token_means}
        logs |= metrics
        state.log_history[-1] |= metrics
