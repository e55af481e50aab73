"""`python -m finetune.convert NOTEBOOK`: the command line."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import RunError, UserError, describe
from finetune.runtime.command import BAD_INPUT, DONE, FAILED, print_line, printable, run_with_options
from finetune.runtime.options import Options, path
from finetune.runtime.types import JsonObject

if TYPE_CHECKING:
    from finetune.convert.notebook.read import Notebook
    from finetune.convert.script.report import Conversion

REFUSED = 3
EXIT_CODES = {"converted": DONE, "refused": REFUSED, "failed": FAILED, "bad input": BAD_INPUT}
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome for one notebook: `result` is one of EXIT_CODES."""

    notebook: str
    result: str
    code: str = ""  # R0 to R6 or E-... for a refusal, V1 to V6 for a failed verification
    cell: int | None = None
    reason: str = ""
    conversion: Conversion | None = None

    @property
    def exit_code(self) -> int:
        """Of the command, for this notebook."""
        return EXIT_CODES[self.result]

    def to_dict(self) -> JsonObject:
        return {key: getattr(self, key) for key in ("notebook", "result", "exit_code", "code", "cell", "reason")}


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
        "Convert an Unsloth or TRL notebook into a script for any number of GPUs: NAME.py, the notebook's own code made"
        " safe, and NAME.report.json.",
        notes="Exit code 0: written, 1: verification failed, 2: bad input, 3: refused, with the reason. Needs ruff: pip"
        " install 'finetune-multigpu[convert]'.",
        configuration=False,
        usage="NOTEBOOK [options]",
    )
    found.add_argument("notebook", nargs="?", type=path, metavar="NOTEBOOK", help=".ipynb, or a .py export of one")
    found.add("--out", path, "DIR", "output folder (default: next to the notebook)")
    found.add("--check", path, "DIR", "try every notebook in a folder, write nothing, print a line for each")
    found.add_switch("--overwrite", "replace existing files that differ")
    return found


def _run(options: argparse.Namespace) -> int:
    if (options.notebook is None) == (options.check is None):
        raise UserError("expected one notebook, or --check with a folder. See finetune convert --help.")
    from finetune.convert.source import ruff

    ruff()  # without it nothing can be written
    if options.check is not None:
        return _check(options)
    outcome = convert(options.notebook, options.out)
    files: list[Path] = []
    if outcome.conversion is not None:
        files = write(outcome.conversion, options.out or options.notebook.parent, overwrite=options.overwrite)
    if options.json:
        _write_json(options.json, outcome.to_dict() | {"files": [str(path) for path in files]})
    _print_outcome(outcome, files)
    return outcome.exit_code


def convert(path: Path, out: Path | None = None) -> Outcome:
    """Convert one notebook in memory and verify it; nothing of it runs. Problems with the notebook become the outcome,
    not exceptions. `out`: the folder of the script, which may have the modules that it imports."""
    from finetune.redact import redact

    found = _outcome(path, out)
    return replace(found, reason=redact(found.reason))


def _outcome(path: Path, out: Path | None) -> Outcome:
    from finetune.convert.checks import NotVerified
    from finetune.convert.notebook.read import Refusal
    from finetune.runtime.machine import disk

    outcome = partial(Outcome, notebook=str(path))
    try:
        return outcome(result="converted", conversion=_verified(path, out))
    except Refusal as refusal:
        return outcome(result="refused", code=refusal.code, cell=refusal.cell, reason=refusal.reason)
    except NotVerified as error:
        return outcome(result="failed", code=error.check, reason=error.reason)
    except RunError as error:
        return outcome(result="failed", reason=str(error))
    except UserError as error:
        return outcome(result="bad input", reason=str(error))
    except (OSError, MemoryError) as error:  # of this machine, not of the notebook
        return outcome(result="failed", reason=str(disk.failure(error) or describe(error)))
    except Exception as error:  # of whatever library meets the notebook's code; it must not end --check
        return outcome(result="refused", code="E-CODE", reason=_unforeseen(error))


def _unforeseen(error: Exception) -> str:
    """The reason for a refusal by an error that nothing expected."""
    places = [one for one in traceback.extract_tb(error.__traceback__) if _PACKAGE in Path(one.filename).parents]
    at = f" at {Path(places[-1].filename).relative_to(_PACKAGE)}:{places[-1].lineno}" if places else ""
    return (
        f"the converter cannot process its code ({describe(error)[:200]}{at}). Split its longest expressions, or report"
        " the notebook"
    )


def _verified(path: Path, out: Path | None) -> Conversion:
    """The conversion, after all checks."""
    from finetune.convert.checks import NotVerified, verify

    notebook, conversion = steps(path, out)
    checks = verify(notebook, conversion)
    if steps(path, out)[1] != conversion:
        raise NotVerified("V6", "a second conversion differs from the first")
    conversion.report["verification"] = checks | {"V6": "passed"}
    return conversion


