"""The command line of `finetune advise` and the sequence of its steps."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from finetune.advise.machine import devices_here, warnings
from finetune.config import Config, fixed_batch_arguments, resolve_batch, with_fixed_batch
from finetune.config.batch import fewest_ranks
from finetune.errors import UserError
from finetune.measure import rules, strategy
from finetune.runtime import scripts
from finetune.runtime.command import DONE, FAILED, load_config, print_line, run_with_options
from finetune.runtime.files import write_json
from finetune.runtime.machine import hardware, nccl
from finetune.runtime.machine.hardware import Hardware
from finetune.runtime.options import Options, counts, path, price
from finetune.runtime.types import JsonObject, ScriptTrainer

if TYPE_CHECKING:
    from finetune.advise.candidates import DryRunner, DryRunResult, Improvement
    from finetune.advise.launch import LaunchPlan
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
    found.add("--price-per-gpu-hour", price, "X", "also print the cost of each run")
    comm = "read the all-reduce from an earlier `finetune bench comm --json`, of this machine or another"
    found.add("--comm", path, "FILE.json", comm)
    found.add_switch("--fastest", "recommend the fastest world size at any efficiency (default: at least 70%%)")
    found.add_switch("--as-given", "do not try faster settings on one GPU")
    found.add_switch("--rules", "measure nothing; apply the rule set study2025 (docs/advise.md)")
    found.add("--out", path, "DIR", "write the accelerate profile, NCCL environment and launch script to this folder")
    return found


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """The options of this command, the arguments of the configuration, and the script with its arguments.

    Raises:
        UserError: invalid values or conflicting options.
    """
    options, rest, script = own_options().split_script(argv)
    measuring = [options.world_sizes, options.price_per_gpu_hour, options.comm, options.out]
    if options.rules and (options.fastest or options.as_given or any(one is not None for one in measuring)):
        raise UserError("--rules measures nothing, so it excludes the other options. Remove them, or --rules.")
    return options, rest, script


def run(argv: list[str]) -> int:
    """Measure, predict, decide, print, write.

    Raises:
        UserError: invalid options, configuration, script or data.
        RunError: a measurement failed for another reason than memory.
    """
    options, rest, script = parse(argv)
    if script:
        return advise_script(script, options)
    config = load_config(rest, command="advise")
    if options.rules:
        return advise_by_rules(config, options, strategy.visible_gpus())
    from finetune.advise.candidates import DryRunner
    from finetune.advise.prediction import check_devices

    machine, given = inspect_machine(options)
    check_devices(config, machine)
    cores = machine.cpu_cores if machine.device == "cpu" else None
    # All numbers of GPUs are compared at the global batch of a launch on all that are here.
    launched = strategy.largest_world(config, devices_here(machine))
    bench = DryRunner(
        arguments=[*rest, *fixed_batch_arguments(config.training, launched, config.data)], cpu_cores=cores
    )
    given_config, config = config, replace(config, training=with_fixed_batch(config.training, launched, config.data))
    base = bench.try_out(())
    if base.measured is None:
        return does_not_fit(config, options, bench, base, machine)
    advice, plan = advise_configuration(config, options, machine, bench, base, given)
    write(given_config, options, machine, advice, plan)
    return DONE


def advise_script(script: list[str], options: argparse.Namespace) -> int:
    """The same for a script: its first dry run reports the configuration.

    Args:
        script: and its arguments.
    """
    scripts.check(script[0])
    if options.rules:
        return rules_of_script(script, options)
    from finetune.advise.candidates import DryRunner
    from finetune.advise.prediction import check_devices

    machine, given = inspect_machine(options)
    here, cores = devices_here(machine), machine.cpu_cores if machine.device == "cpu" else None
    bench = DryRunner(arguments=[], cpu_cores=cores, script=script, devices=here)
    base = bench.try_out(())
    if base.config is None:  # of a script that has filled the GPU before its training
        print_line(f"NO: {base.reason}", style="red")
        if options.json:
            write_json(options.json, {"kind": "advice", "world_size": None, "reason": base.reason, "launch": None})
        return FAILED
    config = Config.from_dict(base.config)
    check_devices(config, machine)
    # As for a configuration, all numbers of GPUs are compared at the global batch of a launch on all that are here.
    bench.devices, training = 1, config.training
    bench.arguments = ["--training.global_batch_size", str(training.global_batch_size)]
    training = replace(training, per_device_train_batch_size=None, gradient_accumulation_steps=None)
    config = replace(config, training=training)
    if base.measured is None:
        return does_not_fit(config, options, bench, base, machine)
    advice, plan = advise_configuration(config, options, machine, bench, base, given)
    write(None, options, machine, advice, plan)
    return DONE


def rules_of_script(script: list[str], options: argparse.Namespace) -> int:
    """Apply the rule set to a script, which runs up to its training."""
    gpus = strategy.visible_gpus()

    def from_trainer(trainer: ScriptTrainer) -> int:
        trainer.take_launch_batch(gpus)
        return advise_by_rules(trainer.job.config, options, gpus)

    return scripts.run(script, scripts.Answer(trainer=from_trainer))


def inspect_machine(options: argparse.Namespace) -> tuple[Hardware, dict[int, Curve]]:
    """The machine, after printing its warnings; and the all-reduce curves of `--comm`, by world size."""
    from finetune.measure.measurements import read_comm

    given = read_comm(options.comm) if options.comm else {}
    machine = hardware.survey()
    for warning in warnings(machine):
        print_line(f"warning: {warning}", style="yellow")
    return machine, given


def world_sizes(options: argparse.Namespace, config: Config, here: int, given: Mapping[int, Curve]) -> list[int]:
    """The world sizes to predict: all are compared with the fewest on which the job runs."""
    fewest, shared = fewest_ranks(config.training), config.training.context_parallel
    usual = [world for world in (1, 2, 4, 8) if world > fewest and world % shared == 0]
    return sorted({fewest, *(options.world_sizes or [world for world in usual if world <= here or world in given])})


def advise_configuration(
    config: Config,
    options: argparse.Namespace,
    machine: Hardware,
    bench: DryRunner,
    base: DryRunResult,
    given: Mapping[int, Curve],
) -> tuple[JsonObject, LaunchPlan]:
    """Find better settings, predict the world sizes, choose one, and print all of it."""
    from finetune.advise import candidates, launch, prediction, report, shared_rows, verdict

    assert base.measured is not None
    better = [] if options.as_given else candidates.improvements(config, bench, base)
    faster = candidates.choose_changes(bench, better)
    worlds = world_sizes(options, config, devices_here(machine), given)
    measured = candidates.measure_at_world_sizes(config, bench, base.measured, faster, worlds)
    rows, chosen, between = prediction.compare(config, measured, options, machine)
    size, others = candidates.split_size(faster)
    settings = [*others, *([] if size is None else [candidates.PER_DEVICE, str(chosen.per_device)])]
    arguments = [*bench.script[1:], *bench.flags([*bench.arguments, *settings])]
    target = bench.script[:1] or ["-m", "finetune.train"]
    plan = launch.plan(chosen.world_size, machine, arguments, options.out, target)
    one, weights = base.measured, base.master_weights
    notes = [f"Trained weights: {weights['kind']} ({weights['reason']})."] if weights else []
    advice = {
        "kind": "advice",
        "world_size": chosen.world_size,
        "reason": verdict.decision_sentence(chosen, rows),
        "when": one.when,
        "device": machine.name,
        "parameters": one.parameters,
        "active_parameters": one.active_parameters,
        "trainable_parameters": one.trainable_parameters,
        "environment": plan.environment,
        "launch": plan.line,
        "rows": [row.to_dict() for row in rows],
        "improvements": [improvement_entry(one, faster, bench) for one in better],
        "master_weights": base.master_weights,
        "longest_rows": base.longest_rows,
        "study2025": report.ruling(one.parameters, one.global_batch_size, rows, machine),
        "notes": [
            *notes,
            *report.active_parameters(one),
            *([] if config.training.strategy == "shard" else [report.gradients(one)]),
            report.learning_rate(config, one.global_batch_size, of_script=bool(bench.script)),
        ],
        "start_up_of_ranks_seconds": between.connecting,
        "measured_on": prediction.measured_on(config),
    }
    report.print_advice(advice, rows, chosen, priced=options.price_per_gpu_hour is not None)
    shares = config.training.context_parallel > 1 and not options.as_given
    if shares or one.global_batch_size < devices_here(machine):  # some would have no row
        shared = shared_rows.find(config, bench, machine)
        shared_rows.show(shared, config, chosen.prediction)
        advice["shared_rows"] = [candidate.to_dict() for candidate in shared]
    return advice, plan


def improvement_entry(one: Improvement, faster: Sequence[str], bench: DryRunner) -> JsonObject:
    """One better setting, for the report."""
    change = one.change
    return {
        "name": change.name,
        "flags": bench.flags(change.arguments),
        "factor": one.factor,
        "same_result": change.same_result,
        "applied": set(change.arguments) <= set(faster),
    }


def write(
    config: Config | None, options: argparse.Namespace, machine: Hardware, advice: JsonObject, plan: LaunchPlan
) -> None:
    """Write the advice to the cache (for `training.strategy: auto` of a configuration), to --out and to --json."""
    from finetune.advise import launch

    kept = {name: advice[name] for name in ("kind", "world_size", "reason", "when", "environment")}
    if config is not None and config.training.strategy != "shard":  # `auto` decides that by other advice
        write_json(strategy.advice_file(config, machine.count), kept)
    if options.out is not None:
        launch.write(options.out, plan, advice["reason"])
    if options.json:
        write_json(options.json, advice)


def does_not_fit(
    config: Config, options: argparse.Namespace, bench: DryRunner, base: DryRunResult, machine: Hardware
) -> int:
    """Report what would make the configuration fit. There is no launch line."""
    print_line(f"NO: {base.reason}", style="red")
    if base.sharded is not None:
        return sharded_does_not_fit(config, options, bench, base, machine)
    if not base.full:
        return FAILED
    from finetune.advise.candidates import make_fit
    from finetune.measure.dry_run_report import print_longest_rows

    if base.longest_rows is not None:
        print_longest_rows(base.longest_rows)
    taken, result = make_fit(config, bench, machine.device == "cpu", base)
    names = ", ".join(change.name for change in taken)
    flags = " ".join(bench.flags([word for change in taken for word in change.arguments]))
    content: JsonObject = {"kind": "advice", "world_size": None, "reason": base.reason, "launch": None}
    content["longest_rows"] = base.longest_rows
    if result is None or result.measured is None:
        text = f"With DDP more GPUs do not help: each holds the whole model. Tried, but not enough: {names}."
    else:
        peak, device = result.measured.peak_memory_bytes / 2**30, result.measured.memory_bytes
        of = "" if device is None else f" of {device / 2**30:.1f}"
        text = f"It fits with {names} (measured: {peak:.1f}{of} GiB): {flags}. "
        if device is not None and result.measured.peak_memory_bytes > rules.MEMORY_MARGIN * device:
            text += f"That is above {rules.MEMORY_MARGIN} of the memory: fragmentation may still exhaust it. "
        text += "Run advise again with these settings for the number of GPUs."
        content |= {"fits_with": flags.split(), "peak_memory_gib": peak}
    if machine.device == "cuda" and bench.script:
        text += " A script loads the whole model; a run from a configuration can shard it (training.strategy: shard)."
    elif machine.device == "cuda":
        sharded, settings = sharding_advice(config, machine)
        if settings is not None:
            rows = bench.try_out(["--training.strategy", "shard"]).sharded
            sharded, settings = add_measured_sharding(sharded, settings, rows)
        text += f" {sharded}"
        content["shard"] = settings
        if (
            result is None
            and settings is not None
            and (reason := save_sharding_advice(config, machine, settings, names))
        ):
            text += f" training.strategy: auto will shard it on this machine, because {reason}."
    print_line(text)
    same_rows = result is not None and all(change.same_result for change in taken)
    if base.state_fits and not same_rows:
        from finetune.advise import shared_rows

        shared = shared_rows.find(config, bench, machine)
        shared_rows.show(shared, config)
        content["shared_rows"] = [one.to_dict() for one in shared]
    if options.json:
        write_json(options.json, content | {"remedies": text})
    return FAILED


def sharded_does_not_fit(
    config: Config, options: argparse.Namespace, bench: DryRunner, base: DryRunResult, machine: Hardware
) -> int:
    """Report which numbers of ranks that share each row would hold a sharded job."""
    from finetune.advise import shared_rows
    from finetune.measure.dry_run_report import print_longest_rows

    if base.longest_rows is not None:
        print_longest_rows(base.longest_rows)
    shared = shared_rows.find(config, bench, machine)
    shared_rows.show(shared, config)
    if options.json:
        content: JsonObject = {"kind": "advice", "world_size": None, "reason": base.reason, "launch": None}
        content |= {"longest_rows": base.longest_rows, "shared_rows": [one.to_dict() for one in shared]}
        write_json(options.json, content)
    return FAILED


def sharding_advice(config: Config, machine: Hardware) -> tuple[str, JsonObject | None]:
    """Whether the configuration fits if it is sharded, in a sentence and for the report. Computed, not measured."""
    from finetune.engine.optimizer import master_weights
    from finetune.engine.preflight import adapter_files
    from finetune.measure import sharding

    if (why := sharding.why_not_sharded(config)) is not None:
        return f"It cannot be sharded (training.strategy: shard): {why}", None
    folder = adapter_files.base_folder(config)
    found = sharding.read_sizes(folder) if folder is not None else None
    if found is None or machine.memory_gib is None:
        return "Whether training.strategy: shard helps is not known: the sizes of its layers cannot be read here.", None
    here = devices_here(machine)
    margin = rules.MEMORY_MARGIN * machine.memory_gib * 2**30
    config = master_weights.resolve_auto(config, machine.memory_gib, found.total)
    stored = sharding.storage(config)
    fits = sharding.smallest_world(found, margin, (2, 4, 8, 16, 32, 64), stored)
    if fits is None:
        return "Sharded over 64 GPUs (training.strategy: shard) it does not fit either.", None
    world, needed = fits
    where = "" if world <= here else f", of which {here} {'is' if here == 1 else 'are'} here"
    text = (
        f"With training.strategy: shard it fits on {world} GPUs{where}: weights, gradients and optimizer state need "
        f"{needed / 2**30:.1f} of {machine.memory_gib:.1f} GiB on each (computed; activations are not included)."
    )
    rows = {str(ranks): sharding.bytes_per_gpu(found, ranks, stored) / 2**30 for ranks in (2, 4, 8)}
    text += f" On {', '.join(rows)} GPUs each needs {', '.join(f'{one:.1f}' for one in rows.values())} GiB."
    flags = ["--training.strategy", "shard"]
    return text, {"world_size": world, "gib_per_gpu": needed / 2**30, "gib_by_world_size": rows, "flags": flags}


def add_measured_sharding(
    text: str, settings: JsonObject, rows: list[JsonObject] | None
) -> tuple[str, JsonObject | None]:
    """The result of `sharding_advice` with a dry run on slices of the model: memory with activations, and step times.

    Args:
        rows: the dry run's figures by number of ranks; None if it did not run.
    """
    if not rows:
        return text, settings
    each = ", ".join(
        f"{row['world_size']} GPUs {row['peak_memory_gib']:.1f} GiB and {row['step_seconds']:.2f} s per step"
        + (" without communication" if row["exposed_seconds"] is None else "")
        for row in rows
    )
    text += f" Measured with slices of the model, activations included: on {each}."
    fitting = next((row for row in rows if row["fits"]), None)
    if fitting is None:
        return f"{text} The job fits on none of them.", None
    measured = {"world_size": fitting["world_size"], "gib_per_gpu": fitting["peak_memory_gib"], "measured": rows}
    return text, settings | measured


def save_sharding_advice(config: Config, machine: Hardware, settings: Mapping[str, Any], tried: str) -> str | None:
    """Write the advice that `training.strategy: auto` follows for a model that nothing else makes fit. Returns the
    reason; None, and no advice, if this machine cannot do it.

    Args:
        settings: as `sharding_advice` returns them.
        tried: names of the changes with which one GPU was full, measured.
    """
    world = settings["world_size"]
    if world > devices_here(machine):
        return None
    try:
        resolve_batch(config.training, world, config.data)
    except UserError:  # the global batch does not divide
        return None
    also = f", also with {tried}" if tried else ""
    reason = f"one GPU is full{also}, and sharded over {world} each holds {settings['gib_per_gpu']:.1f} GiB"
    if "measured" not in settings:
        reason += " without activations"
    advice = {
        "kind": "advice",
        "world_size": world,
        "strategy": "shard",
        "reason": reason,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {one.name: one.value for one in nccl.recommend_settings(machine)},
    }
    write_json(strategy.advice_file(config, machine.count), advice)
    return reason


def advise_by_rules(config: Config, options: argparse.Namespace, gpus: int) -> int:
    """Apply the rule set only."""
    count = None
    if not config.demo:
        count = strategy.parameter_count(str(config.model.model_name_or_path), config.model.revision)
    launched = max(strategy.largest_world(config, gpus), config.training.context_parallel)
    batch = resolve_batch(config.training, launched, config.data).global_batch_size
    ruling = rules.study2025(count, batch, gpus=gpus)
    text = f"Rule set study2025, nothing measured: {ruling.verdict}. {ruling.reason}."
    print_line(text)
    if not config.model.full_finetuning:
        text = "It is based on models trained in full; here DDP would send only the gradients of the adapter."
        print_line(text)
    if options.json:
        content = {"verdict": ruling.verdict, "reason": ruling.reason, "parameters": count, "global_batch_size": batch}
        write_json(options.json, {"kind": "rules", "rule_set": "study2025", **content, "gpus": gpus})
    return DONE
