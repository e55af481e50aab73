"""`python -m finetune.convert NOTEBOOK`: the command line."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import RunError, UserError, describe
from finetune.runtime.command import BAD_INPUT, DONE, FAILED, console, print_line, printable, run_with_options
from finetune.runtime.options import Options, path

REFUSED = 3
FORMS = ("auto", "settings", "drop-in")
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome for one notebook: `result` is converted, refused, failed or bad input; `exit_code` matches it."""

    notebook: str
    result: str
    exit_code: int
    seconds: float
    code: str = ""  # R0 to R6 or E-... for a refusal, V1 to V6 or witness for a failed verification
    cell: int | None = None
    reason: str = ""
    conversion: Any = None

    def to_dict(self) -> dict[str, Any]:
        found = {key: getattr(self, key) for key in ("notebook", "result", "exit_code", "code", "cell", "reason")}
        return found | {"seconds": round(self.seconds, 3)}


def main(argv: list[str] | None = None) -> int:
    """Convert a notebook, or try every notebook in a folder.

    Returns 0 if written, 1 if a verification failed, 2 for bad input, 3 if the notebook is refused.
    """
    return run_with_options(
        own_options().format_help(), argv, lambda arguments: _run(own_options().split(arguments)[0])
    )


def own_options() -> Options:
    """The options of `finetune convert`."""
    found = Options(
        "convert",
        "Convert an Unsloth or TRL notebook into a script for any number of GPUs: NAME.py, NAME.report.json and, in the"
        " settings form, NAME.yaml.",
        notes="Exit code 0: written, 1: verification failed, 2: bad input, 3: refused, with the reason. Needs ruff: pip"
        " install 'finetune[convert]'.",
        configuration=False,
        usage="NOTEBOOK [options]",
    )
    found.add_argument("notebook", nargs="?", type=path, metavar="NOTEBOOK", help=".ipynb, or a .py export of one")
    found.add("--out", path, "DIR", "output folder (default: next to the notebook)")
    found.add("--check", path, "DIR", "try every notebook in a folder, write nothing, print a table")
    found.add_switch("--no-witness", "skip the comparison with the notebook's own trainer (about 10 s)")
    found.add_switch("--witness", "with --check: compare each notebook with its own trainer, which is off there")
    found.add_switch("--keep-inference", "also write NAME_infer.py with the notebook's inference code")
    found.add(
        "--form",
        str,
        "FORM",
        "auto (default): a script with a settings file, else a drop-in script; settings or drop-in: only that form",
    )
    found.add_switch("--overwrite", "replace existing files that differ")
    return found


def _run(options: argparse.Namespace) -> int:
    if options.witness and (options.check is None or options.no_witness):
        raise UserError(
            "--witness is for --check: a single notebook is compared unless --no-witness is given. Remove it."
        )
    if (options.notebook is None) == (options.check is None):
        raise UserError("expected one notebook, or --check with a folder. See finetune convert --help.")
    if options.form not in (None, *FORMS):
        raise UserError(f"--form is unknown: {options.form}. Choose one of {', '.join(FORMS)}.")
    if options.form == "drop-in" and options.keep_inference:
        raise UserError("--keep-inference needs the settings form: --form drop-in. Remove one of them.")
    from finetune.convert.source import ruff

    ruff()  # without it nothing can be written, so fail before the notebook's code runs
    if options.check is not None:
        return _check(options)
    outcome = convert(
        options.notebook,
        keep_inference=options.keep_inference,
        form=options.form or "auto",
        witness=not options.no_witness,
    )
    files: list[Path] = []
    if outcome.conversion is not None:
        files = write(outcome.conversion, options.out or options.notebook.parent, overwrite=options.overwrite)
    if options.json:
        _write_json(options.json, outcome.to_dict() | {"files": [str(path) for path in files]})
    _print_outcome(outcome, files)
    return outcome.exit_code


