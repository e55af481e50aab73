"""`finetune dryrun`, also `train --dry-run`: checks whether the real run would work and how fast, by running the same
code on one device.

The longest rows come first. After trial.LIMIT_SECONDS of measuring it reports what it has; if a single step takes
longer, it ends with a sentence after END_SECONDS. Only the measurement is saved, as a small JSON file in the cache: no
model, no checkpoint and no output folder.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.config import Config, resolve_batch
from finetune.engine.checkpoint import output_folder, resume
from finetune.engine.preflight import adapter_files
from finetune.engine.session import disk_checks, opening, report
from finetune.errors import RunError, UserError
from finetune.measure import held, slices, strategy
from finetune.measure.dry_run_report import TrialResult, launch_line, print_report
from finetune.redact import redact_tree
from finetune.runtime import files, scripts, subprocesses
from finetune.runtime.command import DONE, FAILED, console, load_config, print_line, run_with_options
from finetune.runtime.files import write_json
from finetune.runtime.options import Options, count
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject, ScriptTrainer
from finetune.text import counted

if TYPE_CHECKING:
    from finetune.config.rules import Mode
    from finetune.engine.job import Choice, Job
    from finetune.measure.trial import Trial

END_SECONDS = 600.0  # of measuring
SMOKE_BYTES = 2**20
SMOKE_SECONDS = 400  # ranks wait 300 s for each other before they report which one is missing


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
    found.add_switch("--longest", "find the longest row that fits with each way to keep activations")
    return found


def _run(argv: list[str]) -> int:
    options, rest, script = own_options().split_script(argv)
    if script:
        return run_script(script, options.json, options.devices, longest=options.longest)
    config = replace(load_config(rest, command="dryrun"), json=options.json)
    return run(config, devices=options.devices, longest=options.longest)


def run(config: Config, devices: int | None = None, *, longest: bool = False) -> int:
    """Run, measure and report. Returns 0 for go, 1 for no-go.

    Args:
        devices: of the real run; None for all GPUs, which are then tested.
        longest: as for `measure`.

    Raises:
        UserError: the configuration or the data is invalid (exit code 2).
    """
    opening.check_present(config)
    check_one_process()
    config, demo = opening.resolve_demo(config)
    world = strategy.largest_world(config, strategy.visible_gpus() if devices is None else devices)
    if devices is None:  # if GPUs share rows and too few are here, the fewest that do
        world = max(world, config.training.context_parallel)
    real = resolve_batch(config.training, world, config.data)
    if config.training.strategy == "shard" and demo is None and not slices.is_slice():
        folder = adapter_files.base_folder(config)
        layers = slices.layer_count(folder) if folder is not None else None
        sizes = held.read_sizes(folder) if folder is not None else None
        dense = sizes.dense_layers if sizes is not None else 0
        if folder is not None and layers is not None and slices.slice_layers(layers, dense) is not None:
            from finetune.measure.dry_run_slices import measure_slices  # it imports torch

            if longest:
                print_line("The longest row is not measured: a sharded model is measured in slices.")
            return measure_slices(config, folder, layers, world)
    collectives = None
    if devices is None:
        collectives = check_collectives(strategy.visible_gpus())  # while all GPUs are still visible and empty
    return measure(
        config,
        world,
        collectives,
        lambda: opening.open_session(config, real, demo=demo, stand_in=True),
        longest=longest,
    )


def run_script(words: list[str], json: Path | None, devices: int | None = None, *, longest: bool = False) -> int:
    """Dry run of a training script. Returns 0 for go, 1 for no-go.

    Args:
        words: the script and its arguments.
        json: where the report goes.
        devices, longest: as for `run`.

    Raises:
        UserError: the script, its arguments or its data are invalid (exit code 2).
    """
    check_one_process()
    scripts.check(words[0])
    gpus = strategy.visible_gpus() if devices is None else devices  # before the script's trainer hides all but one
    collectives = check_collectives(gpus) if devices is None else None

    def from_trainer(trainer: ScriptTrainer) -> int:
        from finetune.measure import trial

        world, job = trainer.take_launch_batch(gpus), trainer.job
        # A run moves the files of an earlier one aside.
        config = replace(job.config, json=json, training=replace(job.config.training, overwrite_output_dir=True))
        build = functools.partial(trial.prepare, build=trainer.build_trial)
        return measure(config, world, collectives, lambda: job, build, longest=longest)

    try:
        return scripts.run(words, scripts.Answer(trainer=from_trainer))
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        reason = f"the script ran out of GPU memory before training: {error}"
        facts = {"out_of_memory": True, "state_fits": False, "config": None}
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
    collectives: JsonObject | None,
    open_job: Callable[[], Job],
    prepare: Callable[[Job, Path], Trial] | None = None,
    *,
    longest: bool = False,
) -> int:
    """Open the job, measure it as one of `world` ranks would run it, and report. Returns 0 for go, 1 for no-go.

    Args:
        prepare: as `trial.prepare`.
        longest: find the longest row that fits with each way to keep activations, not only that of the job.
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
        # After the backend, which open_job starts.
        from finetune.measure import dry_run, longest_row, settle, trial

        job = settle.settle(job, world, resume.StartPoint())  # as the run will, by earlier measurements
        resolved = job.config

        def settle_as(job: Job, mode: Choice[Mode]) -> Job:
            return settle.settle(job, world, resume.StartPoint(), measured=mode)

        report.print_introduction(job, resume.StartPoint())
        disk_checks.check_space(config, job.model)
        disk_checks.check_saving(job)
        dry_run.show_example(job)
        # Next to the real output folder, to use the same disk.
        with tempfile.TemporaryDirectory(prefix=".dry-run-", dir=files.nearest_existing(output_dir)) as folder:
            with dry_run.time_limit(END_SECONDS, config, Path(folder)):
                trying = (prepare or trial.prepare)(job, Path(folder))
                modes = longest_row.TrialModes(
                    trial=trying, rows=longest_row.rows(job), settle=settle_as, every=longest
                )
                outcome = dry_run.run_trial(trying, Path(folder), world, modes)
                resolved = trying.job.config
    except RunError as error:
        full = _is_out_of_memory(error.__cause__)  # while the model was loading
        outcome = TrialResult(go=False, reason=str(error), measured={"out_of_memory": full, "state_fits": not full})
    outcome.measured.update(collectives=collectives, config=resolved.to_dict())
    if longest and outcome.go and outcome.measured.get("longest_rows") is None:
        print_line("The longest row is not known: a CPU run has no separate memory limit.")
    print_report(config, outcome, launch_line(world))
    return DONE if outcome.go else FAILED


def check_collectives(gpus: int) -> JsonObject | None:
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


def _is_out_of_memory(error: BaseException | None) -> bool:
    if "torch" not in sys.modules:
        return False
    import torch

    return isinstance(error, torch.OutOfMemoryError)


if __name__ == "__main__":
    raise SystemExit(main())
