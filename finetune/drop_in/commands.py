"""What commands do with a script's trainer instead of training: dry runs, `prepare`, `parity` and `advise`."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import transformers
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from finetune.config import Batch
from finetune.drop_in import settings
from finetune.engine.job import Job, assemble
from finetune.engine.monitoring.callbacks import FirstGradients, ParityDump, StopOnRequest
from finetune.engine.session import building
from finetune.engine.session.building import BuiltTrainer
from finetune.engine.training import trainer as engine
from finetune.errors import UserError
from finetune.runtime.ranks import distributed

if TYPE_CHECKING:
    import trl

    from finetune.engine.record import RunRecord


class JobTrainer(engine.SFTTrainer):
    """The engine's trainer with the job of a script, as runs and commands see it.

    given:             the user's arguments, as TRL would have completed them
    global_batch_size: that the user has fixed
    record:            of the last call of `train`, once it has ended
    """

    job: Job
    given: trl.SFTConfig
    global_batch_size: int | None
    record: RunRecord | None

    def take_batch(self, batch: Batch) -> None:
        """Plan steps of so many rows."""
        raise NotImplementedError

    def set_arguments(self, **changed: object) -> None:
        """Change arguments of SFTConfig after the trainer was created."""
        raise NotImplementedError


class ScriptCommands:
    """A script's trainer as commands see it (`runtime.types.ScriptTrainer`)."""

    def __init__(self, trainer: JobTrainer) -> None:
        self._trainer = trainer

    @property
    def job(self) -> Job:
        """The job that the script would train."""
        return self._trainer.job

    def take_launch_batch(self, gpus: int) -> int:
        """Take the batch that a launch on `gpus` GPUs would have, or on the most below that divide it; this process is
        then one of its ranks. Returns their number."""
        trainer = self._trainer
        fewest = trainer.context.size
        world = max(gpus, fewest)
        while True:
            try:
                batch = settings.batch(trainer.given, trainer.global_batch_size, world)
                break
            except UserError:
                if world == fewest:
                    raise
                world -= 1
        trainer.take_batch(batch)
        return world

    def build_trial(self, job: Job, folder: Path) -> BuiltTrainer:
        """As `building.build_trainer`: the trainer on the rows of `job`, without the script's callbacks. It is of no
        other use afterwards."""
        trainer = self._trainer
        logger = building.build_run_logger(job, folder, start_step=0, dashboard=None)
        stop = StopOnRequest()
        self._set_steps(folder, job.config.training.max_steps, logging_steps=job.config.logging.logging_steps)
        trainer.plan, trainer.layout, trainer.eval_layout = job.plan(), job.layout, job.eval_layout
        trainer.set_batch(job.batch)
        trainer.callback_handler.callbacks = [transformers.trainer_callback.DefaultFlowCallback(), logger, stop]
        trainer.add_callback(FirstGradients())
        trainer.train = functools.partial(engine.SFTTrainer.train, trainer)  # type: ignore[assignment]  # no run
        logger.attach(trainer)
        return BuiltTrainer(trainer=trainer, logger=logger, stop=stop)

    def train_for_parity(self, folder: Path, steps: int, most: int) -> None:
        """A short run, for `finetune parity`: without gradient clipping, a learning-rate schedule, and callbacks that
        report or need evaluations. Writes into `folder` what is compared.

        Args:
            most: the number of ranks whose launch has the global batch.

        Raises:
            UserError: the global batch does not divide over this number of ranks.
        """
        trainer = self._trainer
        size = trainer.global_batch_size or settings.rows_per_rank(trainer.given) * most
        trainer.take_batch(settings.batch(trainer.given, size, distributed.ranks().world_size))
        self._set_steps(folder, steps, logging_steps=1)
        constant = dict(max_grad_norm=0.0, warmup_steps=0, lr_scheduler_type="constant")
        job = trainer.job
        training = replace(job.config.training, output_dir=str(folder), max_steps=steps, save_steps=0, **constant)
        logging = replace(job.config.logging, logging_steps=1, profile_steps=0)
        config = replace(job.config, training=training, logging=logging)
        trainer.job = assemble(config, job.stack, job.model, job.data, **job.parts())
        trainer.set_arguments(**constant, lr_scheduler_kwargs={})
        watchers = (transformers.EarlyStoppingCallback, *INTEGRATION_TO_CALLBACK.values())
        for callback in [one for one in trainer.callback_handler.callbacks if isinstance(one, watchers)]:
            trainer.remove_callback(callback)
        trainer.add_callback(ParityDump(folder))
        trainer.train()
        if trainer.eval_layout is not None:
            found = trainer.evaluate()
            losses = [value for name, value in found.items() if name.startswith("eval_") and name.endswith("_loss")]
            assert trainer.record is not None
            trainer.record.update(eval_loss_after=sum(losses) / len(losses))

    def _set_steps(self, folder: Path, steps: int, *, logging_steps: int) -> None:
        """Train `steps` optimizer steps, and save and evaluate nothing meanwhile."""
        self._trainer.set_arguments(
            output_dir=str(folder),
            max_steps=steps,
            logging_strategy=IntervalStrategy.STEPS,
            logging_steps=logging_steps,
            logging_first_step=False,
            save_strategy=SaveStrategy.NO,
            eval_strategy=IntervalStrategy.NO,
            eval_on_start=False,
            load_best_model_at_end=False,
        )
