"""An out-of-memory error of the GPU, with the settings that need less."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from finetune.config.batch import ranks_to_share_longer_rows
from finetune.config.rules import STOCHASTIC_OPTIMIZERS, less_activation_memory
from finetune.errors import RunError
from finetune.runtime.machine.hardware import out_of_memory_details
from finetune.runtime.ranks import distributed
from finetune.text import counted

if TYPE_CHECKING:
    from finetune.engine.job import Job


@contextlib.contextmanager
def explain_out_of_memory(
    current: Callable[[], Job], measured: Callable[[Job], str | None] | None = None
) -> Iterator[None]:
    """Turn an out-of-memory error of the GPU into a RunError that names the settings to change.

    Args:
        current: gives the job as it is settled by then.
        measured: gives the settings that hold the job by an earlier measurement, if there is one.
    """
    import torch

    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        job = current()
        half = max(job.batch.per_device // 2, 1)
        remedy = (
            f"set training.per_device_train_batch_size to {half} (same global batch of "
            f"{job.batch.global_batch_size}, same result)"
            if job.batch.per_device > 1
            else f"{'lower' if job.config.data.max_length else 'set'} data.max_length"
        )
        model, training = job.config.model, job.config.training
        longest = job.config.data.max_length or int(job.layout.rows.lengths.max())
        sharded = training.strategy == "shard"
        optimizer = "adamw_torch_8bit" if sharded else "adamw_8bit"
        if (known := None if measured is None else measured(job)) is not None:
            alternatives = [f"{known} (predicted to hold it)"]
        elif job.batch.per_device == 1 or not training.gradient_checkpointing:
            alternatives = [
                f"{key}: {value}" for key, value in less_activation_memory(job.config, job.stack.backend).items()
            ]
        else:
            alternatives = []
        gpus = max(job.hardware.count, distributed.ranks().world_size)
        more = ranks_to_share_longer_rows(training.context_parallel, gpus)
        if known is None and not alternatives and job.batch.per_device == 1 and job.stack.backend != "unsloth":
            alternatives += [] if more is None else [f"training.context_parallel: {more} on {gpus} GPUs"]
        if model.full_finetuning:
            if training.master_weights == "float32" and training.optim in STOCHASTIC_OPTIMIZERS:
                alternatives.append("training.master_weights: stochastic")
            alternatives += [f"training.optim: {optimizer}"] if training.adam_in_full else []
            alternatives.append("LoRA (model.full_finetuning: false)")
        elif not model.load_in_4bit:
            alternatives.append("model.load_in_4bit: true")
        if not sharded and not (model.load_in_4bit or model.load_in_8bit or model.load_in_fp8):
            alternatives.append("training.strategy: shard on several GPUs")
        raise RunError(
            f"CUDA ran out of memory: {counted(job.batch.per_device, 'row')} of up to {longest} tokens per GPU. "
            f"To use less, {remedy}" + (f", or use {' or '.join(alternatives)}" if alternatives else "") + ". "
            f"({out_of_memory_details(error)})"
        ) from error