def convert(path: Path, *, keep_inference: bool = False, form: str = "auto", witness: bool = False) -> Outcome:
    """Convert one notebook in memory and verify it. Problems with the notebook become the outcome, not exceptions.

    Args:
        form: `settings`, `drop-in`, or `auto` for the first of the two that succeeds.
        witness: also compare the script with the notebook's own trainer, which takes about 10 s.
    """
    from finetune.convert.read import Refusal
    from finetune.convert.verify import NotVerified
    from finetune.redact import redact
    from finetune.runtime import disk

    start = time.perf_counter()

    def outcome(result: str, exit_code: int, *, reason: str = "", **more: Any) -> Outcome:
        seconds = time.perf_counter() - start
        return Outcome(
            notebook=str(path), result=result, exit_code=exit_code, seconds=seconds, reason=redact(reason), **more
        )

    try:
        return outcome("converted", DONE, conversion=_in_form(path, keep_inference, form, witness))
    except Refusal as refusal:
        return outcome("refused", REFUSED, code=refusal.code, cell=refusal.cell, reason=refusal.reason)
    except NotVerified as error:
        return outcome("failed", FAILED, code=error.check, reason=error.reason)
    except RunError as error:
        return outcome("failed", FAILED, reason=str(error))
    except UserError as error:
        return outcome("bad input", BAD_INPUT, reason=str(error))
    except (OSError, MemoryError) as error:  # of this machine, not of the notebook
        return outcome("failed", FAILED, reason=str(disk.failure(error) or describe(error)))
    except Exception as error:  # of whatever library meets the notebook's code; it must not end --check
        return outcome("refused", REFUSED, code="E-CODE", reason=_unforeseen(error))


def _unforeseen(error: Exception) -> str:
    """The reason for a refusal by an error that nothing expected."""
    places = [one for one in traceback.extract_tb(error.__traceback__) if _PACKAGE in Path(one.filename).parents]
    at = f" at {Path(places[-1].filename).relative_to(_PACKAGE)}:{places[-1].lineno}" if places else ""
    return (
        f"the converter cannot process its code ({describe(error)[:200]}{at}). Split its longest expressions, or report"
        " the notebook"
    )


def _in_form(path: Path, keep_inference: bool, form: str, witness: bool) -> Any:
    """The verified conversion in this form. With `auto`, an error names the reasons against both forms."""
    from finetune.convert.modules import MissingModule, refuse_missing
    from finetune.convert.read import Refusal
    from finetune.convert.verify import NotVerified

    if form == "drop-in":
        return _drop_in(path, "--form drop-in", witness)
    try:
        return _verified(path, keep_inference, witness)
    except (Refusal, NotVerified) as error:
        if form == "settings":
            raise
        first = error
    try:
        conversion = _drop_in(path, f"the settings form is refused: {first}", witness)
        if keep_inference:
            conversion.report["notes"].append("--keep-inference: inference is only written in the settings form")
        return conversion
    except MissingModule:
        raise
    except (Refusal, NotVerified, RunError) as second:
        other = getattr(second, "reason", str(second))
        if other == first.reason:
            raise first from None
        if getattr(first, "code", "") == "R0":  # a module of the repository may load the model
            notebook, _ = without_secrets(path)
            refuse_missing(notebook, "\n".join(statement.source for statement in notebook.statements))
        first.reason = f"{first.reason}. As a drop-in script: {other}"
        raise first from None


def _drop_in(path: Path, why: str, witness: bool) -> Any:
    """The verified drop-in script."""
    from finetune.convert.drop_in_checks import verify_drop_in

    notebook, conversion = drop_in_steps(path, why)
    original, _ = without_secrets(path)
    checks, traces = verify_drop_in(notebook, conversion, original)
    _finish(conversion, drop_in_steps(path, why)[1], checks, traces)
    return _compared(path, conversion, "drop-in", witness)


def drop_in_steps(path: Path, why: str) -> tuple[Any, Any]:
    """Read, classify and write the drop-in script. Returns the notebook and the unverified conversion."""
    from finetune.convert.classify import refuse_by_kind
    from finetune.convert.drop_in_pushes import save_what_is_pushed
    from finetune.convert.drop_in_script import convert_to_drop_in
    from finetune.convert.inline import name_the_trainer
    from finetune.convert.modules import refuse_missing
    from finetune.convert.names import Program
    from finetune.convert.roles import live_statements
    from finetune.convert.secrets import note_variables

    notebook, notes = without_secrets(path)
    name_the_trainer(notebook)
    notes += save_what_is_pushed(notebook)
    program = Program(live_statements(notebook))
    refuse_by_kind(notebook, program)
    conversion = convert_to_drop_in(notebook, program, notes, why)
    conversion.report["notes"] += note_variables(notebook, conversion.script)
    refuse_missing(notebook, conversion.script)
    return notebook, conversion


