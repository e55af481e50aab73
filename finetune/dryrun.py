"""`finetune dryrun`, also `train --dry-run`: checks whether the real run would work and how fast, by running the same
code on one device.

The longest rows come first. After trial.LIMIT_SECONDS of measuring it reports what it has; if a single step takes
longer, it ends with a sentence after END_SECONDS. Only the measurement is saved, as a small JSON file in the cache: no
model, no checkpoint and no output folder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from finetune.config import Batch, Config, fixing_arguments, resolve_batch
from finetune.engine.checkpoint import output_folder, resume
from finetune.engine.model import read_ahead
from finetune.engine.preflight import adapter_files
from finetune.engine.session import opening, out_of_memory, report, start_checks
from finetune.errors import RunError, UserError
from finetune.measure import rules, sharding, slices, strategy, subprocess_dry_run
from finetune.redact import redact_arguments, redact_tree
from finetune.runtime import bootstrap, files, launch_lines, scripts, subprocesses
from finetune.runtime.command import DONE, FAILED, console, load_config, print_line, run_with_options
from finetune.runtime.files import write_json
from finetune.runtime.hooks import NO_HOOKS, Hooks
from finetune.runtime.machine.hardware import NOTABLE_OUTSIDE_BYTES, probe
from finetune.runtime.options import Options, count, without_json
from finetune.runtime.ranks import distributed
from finetune.text import counted

if TYPE_CHECKING:
    from finetune.engine.job import Job
    from finetune.measure.measurements import Measurement
    from finetune.measure.micro_batch import Attempt
    from finetune.measure.trial import Trial

END_SECONDS = 600.0  # of measuring
SMOKE_BYTES = 2**20
SHARDED_WORLDS = (2, 4, 8)  # for which a sharded run is predicted
SMOKE_SECONDS = 400  # ranks wait 300 s for each other before they report which one is missing


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a dry run. `reason` is None for go."""

    go: bool
    reason: str | None
    measured: dict[str, Any]


PURPOSE = (
    "Measure the job on one device: memory, speed and duration of the real run, within 10 minutes. Saves nothing else."
    " The same as `finetune train --dry-run`."
)
NOTES = "Exit code 0: go, 1: no-go, 2: bad input."


def main(argv: list[str] | None = None) -> int:
    """Dry run of a configuration or a script. Returns the exit code."""
    return run_with_options(own_options().format_help(), argv, _run, takes_script=True)


def own_options() -> Options:
    """The options of this command."""
    found = Options("dryrun", PURPOSE, notes=NOTES, script=True)
    found.add("--devices", count, "N", "devices of the real run (default: all GPUs of this machine)")
    return found


def _run(argv: list[str]) -> int:
    options, rest, script = own_options().split_script(argv)
    if script:
        return of_script(script, options.json, options.devices)
    return run(replace(load_config(rest, command="dryrun"), json=options.json), devices=options.devices)


def run(config: Config, hooks: Hooks = NO_HOOKS, devices: int | None = None) -> int:
    """Run, measure and report. Returns 0 for go, 1 for no-go.

    Args:
        devices: of the real run; None for all GPUs, which are then tested.

    Raises:
        UserError: the configuration or the data is invalid (exit code 2).
    """
    opening.check_present(config)
    read_ahead.start(config)
    check_one_process()
    config, demo = opening.resolve_demo(config)
    world, real = intended_batch(config, strategy.visible_gpus() if devices is None else devices)
    if config.training.strategy == "shard" and demo is None and not slices.is_slice():
        folder = adapter_files.base_folder(config)
        layers = slices.layers_of(folder) if folder is not None else None
        if folder is not None and layers is not None and slices.counts(layers) is not None:
            return in_slices(config, folder, layers, world)
    collectives = None
    if devices is None:
        collectives = check_collectives(strategy.visible_gpus())  # while all GPUs are still visible and empty
    return measure(config, world, collectives, lambda: opening.open_session(config, real, demo=demo, hooks=hooks))


