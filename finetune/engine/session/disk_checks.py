"""Checks of disk space and of everything that is saved, before training."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.config import Config
from finetune.engine.checkpoint import output_folder
from finetune.engine.preflight import model_files
from finetune.errors import UserError
from finetune.runtime.types import Model

if TYPE_CHECKING:
    from finetune.engine.job import Job


def check_space(config: Config, model: Model) -> None:
    """Check the free disk space: the final weights and, with save_steps, one checkpoint (weights and two float32
    moments) must fit.

    Raises:
        UserError: they do not.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    needed, what = sum(parameter.numel() * parameter.element_size() for parameter in trainable), "the final model"
    if config.training.save_steps:
        needed, what = 2 * needed + 8 * sum(parameter.numel() for parameter in trainable), f"a checkpoint and {what}"
    output_folder.check_space(Path(config.training.output_dir), needed + output_folder.SPARE_BYTES, what)


def check_saving(job: Job) -> None:
    """Save everything but the weights into a temporary folder: what cannot be saved must not be found at the end.

    Raises:
        UserError: names what cannot be saved.
    """
    from finetune.engine.checkpoint import tokenizer_files
    from finetune.engine.model import generation_config

    model = job.model
    adapters = getattr(model, "peft_config", None)
    with tempfile.TemporaryDirectory(prefix="finetune-save-") as folder:
        tokenizer_files.save(job.tokenizer, Path(folder))
        generation_config.write(Path(folder), model, [])
        configs = [model.config] if adapters is None else list(adapters.values())
        for config in configs:
            try:
                config.save_pretrained(folder)
            except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
                name = model_files.SHAPES[0] if adapters is None else model_files.ADAPTER
                raise UserError(
                    f"The {name} of this model cannot be saved: {' '.join(str(error).split())[:300]}. Correct "
                    f"{'it in the folder of the model' if adapters is None else 'the lora section'}."
                ) from error
