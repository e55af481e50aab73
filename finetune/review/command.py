"""The command line of `finetune review`."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

from finetune.errors import UserError
from finetune.review import gate, report
from finetune.review import run as runs
from finetune.review.assemble import review
from finetune.runtime.command import DONE, FAILED, new_console, print_line, run_with_options
from finetune.runtime.files import to_json_types, write_json, write_text
from finetune.runtime.options import Options, number, path

PURPOSE = (
    "Explain recorded runs: what limits each of them, the evidence, what to change and the expected gain."
    " RUN is the output folder of a run, a folder of TensorBoard events (TRL's and Unsloth's included), or a folder of"
    " runs."
)
NOTES = (
    "Exit code 0: reviewed, 1: with --strict, a finding is a warning, or a run is worse than the first one by more than"
    " --max-slowdown or --max-loss-increase allows, 2: no run, an unknown rule, or a run without a"
    " figure that is compared."
)
WIDTH = 100  # characters of a line, or as many as a narrower terminal has


def main(argv: list[str] | None = None) -> int:
    """Review runs. Returns the exit code."""
    return run_with_options(own_options().format_help(), argv, run)


def own_options() -> Options:
    """The options of this command."""
    found = Options("review", PURPOSE, notes=NOTES, configuration=False, usage="RUN [RUN ...] [options]")
    found.add_argument("runs", nargs="*", type=path, metavar="RUN", help="folder of a run, or of several")
    found.add("--html", path, "FILE", "also write one page that needs no server and no network")
    found.add("--explain", str, "RULE", "explain a rule, such as host-bound, and review nothing")
    found.add_switch("--strict", "exit with 1 if a finding is a warning")
    slower = "exit with 1 if a run is slower than the first one by more: time per step, tokens/s per device"
    found.add("--max-slowdown", number, "PERCENT", slower)
    worse = "exit with 1 if a run's last loss or held-out loss is higher than the first one's by more"
    found.add("--max-loss-increase", number, "PERCENT", worse)
    return found


def run(argv: list[str]) -> int:
    """Read, judge, print, write.

    Raises:
        UserError: no run, an unknown rule, unknown options, or a run without a figure that is compared.
    """
    options, _ = own_options().split(argv)
    if options.explain is not None:
        print_line(explained(options.explain))
        return DONE
    if not options.runs:
        raise UserError("no run was given. Give the training.output_dir of a run, or a folder of runs.")
    limits = {"--max-slowdown": options.max_slowdown, "--max-loss-increase": options.max_loss_increase}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    result = review(expand(options.runs))
    compared: list[gate.Comparison] = []
    if limits:
        if not runs.is_run(first := options.runs[0]):
            raise UserError(
                f"the baseline must be one run: {first} holds several. Give the folder of one of them first."
            )
        compared = gate.compare({one.name: one.run.record for one in result.runs}, limits)
    report.show(result, new_console(highlight=False, markup=False))
    for line in gate.lines(compared):
        print_line(line)
    if options.json:
        gated = {"gate": [one.to_dict() for one in compared]} if limits else {}
        write_json(options.json, result.to_dict() | to_json_types(gated))
    if options.html:
        from finetune.review import page

        write_text(options.html, page.html(result.to_dict()))
        print_line(f"wrote {options.html}")
    breached = any(one.breached for one in compared)
    return FAILED if breached or (options.strict and result.warned) else DONE


def explained(name: str) -> str:
    """A rule in words, for a terminal.

    Raises:
        UserError: there is no such rule.
    """
    from finetune.review.rules import explanations

    one = explanations().get(name)
    if one is None:
        raise UserError(f"unknown rule: {name}. The rules are {', '.join(explanations())}.")
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    parts = [
        f"{heading}\n{textwrap.fill(text, width, initial_indent='  ', subsequent_indent='  ', break_on_hyphens=False)}"
        for heading, text in one.parts.items()
    ]
    return "\n\n".join([f"{name}: {one.question}", *parts])


def expand(folders: list[Path]) -> list[Path]:
    """The folders of runs: a folder that holds several is replaced by them, in the order of the Review tab."""
    found: list[Path] = []
    for folder in folders:
        found += [folder] if runs.is_run(folder) else [run.folder for run in runs.newest_first(folder)] or [folder]
    return list(dict.fromkeys(found))
