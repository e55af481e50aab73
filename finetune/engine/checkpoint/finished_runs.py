"""Whether the run that is asked for is finished already."""

from __future__ import annotations

import contextlib
from pathlib import Path

from finetune.config import Config
from finetune.engine import record
from finetune.engine.checkpoint import output_folder
from finetune.engine.checkpoint.resume import StartPoint
from finetune.engine.checkpoint.run_settings import differences
from finetune.errors import UserError
from finetune.runtime import files
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject


def finished_record(config: Config, start: StartPoint, plan_digest: str, total: int) -> JsonObject | None:
    """The run.json of a finished run, else None; every rank gets what rank 0 reads.

    A run that was killed after its last checkpoint is not finished: it still has to evaluate and save.

    Raises:
        UserError: the folder holds another finished run, without a checkpoint.
    """
    training, found = config.training, start.found
    if not training.resume_from_checkpoint:
        return None
    output_dir = Path(training.output_dir)
    if (done := done_record(output_dir)) is None:
        return None
    if found.path is not None:
        stopped_early = (done.get("total_steps"), done.get("steps")) == (total, found.step)
        ended = done.get("early_stopping")  # the rule that ended it, unless a callback of the script did
        if isinstance(ended, dict) and {**ended, "step": None} != {**(training.early_stopping or {}), "step": None}:
            stopped_early = False
        return done if found.step >= total or stopped_early else None
    had = done.get("settings")
    same = not isinstance(had, dict) or not differences(had, start.settings)[0]
    if same and (done.get("plan"), done.get("steps")) == (plan_digest, total):
        return done
    raise UserError(
        f"training.output_dir is {output_dir}, which holds a finished run of {done.get('steps')} steps with other "
        "settings or data, and no complete checkpoint to resume from. Give another folder, or replace that run with "
        "training.overwrite_output_dir: true instead of training.resume_from_checkpoint."
    )


def done_record(output_dir: Path) -> JsonObject | None:
    """The run.json of a run that ended as planned and whose final model exists, as rank 0 reads it."""
    content = None
    if any((output_dir / name).is_file() for name in output_folder.FINAL_WEIGHTS):
        with contextlib.suppress(OSError, ValueError):
            content = files.read_json(output_dir / record.FILE_NAME)
    done = isinstance(content, dict) and content.get("status") == "done"
    return distributed.gather_objects(content if done else None)[0]