def of_script(words: list[str], json: Path | None, devices: int | None = None) -> int:
    """Dry run of a training script. Returns 0 for go, 1 for no-go.

    Args:
        words: the script and its arguments.
        json: where the report goes.
        devices: as for `run`.

    Raises:
        UserError: the script, its arguments or its data are invalid (exit code 2).
    """
    check_one_process()
    scripts.check(words[0])
    gpus = strategy.visible_gpus() if devices is None else devices  # before the script's trainer hides all but one
    collectives = check_collectives(gpus) if devices is None else None

    def of_trainer(trainer: Any) -> int:
        from finetune.measure import trial

        world, job = trainer.take_batch_of(gpus), trainer.job
        # A run moves the files of an earlier one aside.
        config = replace(job.config, json=json, training=replace(job.config.training, overwrite_output_dir=True))
        build = functools.partial(trial.prepare, build=trainer.build_trial)
        return measure(config, world, collectives, lambda: job, build)

    def of_configuration(config: Config, hooks: Hooks) -> int:
        return run(replace(config, json=json), hooks, devices)

    try:
        return scripts.run(words, scripts.Answer(trainer=of_trainer, configuration=of_configuration))
    except Exception as error:
        if not _full(error):
            raise
        reason = f"the script ran out of GPU memory before training: {error}"
        facts = {"out_of_memory": True, "state_fits": False, "config": None, "script": scripts.TRAINER}
        print_line(f"NO-GO: {reason}", style="red")
        if json:
            write_json(json, redact_tree({"go": False, "reason": reason, "launch": None, **facts}))
        return FAILED


def check_one_process() -> None:
    """Raise a UserError if a launcher has started several."""
    if distributed.ranks().world_size > 1:
        raise UserError(
            f"a dry run uses one device, but was launched with {distributed.ranks().world_size} processes. Start it "
            "with `python -m finetune.dryrun ...`; it prints the command for the real run."
        )


def measure(
    config: Config,
    world: int,
    collectives: dict[str, Any] | None,
    open_job: Callable[[], Job],
    prepare: Callable[[Job, Path], Trial] | None = None,
) -> int:
    """Open the job, measure it as one of `world` ranks would run it, and report. Returns 0 for go, 1 for no-go.

    Args:
        prepare: as `trial.prepare`.
    """
    output_dir = Path(config.training.output_dir)
    output_folder.check_output(output_dir, resuming=False, overwrite=True)  # nothing is kept there
    resolved = config
    try:
        if collectives is not None and not collectives["ok"]:
            raise RunError(
                f"the {collectives['world_size']} GPUs cannot communicate: {collectives['message']}. To test one "
                "GPU, set CUDA_VISIBLE_DEVICES=0."
            )
        job = open_job()
        from finetune.measure import micro_batch, trial

        resolved = job.config
        size = micro_batch.choose(job, None, world)  # as the run will, if an earlier search has found one
        job.batch = job.batch.divided(size.per_device)
        report.print_introduction(job, resume.StartPoint())
        start_checks.check_space(config, job.model)
        start_checks.check_saving(job)
        show_example(job)
        # Next to the real output folder, to use the same disk.
        with tempfile.TemporaryDirectory(prefix=".dry-run-", dir=files.existing(output_dir)) as folder:
            with ended_after(END_SECONDS, config, Path(folder)):
                trying = (prepare or trial.prepare)(job, Path(folder))
                outcome = try_out(trying, Path(folder), world)
    except RunError as error:
        full = is_out_of_memory(error)  # while the model was loading
        outcome = Outcome(go=False, reason=str(error), measured={"out_of_memory": full, "state_fits": not full})
    outcome.measured.update(collectives=collectives, config=resolved.to_dict(), script=scripts.kind())
    print_report(config, outcome, launch_line(world))
    return DONE if outcome.go else FAILED


