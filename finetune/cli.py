"""`finetune COMMAND ...`, the same as `python -m finetune.COMMAND ...`."""

from __future__ import annotations

import difflib
import importlib
import sys

from finetune import __version__
from finetune.runtime.command import BAD_INPUT, DONE, printable

COMMANDS = {
    "init": "write a commented configuration for your model and data",
    "train": "fine-tune a model; with --dry-run, measure the job on one device",
    "dryrun": "measure a job on one device: memory, speed, duration; also `train --dry-run`",
    "chat": "talk to the result of a run, or have it answer a file of prompts",
    "prepare": "tokenize, mask and pack the data ahead of time, without a GPU",
    "parity": "check that a job gives the same result on any number of GPUs",
    "convert": "convert an Unsloth or TRL notebook into a script for any number of GPUs",
    "doctor": "report hardware, versions and anything that would stop a run; for bug reports",
    "export": "export a run as an adapter, a merged model, a GGUF file or to the Hub, and verify it",
    "advise": "recommend a number of GPUs for a job, from measurements",
    "review": "explain recorded runs: what limits them, what to change, how they compare",
    "dashboard": "start TensorBoard on all runs below a folder, with a review of what limits each",
    "completion": "print the completion script of bash, zsh or fish",
    "bench": "measure the communication between the GPUs of this machine",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:10} {summary}" for name, summary in COMMANDS.items()]
        more = "dryrun, prepare, parity and advise take a configuration or a script that uses finetune.SFTTrainer.\n"
        more += "`finetune COMMAND --help` lists the options of a command; `finetune --version` prints the version."
        sys.stdout.write("usage: finetune COMMAND [options]\n\n" + "\n".join(lines) + f"\n\n{more}\n")
        return DONE if argv else BAD_INPUT
    if argv[0] == "--version":
        sys.stdout.write(f"{__version__}\n")
        return DONE
    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"Nearest is `{near[0]}`." if near else f"Commands: {', '.join(COMMANDS)}."
        if argv[0].endswith((".yaml", ".yml")):
            hint = f"To train with this configuration: finetune train {argv[0]}"
        if argv[0].endswith(".py"):
            hint = f"To train with this script: accelerate launch {argv[0]}. To measure it: finetune dryrun {argv[0]}"
        sys.stderr.write(printable(f"error: unknown command: `{argv[0]}`. {hint}\n"))
        return BAD_INPUT
    return importlib.import_module(f"finetune.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
