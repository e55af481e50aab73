"""`finetune completion bash|zsh|fish`: prints the script with which a shell completes commands, options and keys."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from typing import Any, Literal, get_args, get_origin

from finetune.cli import COMMANDS
from finetune.config import help as config_help
from finetune.config.schema import KEYS, SECTIONS
from finetune.config.sft_fields import CHOICES, choices
from finetune.config.values import members
from finetune.errors import UserError
from finetune.runtime.command import DONE, run_with_options
from finetune.runtime.files import write_json
from finetune.runtime.options import Options

SHELLS = {  # and how to install the script
    "bash": "finetune completion bash > ~/.local/share/bash-completion/completions/finetune",
    "zsh": 'finetune completion zsh > "${fpath[1]}/_finetune"',
    "fish": "finetune completion fish > ~/.config/fish/completions/finetune.fish",
}
PURPOSE = "Print the completion script of a shell: commands, options and configuration keys with their values."
NOTES = f"Install it, then start a new shell: {'; '.join(SHELLS.values())}. Exit code 0: done, 2: bad input."
FILES = ("--config", "--json", "--out", "--html", "--data.train_file", "--data.eval_file")
FOLDERS = ("--output-dir", "--training.output_dir", "--data.cache_dir")
CONFIGURED = {  # commands with these options of their own only
    "train": {"--demo": "train the embedded demo", "--dry-run": "measure the job on one device, save nothing else"},
    "doctor": {},
}


def main(argv: list[str] | None = None) -> int:
    """Print a completion script. Returns the exit code."""
    return run_with_options(own_options().format_help(), argv, run)


def own_options() -> Options:
    """The options of this command."""
    found = Options("completion", PURPOSE, notes=NOTES, configuration=False, usage="|".join(SHELLS))
    found.add_argument("shell", nargs="?", metavar="SHELL", help=argparse.SUPPRESS)
    return found


def run(argv: list[str]) -> int:
    """Print the script.

    Raises:
        UserError: an unknown shell.
    """
    options, _ = own_options().split(argv)
    if options.shell not in SHELLS:
        given = "no shell was given" if options.shell is None else f"unknown shell: {options.shell}"
        raise UserError(f"{given}. Choose {', '.join(SHELLS)}.")
    if importlib.util.find_spec("shtab") is None:
        raise UserError("the package shtab is not installed. Run `pip install shtab`.")
    import shtab

    script = shtab.complete(parser(), shell=options.shell)
    sys.stdout.write(script)
    if options.json:
        write_json(options.json, {"shell": options.shell, "script": script, "install": SHELLS[options.shell]})
    return DONE


def parser() -> argparse.ArgumentParser:
    """All commands with their options as one parser, which no command uses to parse."""
    whole = argparse.ArgumentParser(prog="finetune", description="", add_help=False)
    whole.add_argument("-h", "--help", action="store_true", help="list the commands")
    whole.add_argument("--version", action="store_true", help="print the version")
    children = whole.add_subparsers()
    for name, summary in COMMANDS.items():
        child = children.add_parser(name, help=summary, description=summary, add_help=False)
        if name == "bench":
            from finetune.bench import command as bench

            one = child.add_subparsers().add_parser(bench.COMM, help=bench.PURPOSE, add_help=False)
            _add_options(one, bench.own_options())
        else:
            _add_options(child, command_options(name))
    return whole


def command_options(command: str) -> Options:
    """The options of a command besides the configuration's: what `own_options` of its module returns."""
    if command in CONFIGURED:
        found = Options(command, "")
        for flag, text in CONFIGURED[command].items():
            found.add_switch(flag, text)
        return found
    module = importlib.import_module(f"finetune.{command}")
    if not hasattr(module, "own_options"):
        module = importlib.import_module(f"finetune.{command}.command")
    return module.own_options()


def _add_options(child: argparse.ArgumentParser, options: Options) -> None:
    child.add_argument("-h", "--help", nargs="?", choices=list(SECTIONS), help="options, or all keys of a section")
    for action in options.listed():
        if not action.option_strings:
            _complete(child.add_argument(action.dest, nargs="*", help=action.dest), "file")
        elif action.nargs == 0:
            child.add_argument(*action.option_strings, action="store_true", help=action.help)
        else:
            text = action.help if action.help not in (None, argparse.SUPPRESS) else "also write the result as JSON"
            added = child.add_argument(*action.option_strings, metavar=action.metavar, help=text)
            _complete(added, _kind(action.option_strings[0]))
    if options.configuration:
        _complete(child.add_argument("--config", metavar="FILE.yaml", help="YAML file with settings"), "file")
        for name in KEYS:
            _add_key(child, name)


def _add_key(child: argparse.ArgumentParser, name: str) -> None:
    """A key of the configuration, with its values if there are few."""
    text = f"{KEYS[name].metadata['help']} [{config_help.default_of(name)}]".replace("%", "%%")
    flag = f"--{name}"
    added = child.add_argument(flag, choices=_values(name), metavar="VALUE", help=text)
    _complete(added, _kind(flag))


def _kind(flag: str) -> str | None:
    return "file" if flag in FILES else "folder" if flag in FOLDERS else None


def _complete(action: argparse.Action, kind: str | None) -> None:
    import shtab

    if kind is not None:
        action.complete = shtab.FILE if kind == "file" else shtab.DIRECTORY  # pyright: ignore[reportAttributeAccessIssue]


def _values(name: str) -> list[str] | None:
    """The values of a key that has few; None if there are too many to list."""
    section, _, key = name.partition(".")
    if section == "training" and key in CHOICES:
        return list(choices(key))
    found: list[Any] = []
    for member in members(KEYS[name].type):
        if get_origin(member) is Literal:
            found += get_args(member)
        elif member is bool:
            found += ["true", "false"]
    return found or None
