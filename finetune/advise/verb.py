"""The command line of `finetune advise`, and its story."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from finetune import rules, strategy
from finetune.config import Config, load, resolve_batch
from finetune.errors import RunError, UserError
from finetune.verb import DONE, FAILED, console, run_with_options

if TYPE_CHECKING:
    from finetune.advise.candidates import Bench, Improvement, Tried
    from finetune.advise.launch import LaunchPlan
    from finetune.advise.verdict import Candidate, Row
    from finetune.hardware import Hardware
    from finetune.predict import Curve

HELP = """\
usage: python -m finetune.advise [--world-sizes 1,2,4,8] [--price-per-gpu-hour X] [--comm FILE.json] [--fastest]
                                 [--as-given] [--rules] [--out DIR] [--config F.yaml] [--section.key VALUE ...]
                                 [--json PATH]

  --world-sizes 1,2,4,8   numbers of GPUs to predict (default: 1, 2, 4 and 8, as far as there are GPUs; 1,2 on a CPU)
  --price-per-gpu-hour X  shows what each of them costs; 0 is allowed
  --comm FILE.json        of an earlier `finetune bench comm --json`, in place of measuring; also for GPUs that are
                          not here
  --fastest               the number that ends first, whatever its efficiency (else at least 70 %)
  --as-given              the settings as they are: no look for better ones on one GPU
  --rules                 measure nothing: the rule set study2025 alone
  --out DIR               writes the accelerate profile, the environment and the launch line
  --model dense-258k      in place of a configuration a dense model of the study, or dense-6.9m; [--batch 64]
