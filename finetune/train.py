"""`accelerate launch -m finetune.train`: a run from a configuration, whose story is `run.story`."""

# ruff: noqa: E402
from __future__ import annotations

from finetune.runtime import bootstrap

bootstrap.keep_bytecode()  # that of the following imports, too

import contextlib
import shlex
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from finetune.config import Config
from finetune.config.help import BEGINNINGS
from finetune.engine.checkpoint import checkpoints, output_folder, resume
from finetune.engine.record import CONFIGURATION, RunRecord
from finetune.engine.session import building, opening
from finetune.measure import strategy
from finetune.run import recording, story
from finetune.runtime import launch_lines
from finetune.runtime.command import BAD_INPUT, DONE, INTERRUPTED, print_line, run_command
from finetune.runtime.ranks import distributed, process_group
from finetune.runtime.types import JsonObject

if TYPE_CHECKING:
    from finetune.engine.job import Job
    from finetune.engine.monitoring.run_logger import Dashboard
    from finetune.engine.session.building import BuiltTrainer


def main(argv: list[str] | None = None) -> int:
    """Train, or with --dry-run check whether training would work; without arguments, say how to begin. Returns the exit
    code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print_line(BEGINNINGS)
        return BAD_INPUT
    return run_command("train", argv, run)


def run(config: Config, parity_dump: Path | None = None, without: Collection[str] = ()) -> int:
    """Everything after the configuration has been checked: find the files, load, train, save. Returns the exit code.

    Args:
        parity_dump: folder for the first gradients and the last weights, for `finetune parity`.
        without: names of patches to skip, even if their defects are present.
    """
    if config.dry_run:
        from finetune import dryrun

        return dryrun.run(config)
    opening.check_present(config)
    strategy.apply(config)
    config, demo = opening.resolve_demo(config)
    door = ConfigurationRun(demo, parity_dump, without)
    outcome = story.run(door, config, RunRecord(Path(config.training.output_dir)))
    return INTERRUPTED if outcome.stopped else DONE


class ConfigurationRun(story.Door):
    """The front door of a configuration: it loads everything, and its end is that of the process."""

    def __init__(self, demo: ModuleType | None, parity_dump: Path | None, without: Collection[str]) -> None:
        self._demo, self._parity_dump, self._without = demo, parity_dump, without

    def enter(self, config: Config, record: RunRecord) -> tuple[Job, resume.StartPoint]:
        training, output_dir = config.training, record.path.parent
        resuming = bool(training.resume_from_checkpoint)
        output_folder.check_output(output_dir, resuming=resuming, overwrite=training.overwrite_output_dir)
        # Report a wrong path before anything is loaded.
        found = checkpoints.find(output_dir, training.resume_from_checkpoint, verify=False)
        batch = resume.resumed_batch(config, found.manifest, distributed.ranks().world_size)
        if self._demo is not None:
            print_line(self._demo.introduction())
        return opening.open_and_compare(config, batch, self._demo, record, self._without)

    def resume_with(self, job: Job) -> str:
        ranks, file = distributed.ranks(), Path(job.config.training.output_dir) / CONFIGURATION
        alone = ranks.world_size == ranks.local_world_size
        launcher = launch_lines.user_command(ranks.world_size, on_cpu=job.stack.device == "cpu") if alone else ["..."]
        resumed = [str(file), "--training.resume_from_checkpoint", "true"]
        return shlex.join([*launcher, "-m", "finetune.train", *resumed])

    def leave_finished(self, job: Job, start: resume.StartPoint, done: JsonObject) -> None:
        recording.write_result(job.config, done)
        process_group.finish()

    def take_folder(self, job: Job, start: resume.StartPoint) -> None:
        training = job.config.training
        output_folder.prepare_output(Path(training.output_dir), overwrite=training.overwrite_output_dir)

    @contextlib.contextmanager
    def trainer(self, job: Job, start: resume.StartPoint, pages: Dashboard) -> Iterator[BuiltTrainer]:
        output_dir = Path(job.config.training.output_dir)
        yield building.build_trainer(job, output_dir, self._parity_dump, start_step=start.found.step, dashboard=pages)

    def close(self, job: Job, record: RunRecord, *, ended: bool) -> None:
        recording.write_result(job.config, record.content)
        if ended and distributed.ranks().is_main:
            from finetune.export import card

            card.try_write_of_run(record.path.parent, record.content)
        process_group.finish()  # before any rank returns a code other than 0, on which a launcher ends the other ranks


if __name__ == "__main__":
    raise SystemExit(main())
