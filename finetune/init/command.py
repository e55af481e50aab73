"""The command line of `finetune init`: asks on a terminal what the options leave open, then writes the file."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from finetune.config import Config, TrainingConfig, load
from finetune.errors import UserError
from finetune.runtime import files, launch_lines
from finetune.runtime.command import DONE, print_line, run_with_options
from finetune.runtime.files import write_json, write_text
from finetune.runtime.options import Options, path

if TYPE_CHECKING:
    from finetune.init.detect import Model, Rows
    from finetune.runtime.machine.hardware import Hardware

PURPOSE = (
    "Write a commented configuration to FILE.yaml (default: my.yaml). On a terminal it asks for what the options leave"
    " open. Nothing is downloaded."
)
NOTES = "Exit code 0: written, 2: bad input, or a file that is there already."
FILE = Path("my.yaml")
METHODS = ("lora", "qlora", "full")
T = TypeVar("T")


def main(argv: list[str] | None = None) -> int:
    """Write a configuration. Returns the exit code."""
    return run_with_options(own_options().format_help(), argv, run)


def own_options() -> Options:
    """The options of this command."""
    found = Options("init", PURPOSE, notes=NOTES, configuration=False, usage="[FILE.yaml] [options]")
    found.add_argument("file", nargs="?", type=path, default=FILE, metavar="FILE", help=argparse.SUPPRESS)
    found.add("--model", str, "NAME", "model: a Hub name or a local folder")
    found.add("--data", str, "ROWS", "training rows: a file, folder, glob or URL, or a dataset on the Hub")
    found.add("--columns", _columns, "FIELD=COLUMN,...", "your columns, such as instruction=question,output=answer")
    found.add("--method", _method, "|".join(METHODS), "what to train (default: lora, or qlora if memory is too small)")
    found.add("--output-dir", str, "DIR", "folder of the run (default: outputs/NAME_OF_THE_FILE)")
    found.add_switch("--overwrite", "replace FILE")
    return found


def run(argv: list[str]) -> int:
    """Ask, look, write.

    Raises:
        UserError: a file exists, an answer is invalid, or there is nobody to ask.
    """
    options, _ = own_options().split(argv)
    _check_target(options.file, overwrite=options.overwrite)
    from finetune.init import config_file, detect
    from finetune.runtime.machine.hardware import survey

    machine = survey()
    print_line(f"Found: {detect.machine_in_words(machine)}")

    def read_rows(name: str) -> Rows:
        return detect.rows(name, options.columns)

    model = _answer("--model", "Model (Hub name or local folder)", options.model, detect.model)
    rows = _answer("--data", "Training rows (file, folder, glob, URL or Hub dataset)", options.data, read_rows)
    print_line(f"  {rows.described}")
    method = _ask_method(options, model, machine)
    output_dir = _answer("--output-dir", "Output folder", options.output_dir, _folder, f"outputs/{options.file.stem}")
    length = detect.length(rows)
    answers = config_file.Answers(
        model=model,
        rows=rows,
        length=length,
        method=method,
        output_dir=output_dir,
        machine=detect.machine_in_words(machine),
    )
    commands = config_file.commands(options.file, _launcher(length.global_batch_size, machine))
    text = config_file.text(answers, commands)
    _check(text)
    write_text(options.file, text)
    print_line(f"Wrote {options.file}. Next:")
    for command in commands.values():
        print_line(f"  {command}")
    if options.json:
        found = {"file": str(options.file), "commands": commands}
        write_json(options.json, found | {"model": vars(model), "rows": _describe_rows(rows), "method": method})
    return DONE


def _check(text: str) -> None:
    """Load the configuration as a run does, before it is written: --columns may contradict the rows."""
    with tempfile.TemporaryDirectory(prefix="init-") as folder:
        file = Path(folder) / FILE
        file.write_text(text, encoding="utf-8")
        load(["--config", str(file)])


def _check_target(file: Path, *, overwrite: bool) -> None:
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"the configuration must end in .yaml: {file}. Give a name such as {FILE}.")
    if file.is_dir():
        raise UserError(f"{file} is a folder. Give the name of a file.")
    if file.exists() and not overwrite:
        raise UserError(f"{file} exists. Give another name, or replace it with --overwrite.")
    if not os.access(files.nearest_existing(file.parent), os.W_OK):
        raise UserError(f"{file} cannot be written by this user. Give a file in another folder.")


# --- answers --------------------------------------------------------------------------------------------------------


def _answer(option: str, question: str, given: str | None, read: Callable[[str], T], default: str | None = None) -> T:
    """What `read` makes of the option's value, or of an answer on the terminal: asked again if it is invalid.

    Raises:
        UserError: the option's value is invalid, or there is neither an option, a default nor a terminal.
    """
    if given is not None:
        return read(given)
    if not sys.stdin.isatty():
        if default is None:
            raise UserError(f"{option} is missing, and there is no terminal to ask. Give {option}.")
        return read(default)
    while True:
        sys.stdout.write(f"{question}{f' [{default}]' if default else ''}: ")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            raise UserError(f"no answer: the input ended. Give {option}.")
        try:
            return read(line.strip() or default or "")
        except UserError as error:
            print_line(f"  {error}")


def _ask_method(options: argparse.Namespace, model: Model, machine: Hardware) -> str:
    from finetune.init import detect

    suggested, why = detect.method(model, machine)
    question = f"Train {', '.join(METHODS[:-1])} or {METHODS[-1]} ({suggested}: {why})"
    return _answer("--method", question, options.method, _method, suggested)


def _method(text: str) -> str:
    if text not in METHODS:
        raise UserError(f"unknown method: {text}. Choose {', '.join(METHODS)}.")
    return text


def _columns(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(field.strip() and column.strip() for field, _, column in pairs):
        raise argparse.ArgumentTypeError(f"expected FIELD=COLUMN, such as instruction=question, got {text!r}")
    return {field.strip(): column.strip() for field, _, column in pairs}


def _folder(text: str) -> str:
    if Path(text).is_file():
        raise UserError(f"the output folder is a file: {text}. Give another name.")
    return text


def _launcher(batch: int, machine: Hardware) -> list[str]:
    """The launcher of as many ranks as this machine has GPUs, as far as the batch divides over them."""
    from finetune.measure import strategy

    world = strategy.largest_world(Config(training=TrainingConfig(global_batch_size=batch)), machine.count)
    return launch_lines.user_command(world, on_cpu=machine.device == "cpu")


def _describe_rows(rows: Rows) -> dict[str, object]:
    format = rows.format
    found = {"key": rows.key, "name": rows.name, "description": rows.described, "format": None, "columns": None}
    return found | ({"format": format.name, "columns": dict(format.columns)} if format else {})
