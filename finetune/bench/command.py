"""The command line of `finetune bench comm`."""

from __future__ import annotations

import sys

from finetune.errors import UserError
from finetune.measure.protocol import MEASURED, RUNS, WARM_UP
from finetune.runtime.command import DONE, run_with_options
from finetune.runtime.options import Options, count, counts

COMM = "comm"
PURPOSE = "Latency and bandwidth of all-reduce, reduce-scatter, all-gather and broadcast, by size."
NOTES = "Exit code 0: done, 1: a rank failed, 2: bad input. docs/benchmarks.md describes the measurement."


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit code."""
    return run_with_options(own_options().format_help(), sys.argv[1:] if argv is None else argv, run)


def own_options() -> Options:
    """The options of `bench comm`."""
    found = Options(f"bench {COMM}", PURPOSE, notes=NOTES, configuration=False)
    default = "2, 4 and 8, up to the number of GPUs"
    found.add("--world-sizes", counts, "2,4", f"world sizes, with NCCL on GPUs and gloo on a CPU (default: {default})")
    repeated = "number of runs; the confidence interval is over their means"
    found.add("--runs", count, "N", f"{repeated} (default: %(default)s)", RUNS)
    measured = f"measured steps per run, after {WARM_UP} warm-up steps"
    found.add("--steps", count, "N", f"{measured} (default: %(default)s)", MEASURED)
    found.add("--sizes", counts, "BYTES,...", "message sizes (default: 4 KiB to 256 MiB, or to 16 MiB on a CPU)")
    return found


def run(argv: list[str]) -> int:
    """Measure, print and write; after each measurement, so that a later failure loses nothing.

    Raises:
        UserError: bad options.
        RunError: a rank failed.
    """
    if not argv or argv[0] != COMM:
        given = f"unknown benchmark: `{argv[0]}`" if argv else "no benchmark given"
        raise UserError(f"{given}. There is one: `finetune bench {COMM}`.")
    options, _ = own_options().split(argv[1:])
    from finetune.bench import comm_report
    from finetune.runtime.files import write_json
    from finetune.runtime.ranks import distributed

    for result in comm_report.run(options):
        if options.json and distributed.ranks().is_main:
            write_json(options.json, result)
    return DONE