def without_secrets(path: Path) -> tuple[Any, list[str]]:
    """The notebook without secrets, and notes on what was removed."""
    from finetune.convert.classify import text_cells, unparsed_after_training
    from finetune.convert.files import one_name_per_file
    from finetune.convert.inline import prepare_by_todays_name, settle_globals, train_by_method
    from finetune.convert.modules import inline_modules
    from finetune.convert.read import read
    from finetune.convert.results import results_in_working_folder
    from finetune.convert.resumed import leave_out_resumed
    from finetune.convert.secrets import remove_secrets

    notebook = read(path)
    settle_globals(notebook)
    train_by_method(notebook)
    notes = prepare_by_todays_name(notebook) + inline_modules(notebook, path.parent)
    notes += leave_out_resumed(notebook) + one_name_per_file(notebook) + results_in_working_folder(notebook)
    text = text_cells(notebook)
    notes += [f"cell {cell} is text, not code, so it is left out" for cell in text]
    notes += [
        f"cell {cell} comes after the training and cannot be parsed, so it is left out"
        for cell in unparsed_after_training(notebook)
        if cell not in text
    ]
    return notebook, notes + remove_secrets(notebook)


def _finish(conversion: Any, again: Any, checks: dict[str, str], traces: Any) -> None:
    """Write the verification into the report: `checks`, V6 and the sandbox."""
    from finetune.convert.verify import NotVerified

    if again != conversion:
        raise NotVerified("V6", "a second conversion differs from the first")
    _report_sandbox(conversion.report, traces)
    conversion.report["verification"] = checks | {"V6": "passed"}


def _verified(path: Path, keep_inference: bool, witness: bool) -> Any:
    from finetune.convert.verify import CHECKS, verify

    notebook, plan, traces, conversion = steps(path, keep_inference=keep_inference)
    verify(notebook, plan, conversion, traces)
    *_, again = steps(path, keep_inference=keep_inference, traces=traces)
    _finish(conversion, again, dict.fromkeys(CHECKS, "passed"), traces)
    return _compared(path, conversion, "settings", witness)


def _compared(path: Path, conversion: Any, form: str, witness: bool) -> Any:
    """The conversion, after a comparison with the notebook's own trainer if `witness`. Raises NotVerified if the script
    trains differently."""
    from finetune.convert.verify import NotVerified
    from finetune.convert.witness import check

    verification = conversion.report["verification"]
    if not witness:
        verification["witness"] = "off (--no-witness)"
        return conversion
    files = {f"{conversion.name}.py": conversion.script}
    if conversion.config:
        files[f"{conversion.name}.yaml"] = conversion.config
    found = check(path, files, form)
    if found.status == "differs":
        raise NotVerified("witness", found.reason)
    verification["witness"] = "passed" if found.status == "passed" else f"not run: {found.reason}"
    if found.status != "passed":
        conversion.report["notes"].append(f"not compared with the notebook's own trainer: {found.reason}")
    return conversion


def _report_sandbox(report: dict[str, Any], traces: Any) -> None:
    """Set `sandbox` to `kernel` if the kernel confined the notebook's code, else to `stubs`, with a warning note."""
    missing = sorted({reason for trace in traces for reason in trace["unconfined"]})
    report["sandbox"] = "stubs" if missing else "kernel"
    if missing:
        report["notes"].append(
            f"warning: only the recording stubs, not the kernel, confined the notebook's code:"
            f" {'; '.join(missing)}. Convert untrusted notebooks on Linux 5.13 or newer, on x86-64 or 64-bit ARM."
        )


def steps(path: Path, *, keep_inference: bool = False, traces: Any = None) -> tuple[Any, Any, Any, Any]:
    """Read, classify, trace, plan and emit. Returns the notebook, plan, traces and the unverified conversion."""
    from finetune.convert.choices import refuse_choices
    from finetune.convert.classify import refuse_by_kind
    from finetune.convert.drop_in_code import without_secret_services
    from finetune.convert.emit import emit
    from finetune.convert.inline import data_in_memory, inline_setup
    from finetune.convert.modules import refuse_missing
    from finetune.convert.names import Program
    from finetune.convert.plan import make_plan
    from finetune.convert.roles import live_statements
    from finetune.convert.secrets import note_variables
    from finetune.convert.settings import make_settings
    from finetune.convert.trace import trace_notebook

    notebook, notes = without_secrets(path)
    notebook.statements = without_secret_services(notebook.statements)
    notes = notes + inline_setup(notebook) + data_in_memory(notebook)
    program = Program(live_statements(notebook))
    refuse_by_kind(notebook, program)
    first, traces = traces is None, traces or trace_notebook(program.statements)
    plan = make_plan(notebook, program, traces)
    settings = make_settings(plan, traces)
    if first:
        refuse_choices(plan, settings, traces, make_settings)
    conversion = emit(notebook, plan, settings, notes, keep_inference=keep_inference)
    conversion.report["notes"] += note_variables(notebook, conversion.script)
    refuse_missing(notebook, conversion.script)
    return notebook, plan, traces, conversion


