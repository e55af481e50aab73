"""`torchrun --max-restarts N` and `accelerate launch --max_restarts N`: what the next attempt of a run starts from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from finetune.config import Config
from finetune.engine import checkpoints
from finetune.engine.record import FILE_NAME
from finetune.runtime import launcher
from finetune.runtime.command import print_line


def continued(config: Config) -> Config:
    """The configuration of this attempt: if the launcher has started the ranks again after a failure, it goes on from
    the newest whole checkpoint of this launch, and overwrites nothing.

    Nothing changes in the first attempt, nor while the output folder holds nothing of this launch: an attempt that was
    refused another run's folder is refused again.
    """
    training = config.training
    output_dir = Path(training.output_dir)
    if not launcher.restarts() or launcher.launch_id() is None or _launch_of(output_dir) != launcher.launch_id():
        return config
    own = [
        path
        for path in checkpoints.checkpoints(output_dir)
        if checkpoints.damage(path) is None and checkpoints.manifest(path).get("launch") == launcher.launch_id()
    ]
    # Without one it starts as the first attempt did: from the checkpoint that it was given, or over.
    resume = str(own[-1]) if own else training.resume_from_checkpoint or True
    print_line(
        f"Restart {launcher.restarts()} by the launcher: {f'resumes from {own[-1]}' if own else 'no checkpoint yet'}"
    )
    return replace(config, training=replace(training, resume_from_checkpoint=resume, overwrite_output_dir=False))


def _launch_of(output_dir: Path) -> str | None:
    """The launch that wrote the run.json of a folder."""
    try:
        return json.loads((output_dir / FILE_NAME).read_text(encoding="utf-8")).get("launch")
    except (OSError, ValueError, AttributeError):
        return None
