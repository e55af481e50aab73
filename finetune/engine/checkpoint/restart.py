"""Restarts by the launcher (`torchrun --max-restarts N`, `accelerate launch --max_restarts N`): where to resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from finetune.config import Config
from finetune.engine.checkpoint import checkpoints
from finetune.engine.record import FILE_NAME
from finetune.runtime import files
from finetune.runtime.command import print_line
from finetune.runtime.ranks import distributed, launcher


def resume_after_restart(config: Config) -> Config:
    """The configuration of this attempt. If the launcher has restarted the ranks after a failure, the run resumes from
    the newest complete checkpoint of this launch and overwrites nothing.

    The first attempt is unchanged. So is any attempt while the output folder holds nothing from this launch: a folder
    that was refused because it holds another run is refused again.
    """
    training = config.training
    output_dir = Path(training.output_dir)
    launches = _recorded_launches(output_dir)
    if not _may_be_restart() or launcher.launch_id() not in launches:
        return config
    own = [
        path
        for path in checkpoints.checkpoints(output_dir)
        if checkpoints.damage(path) is None and checkpoints.manifest(path).get("launch") in launches
    ]
    # Without one it starts like the first attempt: from the given checkpoint, or from step 0.
    resume = str(own[-1]) if own else training.resume_from_checkpoint or True
    print_line(f"Restart by the launcher: {f'resuming from {own[-1]}' if own else 'no checkpoint yet'}")
    return replace(config, training=replace(training, resume_from_checkpoint=resume, overwrite_output_dir=False))


_is_first_run = True  # of this process


def _may_be_restart() -> bool:
    """Whether the launcher may have started this rank again. With several machines its count does not say: c10d starts
    the ranks of the healthy machines again without counting it. A second run in one process is never a restart."""
    global _is_first_run
    first, _is_first_run = _is_first_run, False
    return launcher.restarts() > 0 or (first and distributed.ranks().on_several_machines)


def _recorded_launches(output_dir: Path) -> set[str]:
    """Ids of the launchers, one on each machine, of the launch that wrote the folder's run.json."""
    try:
        content = files.read_json(output_dir / FILE_NAME)
        found = {content.get("launch"), *(host["launch"] for host in content.get("hosts", ()))}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return set()
    return {launch for launch in found if isinstance(launch, str)}
