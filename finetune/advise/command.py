"""The command line of `finetune advise` and the sequence of its steps."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from finetune.advise.machine import devices_here, launch, warnings
from finetune.config import Config, fixed_batch_arguments, with_fixed_batch
from finetune.measure import strategy
from finetune.measure.predict import predict
from finetune.runtime import scripts
from finetune.runtime.command import DONE, FAILED, load_config, print_line, run_with_options
from finetune.runtime.files import write_json
from finetune.runtime.machine import hardware
from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.options import Options, counts, number, path
from finetune.runtime.types import JsonObject
from finetune.text import duration

if TYPE_CHECKING:
    from finetune.advise.candidates import DryRunner, DryRunResult
    from finetune.measure.measurements import Measurement
    from finetune.measure.predict import Curve

PURPOSE = (
    "Recommend a number of GPUs for your configuration: measure it on one GPU, measure the all-reduce, and predict the"
    " other world sizes."
)
NOTES = (
    "Exit code 0: done, 1: the model does not fit on one GPU, or a measurement failed, 2: bad input. docs/advise.md"
    " describes the prediction."
)


def main(argv: list[str] | None = None) -> int:
    """Advise on a configuration. Returns the exit code."""
    return run_with_options(own_options().format_help(), argv, run, takes_script=True)


def own_options() -> Options:
    """The options of this command."""
    found = Options("advise", PURPOSE, notes=NOTES, script=True)
    default = "default: 1, 2, 4 and 8, up to the number of GPUs; 1,2 on a CPU"
    found.add("--world-sizes", counts, "1,2,4,8", f"numbers of GPUs to predict ({default})")
    found.add("--price-per-gpu-hour", number, "X", "also print the cost of each run")
    comm = "read the all-reduce from an earlier `finetune bench comm --json`, of this machine or another"
    found.add("--comm", path, "FILE.json", comm)
    found.add_switch("--fastest", "recommend the fastest world size at any efficiency (default: at least 70%%)")
    return found


def run(argv: list[str]) -> int:
    """Measure, predict, decide, print, write.

    Raises:
        UserError: invalid options, configuration, script or data.
        RunError: a measurement failed for another reason than memory.
    """
    options, rest, script = own_options().split_script(argv)
    if script:
        return advise_script(script, options)
    config = load_config(rest, command="advise")
    from finetune.advise.candidates import DryRunner
    from finetune.advise.prediction import check_job

    check_job(config)
    machine, given = inspect_machine(options)
    cores = machine.cpu_cores if machine.device == "cpu" else None
    # All numbers of GPUs are compared at the global batch of a launch on all that are here.
    launched = strategy.largest_world(config, devices_here(machine))
    arguments = [*rest, *fixed_batch_arguments(config.training, launched, config.data)]
    bench = DryRunner(arguments=arguments, cpu_cores=cores, most=most_sizes(options, devices_here(machine)))
    given_config, config = config, replace(config, training=with_fixed_batch(config.training, launched, config.data))
    base = bench.try_out(())
    if base.measured is None:
        return does_not_fit(options, bench, base, machine)
    advice = advise_configuration(config, options, machine, bench, base, given)
    write(given_config, options, machine, advice)
    return DONE


def advise_script(script: list[str], options: argparse.Namespace) -> int:
    """The same for a script: its first dry run reports the configuration.

    Args:
        script: and its arguments.
    """
    scripts.check(script[0])
    from finetune.advise.candidates import DryRunner
    from finetune.advise.prediction import check_job

    machine, given = inspect_machine(options)
    here, cores = devices_here(machine), machine.cpu_cores if machine.device == "cpu" else None
    bench = DryRunner(arguments=[], cpu_cores=cores, script=script, devices=here, most=most_sizes(options, here))
    base = bench.try_out(())
    if base.config is None:  # of a script that has filled the GPU before its training
        print_line(f"NO: {base.reason}", style="red")
        if options.json:
            write_json(options.json, {"kind": "advice", "world_size": None, "reason": base.reason, "launch": None})
        return FAILED
    config = Config.from_dict(base.config)
    check_job(config)
    # As for a configuration, all numbers of GPUs are compared at the global batch of a launch on all that are here.
    bench.devices, training = 1, config.training
    bench.arguments = ["--training.global_batch_size", str(training.global_batch_size)]
    training = replace(training, per_device_train_batch_size=None, gradient_accumulation_steps=None)
    config = replace(config, training=training)
    if base.measured is None:
        return does_not_fit(options, bench, base, machine)
    advice = advise_configuration(config, options, machine, bench, base, given)
    write(None, options, machine, advice)
    return DONE


def inspect_machine(options: argparse.Namespace) -> tuple[Hardware, dict[int, Curve]]:
    """The machine, after printing its warnings; and the all-reduce curves of `--comm`, by world size."""
    from finetune.measure.measurements import read_comm

    given = read_comm(options.comm) if options.comm else {}
    machine = hardware.survey()
    for warning in warnings(machine):
        print_line(f"warning: {warning}", style="yellow")
    return machine, given


def most_sizes(options: argparse.Namespace, here: int) -> int:
    """Numbers of devices that may be measured, before the job is known."""
    return len({1, *(options.world_sizes or [world for world in (1, 2, 4, 8) if world <= here])})


def world_sizes(options: argparse.Namespace, here: int, given: Mapping[int, Curve]) -> list[int]:
    """The world sizes to predict: all are compared with one device."""
    return sorted({1, *(options.world_sizes or [world for world in (2, 4, 8) if world <= here or world in given])})


def advise_configuration(
    config: Config,
    options: argparse.Namespace,
    machine: Hardware,
    bench: DryRunner,
    base: DryRunResult,
    given: Mapping[int, Curve],
) -> JsonObject:
    """Predict the world sizes, choose one, and print all of it."""
    from finetune.advise import candidates, prediction, report, verdict

    assert base.measured is not None
    worlds = world_sizes(options, devices_here(machine), given)
    asked = options.world_sizes or options.fastest or len(worlds) == 1
    short = None if asked else too_short(base.measured, bench.seconds)
    most = None if short else base.recommended  # nor is a larger micro-batch worth another dry run
    worlds = worlds[:1] if short else worlds
    measured = candidates.measure_at_world_sizes(config, bench, base.measured, most, worlds)
    rows, chosen, connecting = prediction.compare(measured, options, machine)
    searched = most is not None and config.training.gradient_accumulation_steps is None
    settings = [candidates.PER_DEVICE, str(chosen.per_device)] if searched else []
    arguments = [*bench.script[1:], *bench.flags([*bench.arguments, *settings])]
    target = bench.script[:1] or ["-m", "finetune.train"]
    environment, line = launch(chosen.world_size, machine, arguments, target)
    one, weights = base.measured, base.master_weights
    notes = [f"Trained weights: {weights['kind']} ({weights['reason']})."] if weights else []
    advice = {
        "kind": "advice",
        "world_size": chosen.world_size,
        "reason": short or verdict.decision_sentence(chosen, rows),
        "when": one.when,
        "device": machine.name,
        "parameters": one.parameters,
        "active_parameters": one.active_parameters,
        "trainable_parameters": one.trainable_parameters,
        "environment": environment,
        "launch": line,
        "rows": [row.to_dict() for row in rows],
        "master_weights": base.master_weights,
        "longest_rows": base.longest_rows,
        "notes": [
            *notes,
            *report.active_parameters(one),
            report.gradients(one),
        ],
        "start_up_of_ranks_seconds": connecting,
    }
    report.print_advice(advice, rows, chosen, priced=options.price_per_gpu_hour is not None)
    return advice


def too_short(one: Measurement, seconds: float) -> str | None:
    """That a run ends on one device before more are measured, as a sentence without a period; None if it does not.

    Args:
        seconds: that its dry run took: so does each further one.
    """
    if (whole := 3600 * predict(one.work(1), 1, None).hours) >= seconds:
        return None
    ends = f"One device. The whole run takes {duration(whole)} there, less than each further dry run"
    return f"{ends} ({duration(seconds)}); --world-sizes measures more"


def write(config: Config | None, options: argparse.Namespace, machine: Hardware, advice: JsonObject) -> None:
    """Write the advice to the cache (for `training.strategy: auto` of a configuration) and to --json."""
    kept = {name: advice[name] for name in ("kind", "world_size", "reason", "when", "environment")}
    if config is not None:
        write_json(strategy.advice_file(config, machine.count), kept)
    if options.json:
        write_json(options.json, advice)


def does_not_fit(options: argparse.Namespace, bench: DryRunner, base: DryRunResult, machine: Hardware) -> int:
    """Report what would hold a job that fills the device, as far as its dry run says. There is no launch line."""
    from finetune.measure.dry_run_report import print_longest_rows

    print_line(f"NO: {base.reason}", style="red")
    content: JsonObject = {"kind": "advice", "world_size": None, "reason": base.reason, "launch": None}
    if base.longest_rows is not None:
        print_longest_rows(base.longest_rows)
        content["longest_rows"] = base.longest_rows
    if base.longest_rows is not None and any(one["fits"] for one in base.longest_rows["modes"]):
        print_line("Run advise again with one of these settings.")
    elif base.full and machine.device == "cuda":
        text = "`finetune dryrun` with --training.strategy shard predicts what 2, 4 and 8 that share it need."
        if bench.script:
            text = "A script loads the whole model; a run from a configuration can shard it (training.strategy: shard)."
        print_line(f"With DDP more GPUs do not help: each holds the whole model. {text}")
    if options.json:
        write_json(options.json, content)
    return FAILED