def write(conversion: Any, folder: Path, *, overwrite: bool) -> list[Path]:
    """Write a conversion's files. Raises UserError if an existing file differs and `overwrite` is not set, or if what
    exists is not a regular file."""
    from finetune.runtime import files

    report = json.dumps(conversion.report, indent=1, ensure_ascii=False) + "\n"
    report = report.encode(errors="backslashreplace").decode()  # a surrogate becomes its JSON escape
    texts = {
        f"{conversion.name}.py": conversion.script,
        f"{conversion.name}.report.json": report,
    }
    if conversion.config:
        texts[f"{conversion.name}.yaml"] = conversion.config
    if conversion.infer:
        texts[f"{conversion.name}_infer.py"] = conversion.infer
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out is not a folder: {folder}. Choose another one.")
    for name in texts:
        files.check_output(folder / name)
    different = [
        name
        for name, text in texts.items()
        if (folder / name).exists() and files.read_bytes(folder / name, len(text.encode()) + 1) != text.encode()
    ]
    if different and not overwrite:
        raise UserError(
            f"{folder / different[0]} exists and differs from the new file. Choose another --out, or replace it with"
            " --overwrite."
        )
    try:
        for name, text in texts.items():
            files.write_text(folder / name, text)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}. Choose another --out.") from None
    return [folder / name for name in texts]


def _passed(report: dict[str, Any]) -> str:
    return ", ".join(name for name, outcome in report["verification"].items() if outcome == "passed")


def _print_outcome(outcome: Outcome, files: list[Path]) -> None:
    if outcome.result == "converted":
        report = outcome.conversion.report
        kept = sum(item["outcome"] == "kept" for item in report["statements"])
        print_line(
            f"{outcome.notebook}: converted in the {report['form']} form, {_passed(report)} passed;"
            f" {kept} of {len(report['statements'])} statements kept",
        )
        if "why_this_form" in report:
            print_line(f"  form: {report['why_this_form']}")
        for path in files:
            print_line(f"  {str(path)}")
        for note in report["notes"]:
            print_line(f"  note: {note}")
        return
    cell = "" if outcome.cell is None else f", cell {outcome.cell}"
    code = f" ({outcome.code}{cell})" if outcome.code else ""
    what = {"refused": "refused", "failed": "not written, a verification failed", "bad input": "error"}[outcome.result]
    sys.stderr.write(printable(f"{what}{code}: {outcome.reason}\n"))


def _check(options: argparse.Namespace) -> int:
    """Print the table for a folder. Returns 1 if a verification failed, else 0."""
    outcomes = check_folder(options.check, form=options.form or "auto", witness=options.witness)
    if options.json:
        _write_json(options.json, {"notebooks": [outcome.to_dict() for outcome in outcomes]})
    return FAILED if any(outcome.result == "failed" for outcome in outcomes) else DONE


def _write_json(path: Path, value: Any) -> None:
    from finetune.runtime.files import write_json

    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, value)


def check_folder(folder: Path, *, form: str = "auto", witness: bool = False) -> list[Outcome]:
    """Convert each notebook below `folder` in memory and print a table. Raises UserError if there are none."""
    from rich.markup import escape
    from rich.table import Table

    if not folder.is_dir():
        raise UserError(f"--check is not a folder: {folder}. Give a folder with notebooks.")
    paths = sorted(path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    if not paths:
        raise UserError(f"--check: no .ipynb files in {folder}. Give a folder with notebooks.")
    outcomes = [convert(path, form=form, witness=witness) for path in paths]
    table = Table("notebook", "outcome", "reason", "seconds", box=None, pad_edge=False)
    for outcome in outcomes:
        cell = "" if outcome.cell is None else f"cell {outcome.cell}: "
        code = f"{outcome.result} {outcome.code}".strip()
        name = printable(str(Path(outcome.notebook).relative_to(folder)))
        table.add_row(escape(name), code, escape(cell + printable(outcome.reason)), f"{outcome.seconds:.2f}")
    console().print(table)
    counts = Counter(f"{outcome.result} {outcome.code}".strip() for outcome in outcomes)
    console().print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    return outcomes
