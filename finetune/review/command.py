"""The command line of `finetune review`."""

from __future__ import annotations

from pathlib import Path

from finetune.errors import UserError
from finetune.review import run as runs
from finetune.review.assemble import Review, review
from finetune.runtime.command import DONE, FAILED, new_console, print_line, run_with_options
from finetune.runtime.files import write_json, write_text
from finetune.runtime.options import Options, path

PURPOSE = (
    "Explain recorded runs: what limits each of them, the evidence, what to change and the expected gain."
    " RUN is the output folder of a run, a folder of TensorBoard events (TRL's and Unsloth's included), or a folder of"
    " runs."
)
NOTES = "Exit code 0: reviewed, 1: with --strict, a finding is a warning, 2: no run, or an unknown rule."


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
    return found


def run(argv: list[str]) -> int:
    """Read, judge, print, write.

    Raises:
        UserError: no run, an unknown rule, or unknown options.
    """
    options, _ = own_options().split(argv)
    if options.explain is not None:
        from finetune.review import explain

        print_line(explain.rule(options.explain))
        return DONE
    if not options.runs:
        raise UserError("no run was given. Give the training.output_dir of a run, or a folder of runs.")
    result = review(expand(options.runs))
    show(result)
    if options.json:
        write_json(options.json, result.to_dict())
    if options.html:
        from finetune.review import page

        write_text(options.html, page.html(result.to_dict()))
        print_line(f"wrote {options.html}")
    return FAILED if options.strict and result.warned else DONE


def expand(folders: list[Path]) -> list[Path]:
    """The folders of runs: a folder that holds several is replaced by them."""
    found: list[Path] = []
    for folder in folders:
        found += [folder] if runs.is_run(folder) else runs.find(folder) or [folder]
    return list(dict.fromkeys(found))


def show(result: Review) -> None:
    """Print it."""
    from finetune.review import report

    console = new_console(highlight=False, markup=False)
    report.show(result, console)
