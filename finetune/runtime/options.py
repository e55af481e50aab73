"""The command line of every command: its own options are parsed here, the configuration's by `config.load`."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from finetune.config import help as config_help
from finetune.config.schema import SECTIONS
from finetune.errors import UserError

_CONFIGURATION = """
common to all commands:
  --config FILE.yaml    settings in a YAML file
  --section.key VALUE   one setting, over the file's, such as --training.learning_rate 2e-4
  --json PATH           also write the machine-readable result
  -h, --help [SECTION]  this text, or every key of a section: model, lora, data, training, logging
`finetune train --help` lists all keys.
"""
_CUTOFF = 0.75  # below it, `--model_name` would resemble `--model`, but it is a setting without its section


class Options(argparse.ArgumentParser):
    """The options that a command has in addition to the configuration's; `--json` is one of every command.

    Args:
        command: its name, such as `advise`.
        purpose: what it does, first in the help.
        notes: what follows the options in the help, such as exit codes.
        configuration: whether it takes `--config` and `--section.key` too.
        usage: what follows the name in the usage line.
    """

    def __init__(
        self, command: str, purpose: str, *, notes: str = "", configuration: bool = True, usage: str = "[options]"
    ):
        settings = " [--config FILE.yaml] [--section.key VALUE ...]" if configuration else ""
        super().__init__(
            prog=f"finetune {command}",
            usage=f"finetune {command} {usage}{settings}",
            description=purpose,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=26, width=config_help.WIDTH),
            add_help=False,
            allow_abbrev=False,
        )
        self.configuration = configuration
        self.notes = notes
        listed = argparse.SUPPRESS if configuration else "also write the machine-readable result"
        self.add("--json", path, "PATH", listed)

    def add(self, flag: str, kind: Any, metavar: str, text: str, default: Any = None) -> None:
        """An option with a value that `kind` reads from text."""
        self.add_argument(flag, type=kind, metavar=metavar, default=default, help=text, action=_Once)

    def add_switch(self, flag: str, text: str) -> None:
        """An option without a value."""
        self.add_argument(flag, action="store_true", help=text)

    @property
    def flags(self) -> list[str]:
        """All options, such as `--json`."""
        return [flag for action in self._actions for flag in action.option_strings]

    def split(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options of the command, and the arguments that belong to the configuration.

        Raises:
            UserError: an invalid value, or an unknown option that resembles one of these or cannot be a setting.
        """
        options, rest = self.parse_known_args(argv)
        for word in rest:
            name = word.partition("=")[0].replace("_", "-")
            if name.startswith("--") and "." not in name and name != "--config":  # else `config.load` checks it
                near = get_close_matches(name[2:], [flag[2:] for flag in self.flags], n=1, cutoff=_CUTOFF)
                if near or not self.configuration:
                    self.error(f"unknown option: `{word}`." + (f" Nearest is --{near[0]}." if near else ""))
        if rest and not self.configuration:
            self.error(f"unexpected argument: `{rest[0]}`")
        return options, rest

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print before it ends the process."""
        raise UserError(f"{message.removeprefix('argument ').removesuffix('.')}. See {self.prog} --help.")

    def format_help(self) -> str:
        """Purpose and own options first, then what all commands have in common."""
        notes = f"\n{textwrap.fill(self.notes, config_help.WIDTH)}\n" if self.notes else ""
        return super().format_help() + (_CONFIGURATION if self.configuration else "") + notes


class _Once(argparse.Action):
    """Store a value, and refuse a second one."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        if getattr(namespace, self.dest) is not self.default:
            parser.error(f"{option} is given twice. Keep one")
        setattr(namespace, self.dest, values)


def help_asked(argv: Sequence[str], general: str) -> str | None:
    """The text to print if `argv` asks for help: that of a section, or `general`. None if it does not ask."""
    for place, word in enumerate(argv):
        if word in ("-h", "--help"):
            section = next(iter(argv[place + 1 :]), "")
            return config_help.section_help(section) if section in SECTIONS else general
    return None


def without_json(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--json PATH`: those of the processes that a command starts."""
    kept = [word for word in arguments if not word.startswith("--json=")]
    if "--json" in kept:
        place = kept.index("--json")
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


def price(text: str) -> float:
    """A finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"expected a price of at least 0, got {text!r}")
    return number


def names(text: str) -> list[str]:
    """Words separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def path(text: str) -> Path:
    """A path that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path")
    return Path(text)
