"""Saves the final model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from finetune.engine.checkpoint import output_folder
from finetune.runtime.files import checksums
from finetune.runtime.ranks import distributed

if TYPE_CHECKING:
    from finetune.engine.training.trainer import SFTTrainer


def save_final(trainer: SFTTrainer, output_dir: Path) -> dict[str, str]:
    """Save the final adapter or model into `output_dir`: on rank 0, while the other ranks wait; on all ranks if the
    model is sharded. Returns the checksum of each file by name, on rank 0."""
    sums: dict[str, str] = {}
    main = trainer.args.should_save
    if main or trainer.sharded:
        with (
            output_folder.explain_full_disk(output_dir, "the final model"),
            output_folder.final_files(output_dir, main=main) as folder,
        ):
            if trainer.sharded:
                distributed.barrier()  # the folder exists
            trainer.save_model(str(folder), _internal_call=True)  # nothing is pushed to the hub
            if main:  # every rank's files are written when save_model returns
                written = sorted(path for path in folder.iterdir() if path.is_file())
                sums = dict(zip((path.name for path in written), checksums(written), strict=True))
    distributed.barrier()
    return sums
