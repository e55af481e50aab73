"""Parses a command's own options; `config.load` parses the configuration's."""

from __future__ import annotations

import argparse
import itertools
import math
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from finetune.config import help as config_help
from finetune.config.load import FINETUNE
from finetune.config.schema import SECTIONS
from finetune.errors import UserError
from finetune.runtime.files import check_writable
from finetune.runtime.scripts import is_script

_CONFIGURATION = """
common to all commands:
  --config FILE.yaml    YAML file with settings
  --section.key VALUE   one setting, overriding the file, such as --training.learning_rate 2e-4
  --json PATH           also write the result as JSON
  -h, --help [SECTION]  this text, or all keys of a section: model, lora, data, training, logging
`finetune train --help` lists all keys.
"""
_SCRIPT = """
SCRIPT.py trains with finetune.SFTTrainer. It runs up to its training, and nothing after.
Options of this command may follow it; what follows a `--` is the script's alone.
"""
_CUTOFF = 0.75  # any lower and `--model_name`, a setting without its section, would be taken for `--model`


class Options(argparse.ArgumentParser):
    """The options of one command, besides the configuration's. Every command has `--json`.

    Args:
        command: the command's name, such as `advise`.
        purpose: what the command does; first line of the help.
        notes: text after the options in the help, such as exit codes.
        configuration: whether the command also takes `--config` and `--section.key`.
        usage: what follows the name in the usage line.
        script: whether a script may take the place of the configuration.
    """

    def __init__(
        self,
        command: str,
        purpose: str,
        *,
        notes: str = "",
        configuration: bool = True,
        usage: str = "[options]",
        script: bool = False,
    ):
        settings = " [--config FILE.yaml] [--section.key VALUE ...]" if configuration else ""
        settings += f"\n       finetune {command} {usage} SCRIPT.py [its arguments]" if script else ""
        super().__init__(
            prog=f"finetune {command}",
            usage=f"finetune {command} {usage}{settings}",
            description=purpose,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=26, width=config_help.WIDTH),
            add_help=False,
            allow_abbrev=False,
        )
        self.configuration, self.script = configuration, script
        self.notes = notes
        listed = argparse.SUPPRESS if configuration else "also write the result as JSON"
        self.add("--json", path, "PATH", listed)

    def add(self, flag: str, kind: Any, metavar: str, text: str, default: object = None) -> None:
        """An option with a value; `kind` converts it from text."""
        self.add_argument(flag, type=kind, metavar=metavar, default=default, help=text)

    def add_switch(self, flag: str, text: str) -> None:
        """An option without a value."""
        self.add_argument(flag, action="store_true", help=text)

    @property
    def flags(self) -> list[str]:
        """All options, such as `--json`."""
        return [flag for action in self._actions for flag in action.option_strings]

    def listed(self) -> list[argparse.Action]:
        """The actions of all options and positional arguments, in order."""
        return list(self._actions)

    def split(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options of the command, and the arguments that belong to the configuration.

        Raises:
            UserError: an invalid value, or an unknown option that resembles one of these or is not a setting.
        """
        options, rest = self.parse_known_args(argv)
        for word in rest:
            name = word.partition("=")[0].replace("_", "-")
            if name.startswith("--") and "." not in name and name != "--config":  # else `config.load` checks it
                near = get_close_matches(name[2:], [flag[2:] for flag in self.flags], n=1, cutoff=_CUTOFF)
                if near or not self.configuration:
                    self.error(f"unknown option: `{word}`." + (f" Nearest is --{near[0]}." if near else ""))
        if options.json is not None:
            check_writable(options.json, "--json")
        if rest and not self.configuration:
            self.error(f"unexpected argument: `{rest[0]}`")
        return options, rest

    def split_script(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
        """The options of the command, the arguments of the configuration, and the script with its arguments; the last
        is empty if there is none. Options of the command are found anywhere before a `--`, which is dropped; what
        follows it is the script's.

        Raises:
            UserError: as `split`, or there are a script and a configuration.
        """
        place = next((place for place, word in enumerate(argv) if is_script(word)), None)
        if place is None:
            return *self.split(argv), []
        own, theirs = list(argv[:place]), [argv[place]]
        takes = {flag: action.nargs != 0 for action in self._actions for flag in action.option_strings}
        left = iter(argv[place + 1 :])
        for word in left:
            flag, equals, _ = word.partition("=")
            if word == "--":
                theirs += left
            elif flag in takes:
                own += [word, *([] if equals or not takes[flag] else itertools.islice(left, 1))]
            else:
                theirs.append(word)
        options, rest = self.split(own)
        if rest:
            self.error(
                f"a script and a configuration were given: {theirs[0]} and {rest[0]}. Remove one of them; settings of "
                f"a script follow it, as {FINETUNE} section.key=value"
            )
        return options, [], theirs

    def error(self, message: str) -> NoReturn:
        """Raise a UserError with the message that argparse would print before exiting."""
        raise UserError(f"{message.removeprefix('argument ').removesuffix('.')}. See {self.prog} --help.")

    def format_help(self) -> str:
        """Purpose and the command's options first, then the options that all commands share."""
        notes = f"\n{textwrap.fill(self.notes, config_help.WIDTH)}\n" if self.notes else ""
        common = (_CONFIGURATION if self.configuration else "") + (_SCRIPT if self.script else "")
        return super().format_help() + common + notes


def requested_help(argv: Sequence[str], general: str) -> str | None:
    """The help text to print if `argv` contains --help: of a section, or `general`. None otherwise."""
    for place, word in enumerate(argv):
        if word in ("-h", "--help"):
            section = next(iter(argv[place + 1 :]), "")
            return config_help.section_help(section) if section in SECTIONS else general
    return None


def without_option(name: str, arguments: Sequence[str]) -> list[str]:
    """The arguments without an option and its value."""
    kept = [word for word in arguments if not word.startswith(f"{name}=")]
    if name in kept:
        place = kept.index(name)
        kept = kept[:place] + kept[place + 2 :]
    return kept


# Kinds of values ----------------------------------------------------------------------------------------------------


def count(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Integers of at least 1, separated by commas."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise argparse.ArgumentTypeError(f"expected integers of at least 1, such as 1,2,4, got {text!r}")
    return [int(part) for part in parts]


def one_of(*allowed: str) -> Any:
    """One of these words."""

    def kind(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"expected {', '.join(allowed[:-1])} or {allowed[-1]}, got {text!r}")
        return text

    return kind


def number(text: str) -> float:
    """A finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return number


def names(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def path(text: str) -> Path:
    """A path that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path")
    return Path(text)