def try_out(trial: Trial, folder: Path, world: int) -> Outcome:
    """Train on the longest rows and on typical ones, search for the largest micro-batch that fits, then save, zero,
    reload and compare the weights.

    Raises:
        RunError: a loss is not finite, the disk is full, or weights differ after reloading.
    """
    from finetune.measure import measurements
    from finetune.measure.trial import WORST_STEPS, holds_its_state, saved_bytes, saved_bytes_without_checkpointing

    trainer, logger = trial.trainer, trial.logger
    full = None
    try:
        with logger:
            trial.memory.reset()
            with out_of_memory.explain_out_of_memory(trial.job):
                trainer.train()
            if len(trial.steps) <= WORST_STEPS:
                raise RunError(_too_slow(trial))
            measured, results = trial.measure(process_start()), logger.results()
            with out_of_memory.explain_out_of_memory(trial.job):
                if trial.job.eval_layout is not None and not trial.budget.over:
                    trainer.evaluate()
    except RunError as error:
        if not is_out_of_memory(error):
            raise
        full = str(error)  # not the error itself: its frames keep the memory allocated
    if full is not None:
        if not holds_its_state(trial.trainer):
            reason = (
                "weights, gradients and optimizer state fill the device before any row is processed; "
                "`finetune advise` searches for settings that fit."
            )
            facts = {"out_of_memory": True, "state_fits": False}
            return Outcome(go=False, reason=f"{full} Tried: {reason}", measured=facts)
        sizes = search(trial, world, start=None)
        facts = {"micro_batch_search": sizes, "out_of_memory": True, "state_fits": True}
        return Outcome(go=False, reason=_too_large(full, sizes), measured=facts)
    rows = trial.job.layout, trial.job.batch.per_device
    kept = saved_bytes(trainer, *rows) if slices.is_slice() else None
    all_kept = saved_bytes_without_checkpointing(trainer, *rows) if slices.is_slice() else None
    saved = None
    if kept is None:  # slices are of no other run
        saved = measurements.keep(measured)  # before the search, which may end badly
    sizes = search(trial, world, start=trial.job.batch.per_device)
    check_reload(trainer, folder / "saved")
    results |= {
        "longest_row_tokens": int(trial.job.layout.tokens.max()),
        "master_weights": trial.job.master_weights.to_dict(),
        "memory": memory_report(trial, measured),
        "step": split(measured),
        "micro_batches": micro_batches(trial),
        "projection": projection(measured, world),
        "micro_batch_search": sizes,
        "measurement": measured.to_dict(),
        "measurement_file": saved and str(saved),
        "saved_bytes": kept,
        "saved_bytes_without_checkpointing": all_kept,
    }
    return Outcome(go=True, reason=None, measured=results)


@contextlib.contextmanager
def ended_after(seconds: float, config: Config, folder: Path) -> Iterator[None]:
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


def _too_slow(trial: Trial) -> str:
    from finetune.measure.trial import ENOUGH, LIMIT_SECONDS, WORST_STEPS

    return (
        f"{LIMIT_SECONDS / 60:.0f} minutes were enough for {len(trial.steps)} of {WORST_STEPS + ENOUGH} steps: too few "
        "to predict from. Lower data.max_length or training.per_device_train_batch_size, take a smaller model, or use "
        "a GPU."
    )


# --- a model in slices ------------------------------------------------------------------------------------------------


def in_slices(config: Config, folder: Path, layers: int, world: int) -> int:
    """Measure two slices of a model that will be sharded, each by a dry run in a process of its own, and report what
    each rank needs. Returns 0 for go, 1 for no-go.

    Raises:
        RunError: a slice does not train.
    """
    from finetune.engine.optimizer import master_weights
    from finetune.engine.sharding import shard  # they import torch
    from finetune.measure.measurements import Measurement

    cut = slices.counts(layers)
    sizes = sharding.sizes(folder)
    assert cut is not None
    if sizes is None:
        raise RunError(f"The sizes of the layers cannot be read: {folder} has no safetensors files.")
    config = master_weights.resolve_auto(config, probe().memory_gib, sizes.total)
    world = max(world, SHARDED_WORLDS[0])  # on one GPU there is nothing to share
    batch = resolve_batch(config.training, world, config.data)
    fixing = fixing_arguments(config.training, world, config.data)
    target, given = strategy.given_command()
    given = _for_training(given)
    reports = []
    with tempfile.TemporaryDirectory(prefix="slices-") as place:
        for count in cut:
            model = slices.write(folder, count, Path(place) / f"{count}-layers")
            with console().status(f"dry run of {counted(count, 'layer')} of {layers}"):
                changed = {
                    "model.model_name_or_path": model,
                    "training.per_device_train_batch_size": batch.per_device,
                    "training.master_weights": config.training.master_weights,
                }
                settings = [word for key, value in changed.items() for word in (f"--{key}", str(value))]
                reports.append(
                    subprocess_dry_run.report_of(
                        target,
                        [*given, *settings, *fixing, "--dry-run"],
                        on_gpu=bool(strategy.visible_gpus()),
                        ranks=world,
                        environment={slices.VARIABLE: "1"},
                    )
                )
    refused = next((one for one in reports if not one["go"]), None)
    line = launch_line(world)
    if refused is not None:
        reason = f"{counted(cut[0], 'layer')} of {layers} already fail: {refused['reason']}"
        print_line(f"NO-GO: {reason}", style="red")
        if config.json:
            write_json(config.json, redact_tree({"go": False, "reason": reason, "launch": line}))
        return FAILED
    few, more = (Measurement.from_dict(one["measurement"]) for one in reports)
    once = shard.would_reduce_once(config)
    saved, all_saved = ([one[name] for one in reports] for name in ("saved_bytes", "saved_bytes_without_checkpointing"))
    found = slices.sharded(few, more, saved, all_saved, cut, layers, config, sizes, once)
    tokens = reports[-1]["longest_row_tokens"] * found.whole.per_device
    result = sharded_result(found, tokens, world)
    result["measurement_file"] = str(slices.keep(found))
    print_shards(config, found, result, cut, line)
    return DONE if result["go"] else FAILED


