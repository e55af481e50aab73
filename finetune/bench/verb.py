"""The command line of `finetune bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from finetune.errors import UserError
from finetune.statistics import MEASURED, RUNS, WARM_UP
from finetune.verb import DONE, run_with_options

HELP = f"""\
usage: python -m finetune.bench WHAT [--world-sizes 1,2] [--runs {RUNS}] [--steps {MEASURED}] [--json PATH] ...

  comm      all-reduce, reduce-scatter, all-gather, broadcast: latency and bandwidth by size
              [--sizes 4096,1048576] [--settings] [--config F.yaml --section.key VALUE ...]
  compute   matrix product and memory copy: the most that this machine can do
              [--world-sizes 1]  with more, all of them at once
  step      where the time of a training step goes, on each rank, with your configuration
              [--config F.yaml] [--section.key VALUE ...] [--out DIR]
  study     a published study of one against two GPUs, again: dense models of 258 K and 6.9 M parameters
              [--out DIR] [--models 258K,6.9M,llama-1.2b,llama-3b]  the last two: LoRA, on GPUs alone

  --world-sizes 1,2   numbers of ranks: NCCL on GPUs, gloo on a CPU (default: 1, 2, 4, 8 as far as there are GPUs)
  --runs {RUNS}            repeated runs; the confidence interval is that of the mean over them (the study's own: 50)
  --steps {MEASURED}         steps of a run that are measured, after {WARM_UP} that are not
  --sizes             bytes, in place of 4 KiB .. 256 MiB (16 MiB on a CPU)
  --settings          the NCCL settings that matter on this topology, each in processes of its own
  --config            comm: adds the sizes of this job's gradient buckets; step: what to train
  --out DIR           tables (Markdown), figures (JSON) and, with `pip install 'finetune[plots]'`, plots (PNG)
  --json PATH         the machine-readable result
Exit 0 done, 1 a rank failed, 2 bad input. docs/benchmarks.md says how each figure is taken and read.
"""

WHAT = ("comm", "compute", "step", "study")


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark. Returns the exit code."""
    return run_with_options(HELP, argv, run)


def run(argv: list[str]) -> int:
    """Measure, show, write: after each measurement, so that what is there stays, whatever comes after.

    Raises:
        UserError: bad options, configuration or data.
        RunError: a rank failed.
    """
    if not argv or argv[0] not in WHAT:
        raise UserError(f"finetune bench measures one of {', '.join(WHAT)}; given: {argv[0] if argv else 'nothing'}")
    options, rest = parse(argv[0], argv[1:])
    from finetune.record import write_json

    for result in _measure(argv[0])(options, rest):
        if options.json:
            write_json(options.json, result)
    return DONE


def _measure(what: str) -> Callable[[argparse.Namespace, list[str]], Iterator[dict[str, Any]]]:
    """What yields all that it has measured so far, again and again."""
    if what == "comm":
        from finetune.bench import comm_report

        return comm_report.run
    if what == "compute":
        from finetune.bench import compute

        return compute.run
    if what == "step":
        from finetune.bench import step

        return step.run
    from finetune.bench import study

    return study.run


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\n{HELP}")


def parse(what: str, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of a benchmark, and the arguments that belong to the configuration.

    Raises:
        UserError: an option that this benchmark does not have, or a value that it cannot take.
    """
    parser = _Parser(prog=f"finetune bench {what}", add_help=False, allow_abbrev=False)
    parser.add_argument("--world-sizes", type=_numbers, default=None)
    parser.add_argument("--runs", type=_count, default=RUNS)
    parser.add_argument("--steps", type=_count, default=MEASURED)
    parser.add_argument("--json", type=Path, default=None)
    if what == "comm":
        parser.add_argument("--sizes", type=_numbers, default=None)
        parser.add_argument("--settings", action="store_true")
    if what in ("step", "study"):
        parser.add_argument("--out", type=Path, default=None)
    if what == "study":
        parser.add_argument("--models", type=lambda text: text.split(","), default=None)
    options, rest = parser.parse_known_args(argv)
    if rest and what in ("compute", "study"):
        raise UserError(f"finetune bench {what} has no option {rest[0]}\n{HELP}")
    return options, rest


def _numbers(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return number


def world_sizes(given: list[int] | None, gpus: int, *, least: int = 1) -> list[int]:
    """The numbers of ranks to measure: those given, or `least`, doubled as far as there are GPUs (two on a CPU)."""
    most = gpus or 2
    return given or [world for world in (1, 2, 4, 8) if least <= world <= most] or [least]