def steps(path: Path, out: Path | None = None) -> tuple[Notebook, Conversion]:
    """Read, classify and write. Returns the notebook and the unverified conversion."""
    from finetune.convert.analysis.classify import refuse_by_kind
    from finetune.convert.analysis.names import Program
    from finetune.convert.notebook.secrets import note_variables
    from finetune.convert.prepare.modules import check_modules, own_modules
    from finetune.convert.prepare.pushes import save_what_is_pushed
    from finetune.convert.script.write import write

    notebook, notes = without_secrets(path)
    notes += save_what_is_pushed(notebook)
    program = Program(notebook.live)
    refuse_by_kind(notebook, program)
    folders = [*([] if out is None else [out]), path.parent]
    own = own_modules(notebook, folders)
    conversion = write(notebook, program, notes, own)
    conversion.report["notes"] += note_variables(notebook, conversion.script)
    conversion.report["notes"] += check_modules(notebook, folders, conversion.script, own)
    return notebook, conversion


def without_secrets(path: Path) -> tuple[Notebook, list[str]]:
    """The notebook without secrets, and notes on what was removed."""
    from finetune.convert.analysis.classify import text_cells, unparsed_after_training
    from finetune.convert.notebook.read import read
    from finetune.convert.notebook.secrets import remove_secrets
    from finetune.convert.prepare.files import in_working_folder
    from finetune.convert.prepare.simplify import settle_globals, train_by_method

    notebook = read(path)
    settle_globals(notebook)
    train_by_method(notebook)
    notes = in_working_folder(notebook)
    text = text_cells(notebook)
    notes += [f"cell {cell} is text, not code, so it is left out" for cell in text]
    notes += [
        f"cell {cell} comes after the training and cannot be parsed, so it is left out"
        for cell in unparsed_after_training(notebook)
        if cell not in text
    ]
    return notebook, notes + remove_secrets(notebook)


def write(conversion: Conversion, folder: Path, *, overwrite: bool) -> list[Path]:
    """Write a conversion's files. Raises UserError if an existing file differs and `overwrite` is not set, or if what
    exists is not a regular file."""
    from finetune.runtime import files

    report = json.dumps(conversion.report, indent=1, ensure_ascii=False) + "\n"
    report = report.encode(errors="backslashreplace").decode()  # a surrogate becomes its JSON escape
    texts = {
        f"{conversion.name}.py": conversion.script,
        f"{conversion.name}.report.json": report,
    }
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


def _passed(report: JsonObject) -> str:
    return ", ".join(name for name, outcome in report["verification"].items() if outcome == "passed")


def _print_outcome(outcome: Outcome, files: list[Path]) -> None:
    if outcome.conversion is not None:
        from finetune.convert.script.report import how_to_run

        report = outcome.conversion.report
        kept = sum(item["outcome"] == "kept" for item in report["statements"])
        print_line(
            f"{outcome.notebook}: converted, {_passed(report)} passed; {kept} of {len(report['statements'])} statements"
            " kept"
        )
        for path in files:
            print_line(f"  {str(path)}")
        for note in report["notes"]:
            print_line(f"  note: {note}")
        commands = how_to_run(str(files[0]))
        width = max(len(command) for command, _ in commands)
        for command, what in commands:
            print_line(f"  {command.ljust(width)}  # {what}")
        return
    sys.stderr.write(f"{_in_words(outcome)}\n")


def _in_words(outcome: Outcome) -> str:
    cell = "" if outcome.cell is None else f", cell {outcome.cell}"
    code = f" ({outcome.code}{cell})" if outcome.code else ""
    what = {"failed": "not written, a verification failed", "bad input": "error"}.get(outcome.result, outcome.result)
    return printable(f"{what}{code}: {outcome.reason}").removesuffix(": ")


def _check(options: argparse.Namespace) -> int:
    """Try every notebook in a folder, write nothing, and print what became of each."""
    paths = sorted(path for path in options.check.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    if not paths:
        raise UserError(f"--check: no .ipynb files in {options.check}. Give a folder with notebooks.")
    outcomes = []
    for found in paths:
        outcomes.append(one := convert(found))
        print_line(f"{printable(str(found.relative_to(options.check)))}: {_in_words(one)}")
    counts = Counter(f"{one.result} {one.code}".strip() for one in outcomes)
    print_line(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    if options.json:
        _write_json(options.json, {"notebooks": [one.to_dict() for one in outcomes]})
    return FAILED if any(one.result == "failed" for one in outcomes) else DONE


def _write_json(path: Path, value: JsonObject) -> None:
    from finetune.runtime.files import write_json

    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, value)