def sharded_result(found: slices.Sharded, tokens: int, world: int) -> dict[str, Any]:
    """Figures by number of ranks on which the global batch divides, and whether `world` of them hold the model.

    Args:
        tokens: of the longest micro-batch.
    """
    from finetune.measure import measurements

    whole, gib = found.whole, 2**30
    device = whole.memory_bytes
    limit = None if device is None else rules.MEMORY_MARGIN * device
    rows = []
    worlds: set[int] = {*SHARDED_WORLDS, *([world] if world > 1 else [])}
    for ranks in sorted(worlds):
        if whole.global_batch_size % (ranks * whole.per_device):
            continue
        backend = "gloo" if device is None else "nccl"
        curve, source = measurements.find_comm(ranks, backend, whole.facts["device"], os.environ)
        work = whole.work(ranks, None if str(ranks) in whole.compute_seconds else whole.compute_seconds["1"] / ranks)
        one = slices.predict(found, work, ranks, curve)
        rows.append(
            {
                "world_size": ranks,
                "peak_memory_gib": one.peak_memory_bytes / gib,
                "step_seconds": one.step_seconds,
                "exposed_seconds": one.exposed_seconds if curve is not None else None,
                "communication": source,
                "tokens_per_second": one.tokens_per_second,
                "fits": limit is None or one.peak_memory_bytes <= limit,
                "longest_row_tokens": slices.longest_document(found, tokens, limit, ranks),
            }
        )
    fitting = [row["world_size"] for row in rows if row["fits"]]
    reason = None
    if world not in fitting:
        where = f"it fits on {fitting[0]}" if fitting else f"{rows[-1]['world_size']} are not enough either"
        reason = f"the job does not fit on {world} GPUs; {where}"
    activations = {"layers": found.activation_bytes / gib, "outside": found.fixed_bytes / gib}
    return {
        "go": reason is None,
        "reason": reason,
        "sharded": {"rows": rows, "activation_gib": activations, "device_gib": device and device / gib},
        "longest_row_tokens": tokens // whole.per_device,
        "measurement": whole.to_dict(),
    }


def print_shards(
    config: Config, found: slices.Sharded, result: dict[str, Any], cut: tuple[int, int], line: str
) -> None:
    """The figures as a table, and go or no-go."""
    kept = result["sharded"]["activation_gib"]
    console().print(f"Measured with {cut[0]} and {cut[1]} of {found.layers} layers on one device:", highlight=False)
    print_line(
        f"activations on the longest rows ({counted(result['longest_row_tokens'], 'token')}): {kept['layers']:.2f} GiB "
        f"in the layers, {kept['outside']:.2f} GiB outside them"
    )
    shown = Table(title="Sharded", title_justify="left")
    for name in ("GPUs", "GiB on each", "step, ms", "of it waiting", "tokens/s", "longest row that fits"):
        shown.add_column(name, justify="right")
    for row in result["sharded"]["rows"]:
        waits, longest = row["exposed_seconds"], row["longest_row_tokens"]
        shown.add_row(
            str(row["world_size"]),
            f"{row['peak_memory_gib']:.2f}" + ("" if row["fits"] else " (does not fit)"),
            f"{1e3 * row['step_seconds']:,.1f}" + ("" if waits is not None else " + communication"),
            "not measured" if waits is None else f"{1e3 * waits:,.1f}",
            f"{row['tokens_per_second']:,.0f}",
            "-" if longest is None else f"{longest:,}",
        )
    console().print(shown)
    if any(row["exposed_seconds"] is None for row in result["sharded"]["rows"]):
        print_line("`finetune bench comm` on the GPUs of the run measures how long gathering weights takes.")
    if result["go"]:
        console().print("GO. Only the measurement was saved. Start the real run with:", style="green")
        print_line(f"  {line}")
    else:
        print_line(f"NO-GO: {result['reason']}.", style="red")
    if config.json:
        write_json(config.json, redact_tree(result | {"launch": line}))