Exit 0 with an advice, 1 where the model fits no GPU here, 2 bad input. docs/advise.md says how it reckons.
The keys of the configuration are those of finetune.train --help.
"""


def main(argv: list[str] | None = None) -> int:
    """Advise on a configuration. Returns the exit code."""
    return run_with_options(HELP, argv, run)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\n{HELP}")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this verb, and the arguments that belong to the configuration.

    Raises:
        UserError: a value that an option cannot take.
    """
    parser = _Parser(prog="finetune advise", add_help=False, allow_abbrev=False)
    parser.add_argument("--world-sizes", type=_numbers, default=None)
    parser.add_argument("--price-per-gpu-hour", type=_price, default=None)
    parser.add_argument("--comm", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--model", default=None)
    parser.add_argument("--batch", type=_count, default=None)
    for name in ("--fastest", "--as-given", "--rules"):
        parser.add_argument(name, action="store_true")
    options, rest = parser.parse_known_args(argv)
    if options.batch is not None and options.model is None:
        raise UserError("--batch is for --model; a configuration has training.global_batch_size")
    measuring = [options.world_sizes, options.price_per_gpu_hour, options.comm, options.out]
    if options.rules and (options.fastest or options.as_given or any(one is not None for one in measuring)):
        raise UserError(f"--rules measures nothing and predicts nothing; it goes with no other option\n{HELP}")
    return options, rest


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers of at least 1, such as 1,2,4")
    return sorted({1, *map(int, parts)})


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not (math.isfinite(price) and price >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no price: a number of 0 or more is needed")
    return price


def run(argv: list[str]) -> int:
    """Measure, predict, decide, say, write.

    Raises:
        UserError: bad options, configuration or data.
        RunError: a measurement failed for another reason than memory.
    """
    options, rest = parse(argv)
    if options.model is not None:
        return on_dense_model(options, rest)
    config = load(rest, verb="advise")
    if options.rules:
        return by_rules(config, strategy.visible_gpus())
    from finetune.advise.candidates import Bench
    from finetune.parity import rest_without_json

    machine, given = meet(options)
    cores = machine.cpu_cores if machine.device == "cpu" else None
    bench = Bench(arguments=rest_without_json(rest), cpu_cores=cores)
    base = bench.try_out(())
    if base.measured is None:
        return does_not_fit(config, bench, base, machine)
    advice, plan = on_configuration(config, options, machine, bench, base, given)
    write(config, options, machine, advice, plan)
    return DONE


def meet(options: argparse.Namespace) -> tuple[Hardware, dict[int, Curve]]:
    """The machine, with what is to be warned of said; and the all-reduce that `--comm` brings, by world size."""
    from finetune.advise.machine import warnings
    from finetune.hardware import survey
    from finetune.measurements import read_comm

    given = read_comm(options.comm) if options.comm else {}
    machine = survey()
    for warning in warnings(machine):
        console().print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True, markup=False)
    return machine, given


def numbers(options: argparse.Namespace, here: int, given: Mapping[int, Curve]) -> list[int]:
    """The numbers of devices to predict."""
    return options.world_sizes or [world for world in (1, 2, 4, 8) if world <= here or world in given]


def compare(
    found: Mapping[int, Candidate | str], options: argparse.Namespace, machine: Hardware, given: Mapping[int, Curve]
) -> tuple[list[Row], Row, float]:
    """All numbers of devices, the one to take, and the seconds that several ranks take to meet.

    Raises:
        RunError: one device could not be measured.
    """
    from finetune.advise import candidates, verdict
    from finetune.advise.machine import devices_here
    from finetune.predict import buckets

    one, here = found[1], devices_here(machine)
    if isinstance(one, str):
        raise RunError(f"one device cannot be measured with its own settings: {one}")
    sent = buckets(one.gradients.sizes, one.gradients.cap, one.gradients.first)
    missing = [world for world in found if 1 < world <= here and world not in given]
    curves, meeting = candidates.measure_curves(missing, machine, sent)
    rows = verdict.rows(
        found,
        curves | {world: (curve, str(options.comm)) for world, curve in given.items()},
        here=here,
        extra_start_up_seconds=meeting,
        price_per_gpu_hour=options.price_per_gpu_hour,
    )
    chosen = verdict.choose(rows, fastest=options.fastest)
    assert chosen is not None  # one device has been tried
    return rows, chosen, meeting


def on_configuration(
    config: Config,
    options: argparse.Namespace,
    machine: Hardware,
    bench: Bench,
    base: Tried,
    given: Mapping[int, Curve],
) -> tuple[dict[str, Any], LaunchPlan]:
    """Better settings first, then the numbers of devices, then one of them; says all of it."""
    from finetune.advise import candidates, launch, verdict, words
    from finetune.advise.machine import devices_here

    assert base.measured is not None
    better = [] if options.as_given else candidates.improvements(config, bench, base)
    faster = candidates.applied(bench, better)
    worlds = numbers(options, devices_here(machine), given)
    measured = candidates.measured_for(config, bench, base.measured, faster, worlds)
    found = {w: one if isinstance(one, str) else candidates.candidate(one, w) for w, one in measured.items()}
    rows, chosen, meeting = compare(found, options, machine, given)
    size, others = candidates.split_size(faster)
    settings = [*others, *([] if size is None else [candidates.PER_DEVICE, str(chosen.per_device)])]
    plan = launch.plan(chosen.world_size, machine, [*bench.arguments, *settings], options.out)
    one = base.measured
    advice = {
        "kind": "advice",
        "world_size": chosen.world_size,
        "reason": verdict.in_a_sentence(chosen, rows),
        "when": one.when,
        "device": machine.name,
        "environment": plan.environment,
        "launch": plan.line,
        "rows": [row.to_dict() for row in rows],
        "improvements": [improved(one, faster) for one in better],
        "study2025": words.ruling(one.parameters, one.global_size, rows, machine),
        "notes": [words.gradients(one), words.learning_rate(config, one.global_size)],
        "start_up_of_ranks_seconds": meeting,
    }
    words.say(advice, rows, chosen, priced=options.price_per_gpu_hour is not None)
    return advice, plan


def on_dense_model(options: argparse.Namespace, rest: list[str]) -> int:
    """A dense model of the study in place of a configuration: nothing is launched, so there is no launch line."""
    from finetune.advise import dense, verdict, words
    from finetune.advise.machine import devices_here
    from finetune.record import write_json

    if options.rules or options.as_given or options.out:
        raise UserError("--model takes none of --rules, --as-given and --out: there is nothing to set or to launch")
    report = json_of(rest)
    job = dense.chosen(options.model, options.batch)
    machine, given = meet(options)
    found = dense.candidates(job, numbers(options, devices_here(machine), given), machine)
    rows, chosen, meeting = compare(found, options, machine, given)
    advice = {
        "kind": "advice",
        "model": options.model,
        "batch": job.batch,
        "world_size": chosen.world_size,
        "reason": verdict.in_a_sentence(chosen, rows),
        "device": machine.name,
        "launch": None,
        "rows": [row.to_dict() for row in rows],
        "improvements": [],
        "study2025": words.ruling(job.model.parameters, job.batch, rows, machine),
        "notes": [
            f"{options.model}: {job.model.parameters:,} parameters, a global batch of {job.batch}; tokens are samples, "
            f"and a run is {dense.STEPS:,} steps. Each sends {sum(job.gradients.sizes) / 2**20:,.1f} MiB of gradients.",
            *words.short_step(rows, machine),
        ],
        "start_up_of_ranks_seconds": meeting,
    }
    words.say(advice, rows, chosen, priced=options.price_per_gpu_hour is not None)
    if report:
        write_json(report, advice)
    return DONE


def json_of(rest: Sequence[str]) -> Path | None:
    """The path of `--json`, the only argument that may be left.

    Raises:
        UserError: there are others.
    """
    words = [part for word in rest for part in (word.split("=", 1) if word.startswith("--json=") else [word])]
    if not words:
        return None
    if words[0] != "--json" or len(words) != 2:
        raise UserError(f"with --model there is no configuration; given: {' '.join(rest)}\n{HELP}")
    return Path(words[1])


def improved(one: Improvement, faster: Sequence[str]) -> dict[str, Any]:
    """One better setting for the report."""
    change = one.change
    return {
        "name": change.name,
        "flags": list(change.arguments),
        "factor": one.factor,
        "same_result": change.same_result,
        "applied": set(change.arguments) <= set(faster),
    }


def write(
    config: Config, options: argparse.Namespace, machine: Hardware, advice: dict[str, Any], plan: LaunchPlan
) -> None:
    """Into the cache, for `training.strategy: auto`; into --out and --json."""
    from finetune.advise import launch
    from finetune.record import write_json

    kept = {name: advice[name] for name in ("kind", "world_size", "reason", "when", "environment")}
    write_json(strategy.advice_file(config, machine.count), kept)
    if options.out is not None:
        launch.write(options.out, plan, advice["reason"])
    if config.json:
        write_json(config.json, advice)


def does_not_fit(config: Config, bench: Bench, base: Tried, machine: Hardware) -> int:
    """No launch line: what would make it fit instead."""
    say = console().print
    say(f"NO: {base.reason}", style="red", highlight=False, soft_wrap=True, markup=False)
    if not base.full:
        return FAILED
    from finetune.advise.candidates import make_fit

    taken, result = make_fit(config, bench, machine.device == "cpu", base)
    names = ", ".join(change.name for change in taken)
    flags = " ".join(word for change in taken for word in change.arguments)
    content: dict[str, Any] = {"kind": "advice", "world_size": None, "reason": base.reason, "launch": None}
    if result is None or result.measured is None:
        text = f"More GPUs do not help: with DDP each holds the whole model. Tried, and not enough: {names}."
    else:
        peak, device = result.measured.peak_memory_bytes / 2**30, result.measured.memory_bytes
        of = "" if device is None else f" of {device / 2**30:.1f}"
        text = f"It fits with {names} (tried: {peak:.1f}{of} GiB): {flags}. "
        if device is not None and result.measured.peak_memory_bytes > rules.MEMORY_MARGIN * device:
            text += f"That is above {rules.MEMORY_MARGIN} of the memory; fragmentation may yet end the run. "
        text += "Ask again with these for the number of GPUs."
        content |= {"fits_with": flags.split(), "peak_memory_gib": peak}
    say(text, highlight=False, soft_wrap=True, markup=False)
    if config.json:
        from finetune.record import write_json

        write_json(config.json, content | {"remedies": text})
    return FAILED


def by_rules(config: Config, gpus: int) -> int:
    """The rule set alone."""
    count = None
    if not config.demo:
        count = strategy.parameter_count(str(config.model.model_name_or_path), config.model.revision)
    batch = resolve_batch(config.training, 1, config.data).global_size
    ruling = rules.study2025(count, batch, gpus=gpus)
    say = console().print
    text = f"Rule set study2025, nothing measured: {ruling.verdict}. {ruling.reason}."
    say(text, highlight=False, soft_wrap=True, markup=False)
    if not config.model.full_finetuning:
        text = "It was drawn from models that are trained in full; of this one only adapter gradients would travel."
        say(text, highlight=False, soft_wrap=True)
    if config.json:
        from finetune.record import write_json

        content = {"verdict": ruling.verdict, "reason": ruling.reason, "parameters": count, "batch": batch}
        write_json(config.json, {"kind": "rules", "rule_set": "study2025", **content, "gpus": gpus})
    return DONE
