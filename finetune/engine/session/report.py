"""What a run prints: what is about to happen, and how it ended."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.config import Config
from finetune.config.rules import Mode
from finetune.runtime import files
from finetune.runtime.command import console, print_line
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject
from finetune.text import counted

if TYPE_CHECKING:
    from finetune.engine.checkpoint.resume import StartPoint
    from finetune.engine.job import Choice, Job


def print_introduction(job: Job, start: StartPoint) -> None:
    """Print what is about to run."""
    import torch

    from finetune.data import ledger
    from finetune.engine import multimodal
    from finetune.engine.job import experts_of, layout_facts
    from finetune.engine.kernels import fp8, liger
    from finetune.engine.model import adapter_coverage, load_arguments
    from finetune.engine.optimizer import master_weights
    from finetune.engine.training import recompute
    from finetune.runtime.machine import nvml

    for sentence in (*start.found.skipped, *start.notes):
        print_line(f"warning: {sentence}", style="yellow")
    for change in start.changes:
        was = f"changed since {start.found.path}: {change['key']} was {change['was']}, now {change['now']}"
        print_line(was, style="yellow")
    config, batch, world = job.config, job.batch, distributed.ranks().world_size
    threads = f" ({counted(torch.get_num_threads(), 'thread')} each)" if job.stack.device == "cpu" else ""
    if start.found.path is not None:
        print_line(f"Resumes from {start.found.path} at step {start.found.manifest['step']}")
    elif config.training.resume_from_checkpoint:
        print_line("warning: there is no checkpoint to resume from. The run starts at step 0.", style="yellow")
    print_line(
        f"{method(job)} of {config.model.model_name_or_path} with {job.stack.backend} ({job.stack.reason}) on {world} "
        f"x {job.hardware.name}{threads}: {job.size.trainable_parameters:,} trainable parameters"
    )
    if job.stack.device == "cuda" and world == 1 and (idle := nvml.idle_note()) is not None:
        print_line(idle)
    if (slow := load_arguments.emulation_note(config, job.stack)) is not None:
        print_line(slow)
    if job.size.active_parameters < job.size.parameters:
        print_line(f"Mixture of experts: {job.size.text}")
    if (beside := multimodal.summary(job.model)) is not None:
        print_line(beside)
    row = "row" if job.unpacked_because else "pack"
    length = "" if job.unpacked_because else f" of {job.layout.packs.pack_length} tokens"
    shared = job.context.size
    groups = job.context.data_ranks
    ranks = counted(world, "rank") if shared == 1 else f"{counted(groups, 'group')} of {shared} ranks"
    print_line(
        f"Each step: {counted(batch.global_batch_size, row)}{length} = {ranks} x "
        f"{counted(batch.per_device, row)} x {batch.accumulation} accumulated"
    )
    if (covered := adapter_coverage.coverage(job.model)) is not None:
        print_line(covered.summary)
        if (bare := covered.warning) is not None:
            if config.lora.continue_adapter:  # it keeps its layers
                bare = f"{bare.partition(' To train them')[0]} The adapter that is continued was created without them."
            print_line(f"warning: {bare}", style="yellow")
    if (missing := _missing_exports(job)) is not None:
        print_line(f"warning: {missing}", style="yellow")
    if job.unpacked_because:
        warned = config.data.packing  # asked for, and not what happens
        prefix = "warning: " if warned else ""
        text = f"{prefix}Rows are {'padded ' if shared == 1 else ''}documents, not packs: {job.unpacked_because}"
        if warned and shared == 1:
            usual = batch.global_batch_size * (config.data.row_length or 0) / job.layout.rows.lengths.mean()
            text += f". A step has {batch.global_batch_size} of them; as many packs would hold about {usual:.0f}"
        print_line(text, style="yellow" if warned else None)
    elif job.layouts.proof:
        print_line(f"Packs: {job.layouts.proof}")
    if job.stack.device == "cuda" and (shared > 1 or not job.unpacked_because):
        print_line(f"Attention: {job.attention.kernel} ({job.attention.reason})")
    if job.stack.device == "cuda":
        print_line(f"Kernels of the layers: {job.layer_kernels.kernels} ({job.layer_kernels.reason})")
    if (kept := recompute.configured(config).summary(job.stack)) is not None:
        print_line(kept)
    if (experts := experts_of(job)) is not None:
        whose = liger.backend_kernels(job.stack) if experts["grouped"] < experts["layers"] else "this package's"
        print_line(f"Kernels of the experts: {whose}")
    rate = config.training.learning_rate
    if (lost := master_weights.lost_updates_warning(job.model, job.master_weights, rate)) is not None:
        print_line(f"warning: {lost}", style="yellow")
    elif config.model.full_finetuning or "training.master_weights" in config.given:
        print_line(f"Trained weights: {job.master_weights.kind} ({job.master_weights.reason})")
    quantized = next((key for key in ("load_in_4bit", "load_in_8bit", "load_in_fp8") if getattr(config.model, key)), "")
    if quantized and (kept := adapter_coverage.unquantized_experts(job.model)) is not None:
        by_unsloth = quantized == "load_in_4bit" and job.stack.backend != "unsloth"
        remedy = ". On a GPU, model.backend: unsloth quantizes them" if by_unsloth else ""
        print_line(f"warning: model.{quantized} quantizes linear layers only: {kept}{remedy}", style="yellow")
    if config.model.load_in_fp8:
        print_line(f"FP8: {fp8.summary(job.model)}")
    if config.logging.trackers:
        print_line(f"Reports to TensorBoard and {', '.join(config.logging.trackers)}")
    print_line(f"Rows: {job.data.format}")
    console().print(ledger.table(job.data.ledgers, layout_facts(job)))
    if (table := ledger.sources_table(job.data.ledgers)) is not None:
        console().print(table)
    for note in ledger.notes(job.data.ledgers):
        print_line(note)


def print_micro_batch(job: Job) -> None:
    """Print what the search before the first step has found, if there was one."""
    size, row = job.micro_batch, "row" if job.unpacked_because else "pack"
    if size is None or not size.seconds:
        return
    print_line(
        f"Micro-batch: {counted(job.batch.per_device, row)} x {job.batch.accumulation} accumulated, {size.reason} "
        f"({size.seconds:.1f} s)"
    )


def activations_line(mode: Choice[Mode]) -> str | None:
    """How activations are kept; None if the configuration leaves nothing open, or it is not known yet."""
    took = f" ({mode.seconds:.1f} s)" if mode.seconds else ""
    return f"Chosen by auto: {mode.value.text}, {mode.reason}{took}" if mode.made else None


def print_activations(job: Job) -> None:
    """Print it, if it was open and is known."""
    if job.activations is not None and (line := activations_line(job.activations)) is not None:
        print_line(line)


def _missing_exports(job: Job) -> str | None:
    """What the adapter will not be exported as, and what works."""
    from finetune.engine.preflight import adapter_files, mergeable

    adapters = getattr(job.model, "peft_config", None)
    if not adapters:
        return None
    folder = adapter_files.base_folder(job.config)
    shape = files.read_json(folder / "config.json") if folder is not None else {}
    return mergeable.warning(next(iter(adapters.values())).to_dict(), shape)


def method(job: Job) -> str:
    """What is trained, in the field's terms."""
    model = job.config.model
    if model.full_finetuning:
        return "full fine-tuning"
    if model.load_in_fp8:
        return "LoRA on FP8 weights"
    return "QLoRA" if model.load_in_4bit else "8-bit LoRA" if model.load_in_8bit else "LoRA"