# --- what was measured ----------------------------------------------------------------------------------------------


def memory_report(trial: Trial, measured: Measurement) -> dict[str, float | None]:
    """Memory in GiB: peak on the longest rows, total and limit of the device, and what other processes use."""
    outside = getattr(trial.memory, "outside_bytes", None)
    return {
        "peak_gib": measured.peak_memory_bytes / 2**30,
        "device_gib": None if measured.memory_bytes is None else measured.memory_bytes / 2**30,
        "limit_gib": None if trial.memory.limit_bytes is None else trial.memory.limit_bytes / 2**30,
        "held_by_others_gib": None if outside is None else outside / 2**30,
    }


def split(measured: Measurement) -> dict[str, float]:
    """Mean seconds per optimizer step on one device, by phase."""
    work = measured.work(1)
    return {
        "forward": work.compute_seconds * (1 - work.backward_share),
        "backward": work.compute_seconds * work.backward_share,
        "data": work.data_seconds,
        "optimizer": work.optimizer_seconds,
        "other": work.other_seconds,
    }


def micro_batches(trial: Trial) -> list[dict[str, float]]:
    """Each measured micro-batch: tokens including padding, seconds of the forward and the backward pass."""
    return [
        {"tokens": size, "forward": forward, "backward": backward}
        for sizes, step in zip(trial.tokens.tolist(), trial.steps, strict=False)
        for size, forward, backward in zip(sizes, step["forward"], step["backward"], strict=True)
    ]


def projection(measured: Measurement, world: int) -> dict[str, Any]:
    """The predicted run on one device, and the number of devices in the launch line."""
    from finetune.measure.predict import predict

    one = predict(measured.work(1), 1, None)
    return {
        "steps": measured.steps,
        "step_seconds": one.step_seconds,
        "tokens_per_second": one.tokens_per_second,
        "start_up_seconds": measured.start_up_seconds,
        "hours_on_one_device": one.hours,
        "devices_of_the_launch_line": world,
    }


def search(trial: Trial, world: int, start: int | None) -> dict[str, Any]:
    """Search for the largest micro-batch that fits; `start` is a size that fits, None if the current one does not."""
    from finetune.measure import measurements, micro_batch
    from finetune.measure.trial import LIMIT_SECONDS

    memory, job = trial.memory, trial.job
    if slices.is_slice():
        return {"attempts": [], "reason": "not searched, because this is a slice of the model"}
    sizes = allowed = micro_batch.allowed_sizes(job, world)
    if memory.limit_bytes is None:
        return {"attempts": [], "reason": "not searched, because a CPU run has no separate memory limit"}
    if start is None:
        sizes = [size for size in sizes if size < job.batch.per_device]
    if not sizes or sizes == [start]:
        return {"attempts": [], "reason": "the settings allow no other size"}

    def attempt(size: int) -> Attempt:
        with console().status(f"trying {counted(size, 'row')} per micro-batch"):
            return micro_batch.try_size(trial.trainer, job.layout, size, memory)

    attempts = micro_batch.search(sizes, start or sizes[-1], attempt, lambda: trial.budget.over)
    if not attempts:
        return {"attempts": [], "reason": f"not searched, because {LIMIT_SECONDS / 60:.0f} minutes were over"}
    found = micro_batch.summary(attempts, memory.limit_bytes, micro_batch.real_share(job, world), allowed)
    measurements.keep_sizes(measurements.facts(job), found)  # a run takes the fastest of them
    return found


