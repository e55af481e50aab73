"""run.json from the start of training to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.config import Config
from finetune.config.load import dump_yaml
from finetune.engine.checkpoint import resume
from finetune.engine.record import CONFIGURATION, RunRecord
from finetune.errors import describe
from finetune.redact import redact_tree
from finetune.runtime import bootstrap, files
from finetune.runtime.command import warn
from finetune.runtime.files import write_json
from finetune.runtime.machine import disk, flash
from finetune.runtime.ranks import distributed, failures, hang, interrupt, launcher, multinode
from finetune.runtime.types import JsonObject

if TYPE_CHECKING:
    from finetune.engine.job import Job
    from finetune.engine.training.trainer import SFTTrainer


def attention_used(job: Job, trainer: SFTTrainer) -> JsonObject:
    """The kernel of packs for run.json at the end of training; a warning if it is not the chosen one."""
    from finetune.engine.kernels import attention

    trained = trainer.state.global_step > trainer.resumed_step
    found = attention.kernel_used(job.attention) if trained else job.attention
    if found != job.attention and distributed.ranks().is_main:
        warn(f'{found.reason}. run.json records "{found.kernel}".')
    return asdict(found)


def record_trainer(record: RunRecord, job: Job, trainer: SFTTrainer, checkpoint: str | None) -> None:
    """Run the start checks and note what is known once the trainer is built. Every rank calls it.

    Raises:
        UserError: a start check failed.
    """
    from finetune.engine import invariants
    from finetune.engine.model import trial
    from finetune.engine.model.load_arguments import resolve_dtype
    from finetune.engine.sharding import shard

    sharding = None
    dtype = resolve_dtype(job.config, job.stack)
    checks = invariants.check(trainer)
    if trainer.sharded:
        sharding = shard.sharding_record(trainer.model, job.config.training.optim, trainer.weights)
    record.update(
        plan=trainer.plan.digest(),
        total_steps=trainer.total_steps,
        resumed_from=checkpoint,
        invariants=checks,
        sharding=sharding,
        loss_normalized_by=invariants.loss_normalizer(trainer),
        adapter_part_kept=trial.surviving_part(trainer.model, trainer.args.learning_rate, dtype),
    )


@contextlib.contextmanager
def record_run(record: RunRecord, job: Job, start: resume.StartPoint) -> Iterator[None]:
    """Mark the run as running in run.json; if the block raises, as failed or interrupted, with the reason."""
    from finetune.engine.job import experts_of, layout_facts
    from finetune.engine.model import adapter_coverage
    from finetune.engine.model.load_arguments import resolve_dtype

    hosts = multinode.hosts()
    with disk.disk_errors(record.path.parent, record.path.name):
        record.update(
            status="running",
            launch=launcher.launch_id(),
            hosts=hosts,
            config=job.config.to_dict(),
            versions=bootstrap.versions(),
            world_size=distributed.ranks().world_size,
            batch=vars(job.batch),
            learning_rate=job.config.training.learning_rate,
            backend=job.stack.backend,
            backend_reason=job.stack.reason,
            attention=asdict(job.attention),
            packs={"packed": job.unpacked_because is None, "reason": job.unpacked_because or job.layouts.proof},
            layer_kernels=asdict(job.layer_kernels),
            master_weights=asdict(job.master_weights),
            parameters=job.size.parameters,
            active_parameters=job.size.active_parameters,
            trainable_parameters=job.size.trainable_parameters,
            experts=experts_of(job),
            lora_coverage=covered.to_dict() if (covered := adapter_coverage.coverage(job.model)) else None,
            dtype=str(resolve_dtype(job.config, job.stack)).removeprefix("torch."),
            hardware=job.hardware.to_dict(),
            patches=[verdict.to_dict() for verdict in job.stack.patches],
            ledger={name: job.data.ledgers[name] | {"layout": layout} for name, layout in layout_facts(job).items()},
            data_fingerprint=job.data.fingerprint,
            order_key=job.data.order_key,
            data_folder=str(job.data.folder.resolve()),  # where an export finds the held-out rows
            settings=start.settings,
            resumed_with_changes=list(start.history),
        )
    interrupt.on_stuck(record.fail)
    try:
        with hang.reporting(record.path.parent / "hang"):
            yield
    except BaseException as error:
        with interrupt.deferred():  # a signal here must not leave the status at "running"
            why = failures.first_failure(own := describe(error))
            stopped = isinstance(error, interrupt.Interrupted) and own in why  # before the first step, or a second time
            record.fail(interrupt.reason() if stopped else why, interrupted=stopped)
        raise


def write_result(config: Config, result: JsonObject) -> None:
    """Write the content of run.json to the file of --json, on rank 0."""
    if config.json and distributed.ranks().is_main:
        write_json(config.json, redact_tree(result))


_NO_ROWS = "# The rows came from a script, so this file alone does not repeat the run.\n"


def write_configuration(job: Job, output_dir: Path) -> None:
    """Write run.yaml: what this run did, with nothing left to choose. `finetune.train --config run.yaml` repeats it if
    the configuration names the rows."""
    from finetune.engine.kernels import attention, liger
    from finetune.engine.model.load_arguments import resolve_dtype
    from finetune.engine.training import recompute

    if not distributed.ranks().is_main:
        return
    config, batch = job.config, job.batch
    flash_4 = job.attention.kernel == attention.FLASH_4 and not flash.is_paused()
    training = replace(
        config.training,
        global_batch_size=batch.global_batch_size,
        per_device_train_batch_size=batch.per_device,
        gradient_accumulation_steps=None,  # follows from these, on another number of ranks too
        gradient_checkpointing=recompute.resolve(config.training.gradient_checkpointing, job.stack.backend),
        master_weights=job.master_weights.kind,
        strategy="shard" if config.training.strategy == "shard" else None,  # the launcher has the number of ranks
        resume_from_checkpoint=False,
        resume_with_changes=False,
        overwrite_output_dir=False,
    )
    model = replace(
        config.model,
        backend=job.stack.backend,
        dtype=str(resolve_dtype(config, job.stack)).removeprefix("torch."),
        packed_attention="flash_4" if flash_4 else "torch",
        layer_kernels="liger" if job.layer_kernels.kernels == liger.LIGER else "torch",
    )
    content = dump_yaml(replace(config, model=model, training=training))
    rows = config.data.train_file, config.data.train, config.data.dataset_name
    head = "" if any(rows) else _NO_ROWS
    files.write_text(output_dir / CONFIGURATION, head + content)
