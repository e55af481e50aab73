"""The command line of `finetune bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

from finetune.errors import UserError
from finetune.measure.protocol import MEASURED, RUNS, WARM_UP
from finetune.runtime.command import DONE, run_with_options
from finetune.runtime.options import Options, count, counts, path
from finetune.runtime.types import JsonObject

WHAT = {
    "comm": "latency and bandwidth of all-reduce, reduce-scatter, all-gather and broadcast, by size",
    "compute": "peak rates of matrix products and memory copies",
    "step": "time per phase of a training step of your configuration, on each rank",
}
NOTES = "Exit code 0: done, 1: a rank failed, 2: bad input. docs/benchmarks.md describes each measurement."


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    text = own_options(argv[0]).format_help() if argv and argv[0] in WHAT else overview()
    return run_with_options(text, argv, run)


def overview() -> str:
    """The help text of `finetune bench` without a benchmark."""
    lines = [f"  {name:9} {purpose}" for name, purpose in WHAT.items()]
    usage = "usage: finetune bench WHAT [options]\n\nBenchmark this machine. WHAT is one of:\n\n"
    return usage + "\n".join(lines) + f"\n\n`finetune bench WHAT --help` lists its options.\n{NOTES}\n"


def run(argv: list[str]) -> int:
    """Measure, print and write; after each measurement, so that a later failure loses nothing.

    Raises:
        UserError: bad options, configuration or data.
        RunError: a rank failed.
    """
    if not argv or argv[0] not in WHAT:
        given = f"unknown benchmark: `{argv[0]}`" if argv else "no benchmark given"
        raise UserError(f"{given}. Choose one of {', '.join(WHAT)}.")
    options, rest = own_options(argv[0]).split(argv[1:])
    from finetune.runtime.files import write_json
    from finetune.runtime.ranks import distributed

    for result in _measure(argv[0])(options, rest):
        if options.json and distributed.ranks().is_main:
            write_json(options.json, result)
    return DONE


def _measure(what: str) -> Callable[[argparse.Namespace, list[str]], Iterator[JsonObject]]:
    """The generator of a benchmark, which yields everything measured so far after each measurement."""
    if what == "comm":
        from finetune.bench import comm_report

        return comm_report.run
    if what == "compute":
        from finetune.bench import compute

        return compute.run
    from finetune.bench import step

    return step.run


def own_options(what: str) -> Options:
    """The options of a benchmark."""
    purpose = WHAT[what][:1].upper() + WHAT[what][1:] + "."
    found = Options(f"bench {what}", purpose, notes=NOTES, configuration=what in ("comm", "step"))
    default = "1; several run concurrently" if what == "compute" else "1, 2, 4 and 8, up to the number of GPUs"
    found.add("--world-sizes", counts, "1,2", f"world sizes, with NCCL on GPUs and gloo on a CPU (default: {default})")
    repeated = "number of runs; the confidence interval is over their means"
    found.add("--runs", count, "N", f"{repeated} (default: %(default)s)", RUNS)
    found.add(
        "--steps", count, "N", f"measured steps per run, after {WARM_UP} warm-up steps (default: %(default)s)", MEASURED
    )
    if what == "comm":
        found.add("--sizes", counts, "BYTES,...", "message sizes (default: 4 KiB to 256 MiB, or to 16 MiB on a CPU)")
        found.add_switch("--settings", "compare the NCCL settings that matter on this topology, each in new processes")
    if what == "step":
        plots = "Markdown, JSON and, with `pip install '.[plots]'`, PNG"
        found.add("--out", path, "DIR", f"write the results to this folder: {plots}")
    return found