def check_collectives(gpus: int) -> dict[str, Any] | None:
    """Run a short all-reduce over all GPUs of this machine in separate processes. None with fewer than two GPUs."""
    if gpus < 2:
        return None
    arguments = ["comm", "--world-sizes", str(gpus), "--sizes", str(SMOKE_BYTES), "--runs", "1", "--steps", "5"]
    with (
        tempfile.TemporaryDirectory(prefix="smoke-") as folder,
        console().status(f"testing an all-reduce over {counted(gpus, 'GPU')}"),
    ):
        place = Path(folder) / "comm.json"
        command = [sys.executable, "-m", "finetune.bench", *arguments, "--json", str(place)]
        try:
            done = subprocesses.run(command, timeout=SMOKE_SECONDS)
        except subprocess.TimeoutExpired:
            message = f"no result after {SMOKE_SECONDS} s. `NCCL_DEBUG=INFO finetune bench comm` shows where they hang"
            return {"world_size": gpus, "ok": False, "message": message}
        if done.returncode:
            return {"world_size": gpus, "ok": False, "message": done.stderr.strip()[-2000:].removeprefix("error: ")}
        found = json.loads(place.read_text())["collectives"]["all_reduce"][0]
    message = f"1 MiB in {found['seconds']['median'] * 1e6:,.0f} us"
    return {"world_size": gpus, "ok": True, "message": message}


def process_start() -> float:
    """Start time of this process, in seconds since the epoch."""
    import psutil

    return psutil.Process().create_time()


def is_out_of_memory(error: RunError) -> bool:
    """Whether an error was caused by running out of device memory."""
    import torch

    return isinstance(error.__cause__, torch.OutOfMemoryError)


def _full(error: Exception) -> bool:
    if "torch" not in sys.modules:
        return False
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def _too_large(message: str, sizes: dict[str, Any]) -> str:
    if sizes.get("flag"):
        return (
            f"{message} Tried: the largest micro-batch that fits has {counted(sizes['largest_that_fits'], 'row')} "
            f"({sizes['flag']})."
        )
    if sizes["attempts"]:
        return f"{message} Tried: no smaller micro-batch fits either; `finetune advise` searches for settings that fit."
    return message


def check_reload(trainer: Any, folder: Path) -> None:
    """Save the trained weights, zero them in memory, load them from disk and compare.

    Raises:
        RunError: they differ.
    """
    import torch

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


def show_example(job: Any) -> None:
    """Print one row with its supervised tokens marked."""
    from finetune.data.templates.encoder import Encoded, preview

    ids, labels = job.data.train[0]
    console().print("One training row; supervised tokens are marked:", highlight=False)
    example = Encoded(input_ids=ids, labels=labels)
    print_line(preview(example, job.tokenizer, color=console().is_terminal))


# --- the report -----------------------------------------------------------------------------------------------------


def print_report(config: Config, outcome: Outcome, line: str) -> None:
    """Print go or no-go, with the measurements and the launch line of the real run."""
    if config.training.strategy == "shard":
        print_line(
            "warning: training.strategy is shard, and this dry run measures the whole model on one device: it has too "
            "few layers to measure slices of it. A sharded run needs less memory per GPU, and gathers weights.",
            style="yellow",
        )
    if outcome.go:
        console().print(table(outcome.measured))
        for note in notes(outcome.measured):
            print_line(note)
        console().print("GO. Only the measurement was saved. Start the real run with:", style="green")
        print_line(f"  {line}")
    else:
        print_line(f"NO-GO: {outcome.reason}", style="red")
    if held := output_folder.run_files(Path(config.training.output_dir)):
        training = config.training
        if outcome.go and not (training.resume_from_checkpoint or training.overwrite_output_dir):
            print_line(f"warning: {output_folder.output_taken_message(training.output_dir, held)}", style="yellow")
    if config.json:
        verdict = {"go": outcome.go, "reason": outcome.reason, "launch": line, **outcome.measured}
        write_json(config.json, redact_tree(verdict))


