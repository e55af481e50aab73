"""Drives the trial of a dry run: trains on the longest rows and on typical ones, searches for the largest micro-batch,
and checks that what is saved is what was trained."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.config import Config
from finetune.data.templates.encoder import Encoded, preview
from finetune.engine.checkpoint import output_folder
from finetune.engine.job import Job
from finetune.engine.session import out_of_memory
from finetune.engine.session.opening import total_steps
from finetune.errors import RunError
from finetune.measure import graphs, measurements, micro_batch, probe, slices
from finetune.measure.dry_run_report import TrialResult
from finetune.measure.longest_row import DoesNotFit, TrialModes
from finetune.measure.measurements import Measurement
from finetune.measure.micro_batch import Attempt
from finetune.measure.predict import predict
from finetune.measure.trial import ENOUGH, LIMIT_SECONDS, Trial
from finetune.runtime import bootstrap, startup
from finetune.runtime.command import FAILED, console, print_line
from finetune.runtime.files import write_json
from finetune.runtime.types import JsonObject
from finetune.text import counted

if TYPE_CHECKING:
    from finetune.engine.training.trainer import SFTTrainer


def run_trial(trial: Trial, folder: Path, world: int, modes: TrialModes) -> TrialResult:
    """Find the longest row that fits, train on the longest rows of the job and on typical ones, search for the largest
    micro-batch that fits, then save, zero, reload and compare the weights.

    Raises:
        RunError: a loss is not finite, the disk is full, or weights differ after reloading.
    """
    trainer, logger = trial.trainer, trial.logger
    full, measured, results = "", None, JsonObject()

    def prepare() -> None:
        modes.measure()
        graphs.record(trainer, total_steps(trial.job), measurements.facts(trial.job))  # as the run will

    trainer.before_first_step = prepare
    try:
        with logger:
            trial.memory.reset()
            with out_of_memory.explain_out_of_memory(lambda: trial.job):
                trainer.train()
            if len(trial.steps) < trial.least_steps:
                raise RunError(
                    f"{LIMIT_SECONDS / 60:.0f} minutes were enough for {len(trial.steps)} of "
                    f"{trial.worst_steps + ENOUGH} steps: too few to predict from. Lower data.max_length or "
                    "training.per_device_train_batch_size, take a smaller model, or use a GPU."
                )
            measured = trial.measure(startup.process_began() + modes.seconds)
            results = logger.results()
            with out_of_memory.explain_out_of_memory(lambda: trial.job):
                if trial.job.eval_layout is not None and not trial.budget.over:
                    trainer.evaluate()
    except DoesNotFit as error:
        facts = {"out_of_memory": True, "state_fits": True, "longest_rows": modes.to_dict()}
        return TrialResult(go=False, reason=str(error), measured=facts)
    except RunError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        full = str(error)  # not the error itself: its frames keep the memory allocated
    if full or measured is None:
        if not probe.training_state_fits(trial.trainer):
            reason = "weights, gradients and optimizer state fill the device before any row is processed."
            facts = {"out_of_memory": True, "state_fits": False}
            return TrialResult(go=False, reason=f"{full} Tried: {reason}", measured=facts)
        sizes = search_micro_batch(trial, world, modes, start=None)
        reason = _too_large(full, sizes)
        if trial.memory.limit_bytes is not None and not sizes.get("flag"):
            reason = f"{full} {modes.remedy()}"
        facts = {"micro_batch_search": sizes, "out_of_memory": True, "state_fits": True}
        facts["longest_rows"] = modes.to_dict()
        return TrialResult(go=False, reason=reason, measured=facts)
    if (own := modes.of(modes.choice.value)) is not None:
        modes.note_proof(own, measured.peak_memory_bytes)
    rows = trial.job.layout, trial.job.batch.per_device
    kept = probe.saved_bytes(trainer, *rows) if slices.is_slice() else None
    all_kept = probe.saved_bytes_without_checkpointing(trainer, *rows) if slices.is_slice() else None
    saved = None
    if kept is None:  # slices are of no other run
        saved = measurements.save(measured)  # before the search, which may end badly
    sizes = search_micro_batch(trial, world, modes, start=trial.job.batch.per_device)
    check_reload(trainer, folder / "saved")
    results |= {
        "longest_row_tokens": int(trial.job.layout.tokens.max()),
        "master_weights": asdict(trial.job.master_weights),
        **figures(trial, measured),
        "micro_batch_search": sizes,
        "longest_rows": modes.to_dict(),
        "measurement": measured.to_dict(),
        "measurement_file": saved and str(saved),
        "saved_bytes": kept,
        "saved_bytes_without_checkpointing": all_kept,
    }
    return TrialResult(go=True, reason=None, measured=results)


@contextlib.contextmanager
def time_limit(seconds: float, config: Config, folder: Path) -> Iterator[None]:
    """Context that ends this process with NO-GO if it takes longer: one step of a large model on a CPU can take hours,
    and nothing else interrupts it.

    Args:
        folder: temporary files, which are removed.
    """
    done = threading.Event()

    def watch() -> None:
        if done.wait(seconds):
            return
        reason = (
            f"nothing could be measured within {seconds / 60:.0f} minutes: this device is too slow for these rows. "
            "Lower data.max_length or training.per_device_train_batch_size, take a smaller model, or use a GPU."
        )
        shutil.rmtree(folder, ignore_errors=True)
        print_line(f"NO-GO: {reason}", style="red")
        if config.json:
            write_json(config.json, {"go": False, "reason": reason})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)  # the main thread may be inside a matrix product

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def figures(trial: Trial, measured: Measurement) -> JsonObject:
    """Memory in GiB: peak on the longest rows, total and limit of the device, and what other processes use. Mean
    seconds per optimizer step by phase, and the predicted run, on one device; or on the fewest that share rows, without
    their communication."""
    outside, ranks = getattr(trial.memory, "outside_bytes", None), measured.shared_by
    work = measured.work(ranks)
    one = predict(work, 1, None)
    return {
        "memory": {
            "peak_gib": measured.peak_memory_bytes / 2**30,
            "device_gib": None if measured.memory_bytes is None else measured.memory_bytes / 2**30,
            "limit_gib": None if trial.memory.limit_bytes is None else trial.memory.limit_bytes / 2**30,
            "held_by_others_gib": None if outside is None else outside / 2**30,
        },
        "step": {
            "forward": work.compute_seconds * (1 - work.backward_share),
            "backward": work.compute_seconds * work.backward_share,
            "data": work.data_seconds,
            "optimizer": work.optimizer_seconds,
            "other": work.other_seconds,
        },
        "projection": {
            "shared_by": ranks,
            "steps": measured.steps,
            "step_seconds": one.step_seconds,
            "tokens_per_second": one.tokens_per_second,
            "start_up_seconds": measured.start_up_seconds,
            "hours_on_one_device": one.hours,
        },
    }


def search_micro_batch(trial: Trial, world: int, modes: TrialModes, start: int | None) -> JsonObject:
    """Search for the largest micro-batch that fits; `start` is a size that fits, None if the current one does not. No
    size is tried that is predicted not to fit."""
    memory, job = trial.memory, trial.job
    if slices.is_slice():
        return {"attempts": [], "reason": "not searched, because this is a slice of the model"}
    shared = job.context.size
    if shared > 1 and start is not None:  # a run does not search either
        return {"attempts": [], "reason": f"the default of {shared} GPUs that share each row"}
    ranks = world // shared
    sizes = allowed = micro_batch.allowed_sizes(job, ranks)
    if memory.limit_bytes is None:
        return {"attempts": [], "reason": "not searched, because a CPU run has no separate memory limit"}
    sizes = [size for size in sizes if size == start or modes.may_fit(size)]
    if start is None:
        sizes = [size for size in sizes if size < job.batch.per_device]
    if not sizes or sizes == [start]:
        other = "the settings allow no other size" if sizes == allowed else "no other size is predicted to fit"
        return {"attempts": [], "reason": other}

    def attempt(size: int) -> Attempt:
        with console().status(f"trying {counted(size, 'row')} per micro-batch"):
            return micro_batch.try_size(trial.trainer, job.layout, size, memory)

    attempts = micro_batch.search(sizes, start or sizes[-1], attempt, lambda: trial.budget.over)
    if not attempts:
        return {"attempts": [], "reason": f"not searched, because {LIMIT_SECONDS / 60:.0f} minutes were over"}
    found = micro_batch.summary(attempts, memory.limit_bytes, micro_batch.real_token_share(job, ranks), allowed)
    measurements.save_sizes(measurements.facts(job), found)  # a run takes the fastest of them
    return found


def _too_large(message: str, sizes: JsonObject) -> str:
    if sizes.get("flag"):
        return (
            f"{message} Tried: the largest micro-batch that fits has {counted(sizes['largest_that_fits'], 'row')} "
            f"({sizes['flag']})."
        )
    if sizes["attempts"]:
        return f"{message} Tried: no smaller micro-batch fits either."
    return message


def check_reload(trainer: SFTTrainer, folder: Path) -> None:
    """Save the trained weights, zero them in memory, load them from disk and compare.

    Raises:
        RunError: they differ.
    """
    model = trainer.model
    with output_folder.explain_full_disk(folder.parent, "the trained weights"), trainer.keep_dtypes():
        trainer.save_model(str(folder))
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    with bootstrap.errors_only():  # transformers warns that a tied head is missing from the file
        trainer._load_from_checkpoint(str(folder))
    parameters = dict(model.named_parameters())
    bad = [name for name, value in trained.items() if not torch.equal(parameters[name].detach(), value)]
    if bad:
        raise RunError(
            f"After saving and loading, {len(bad)} of {len(trained)} trained tensors differ (the first is {bad[0]}): "
            "a saved model would not match the trained one. Please report this with the output of `finetune doctor`."
        )


def show_example(job: Job) -> None:
    """Print one row with its supervised tokens marked."""
    ids, labels = job.data.train[0]
    console().print("One training row; supervised tokens are marked:", highlight=False)
    example = Encoded(input_ids=ids, labels=labels)
    print_line(preview(example, job.tokenizer, color=console().is_terminal))