def print_finished(config: Config, done: JsonObject, named: Callable[[str], str]) -> None:
    """Print that there is nothing to do.

    Args:
        named: gives the settings in a text the names that the user knows.
    """
    from finetune.engine.checkpoint import run_settings

    training, steps = config.training, done.get("steps")
    early = bool(done.get("early_stopping"))
    text = (
        f"The run in {training.output_dir} is already finished: {steps} of {done.get('total_steps', steps)} steps"
        f"{', stopped early by training.early_stopping_patience' if early else ''}. Nothing was changed. A higher "
        f"{'training.early_stopping_patience, ' if early else ''}training.max_steps (or training.num_train_epochs) "
        "continues it."
    )
    if training.max_steps <= 0 and not early:
        text += f" One more epoch: the same command with {run_settings.further_epochs(training.num_train_epochs + 1)}"
    print_line(named(text))


def print_best(best: JsonObject | None, stopped_at: int | None, total: int) -> None:
    """Print which evaluation was the best and whether training ended early, if the run tracks it.

    Args:
        best: `best.best_summary` of the run.
        stopped_at: step at which early stopping ended the training.
        total: optimizer steps of the complete run.
    """
    if stopped_at is not None:
        print_line(f"Stopped early after step {stopped_at} of {total}, by training.early_stopping_patience.")
    if best is not None:
        which = "that of this step" if best["loaded"] else "that of the last step"
        value = f"{best['metric']} {best['value']:.4f} at step {best['step']}"
        print_line(f"Best evaluation: {value}. The final model is {which}.")


def print_conclusion(results: JsonObject, output_dir: Path, prediction: str | None) -> None:
    """Print the results of a finished run, before its verdict.

    Args:
        prediction: how right the dry run's prediction was, as a sentence; None if there was none.
    """
    parts = [f"{counted(results['steps'], 'step')}, {counted(results['tokens'], 'token')}"]
    after, before = results["eval_loss_after"], results["eval_loss_before"]
    if after is not None:
        by_set = [(f" ({name})", before[name], after[name]) for name in after] if isinstance(after, dict) else None
        for name, was, now in by_set or [("", before, after)]:
            parts.append(f"held-out loss{name} {was:.4g} -> {now:.4g}")
    scores = [("exact match", results["exact_match_before"], results["exact_match_after"])]
    before, after = (results.get(f"metric_{when}") or {} for when in ("before", "after"))
    scores += [(name, before.get(name, math.nan), value) for name, value in after.items()]
    shown = [f"{name} {was:.4f} -> {now:.4f}" for name, was, now in scores if now is not None]
    if shown:
        count = results["answers_scored"]
        parts.append(f"held-out {', '.join(shown)} ({counted(count, 'answer')})")
    if results["tokens_per_second_per_gpu"]:
        parts.append(f"{results['tokens_per_second_per_gpu']:,.0f} tokens/s per device")
    print_line("; ".join(parts) + ".")
    if prediction is not None:
        print_line(prediction)
    which = "run.json is" if results["final_files"] is None else "The model and run.json are"
    print_line(f"{which} in {output_dir}.")


def print_verdict(halves: list[str], change: str | None, output_dir: Path, *, saved: bool) -> None:
    """Print the last lines of a run: how it went, and what to do next.

    Args:
        change: the advice, if the run has not learned what it should.
        saved: whether there is a model to talk to.
    """
    for half in halves:
        print_line(half, style="yellow" if change and half == halves[0] else None)
    if change is not None:
        print_line(f"Change: {change}. The evidence: finetune review {shlex.quote(str(output_dir))}")
        return
    talk = f"finetune chat {shlex.quote(str(output_dir))}. " if saved else ""
    print_line(f"Next: {talk}Charts and review: finetune dashboard {shlex.quote(str(output_dir))}")