def table(measured: dict[str, Any]) -> Table:
    """The measured figures."""
    memory, step, whole = measured["memory"], measured["step"], measured["projection"]
    shown = Table(title="Dry run", title_justify="left", show_header=False)
    shown.add_row("longest row", f"{counted(measured['longest_row_tokens'], 'token')}")
    device = "" if memory["device_gib"] is None else f" of {memory['device_gib']:.1f} GiB"
    shown.add_row("peak memory, longest rows", f"{memory['peak_gib']:.2f} GiB{device}")
    parts = [f"{name} {1e3 * seconds:,.1f}" for name, seconds in step.items()]
    shown.add_row("typical step, in ms", f"{1e3 * sum(step.values()):,.1f} = {' + '.join(parts)}")
    shown.add_row("throughput, one device", f"{whole['tokens_per_second']:,.0f} tokens/s on typical rows")
    length = f"{counted(whole['steps'], 'step')} in {duration(3600 * whole['hours_on_one_device'])}"
    shown.add_row("whole run, one device", f"{length}, including {whole['start_up_seconds']:.0f} s of startup")
    if measured["collectives"]:
        found = measured["collectives"]
        shown.add_row(f"all-reduce over {counted(found['world_size'], 'GPU')}", found["message"])
    losses = measured["losses"]
    shown.add_row(f"loss, first and last of {len(losses)}", f"{losses[0]:.4f}, {losses[-1]:.4f}")
    shown.add_row("saved and reloaded", "equal")
    return shown


def notes(measured: dict[str, Any]) -> list[str]:
    """Recommendations and warnings that follow from the figures."""
    sizes, memory = measured["micro_batch_search"], measured["memory"]
    lines = []
    if not sizes["attempts"]:
        lines.append(f"Micro-batch size: {sizes['reason']}.")
    elif sizes["largest_that_fits"] is None:
        lines.append(f"No micro-batch size stays below the limit of {sizes['limit_gib']:.1f} GiB (80% of the memory).")
    else:
        tried = ", ".join(_attempt(one) for one in sizes["attempts"])
        lines.append(
            f"Micro-batch size, limit {sizes['limit_gib']:.1f} GiB (80% of the memory): {tried}. The largest that fits "
            f"is {sizes['largest_that_fits']}. Recommended: {sizes['flag']}"
        )
        if sizes["recommended"] != measured["measurement"]["per_device"]:
            lines.append("A run that leaves the size open takes it: repeat the dry run to measure the job with it.")
    if memory["limit_gib"] is not None and memory["peak_gib"] > memory["limit_gib"]:
        lines.append("warning: peak memory is above 80% of the GPU memory; fragmentation may still end the run.")
    if (memory["held_by_others_gib"] or 0.0) * 2**30 > NOTABLE_OUTSIDE_BYTES:
        lines.append(
            f"warning: other processes use {memory['held_by_others_gib']:.1f} GiB of this GPU, so these timings may be "
            "slower than on an idle GPU."
        )
    return lines


def _attempt(one: dict[str, Any]) -> str:
    if one["peak_bytes"] is None:
        return f"{one['per_device']} out of memory"
    speed = f"{one['tokens_per_second']:,.0f} tokens/s" if one["tokens_per_second"] else "not timed"
    return f"{one['per_device']} {one['peak_bytes'] / 2**30:.1f} GiB {speed}"


def duration(seconds: float) -> str:
    """A duration in hours, minutes or seconds."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.1f} seconds"


def intended_batch(config: Config, gpus: int) -> tuple[int, Batch]:
    """The real run's number of ranks and its batch: all GPUs, or as many as the global batch allows."""
    world = strategy.largest_world(config, gpus)
    return world, resolve_batch(config.training, world, config.data)


def launch_line(world: int) -> str:
    """The command that launches the real run on `world` devices with the given arguments."""
    import torch

    target, given = strategy.given_command()
    if scripts.command() is None:  # a script's arguments are its own
        given = _for_training(given)
    launcher = launch_lines.shown(world, on_cpu=not torch.cuda.is_available())
    return shlex.join([*launcher, *target, *redact_arguments(given)])


def _for_training(arguments: list[str]) -> list[str]:
    """The arguments of a dry run without those that make it one."""
    return [word for word in without_json(arguments) if word not in ("--dry-run", "--dry_run")]


if __name__ == "__main__":
    raise SystemExit(main())
