"""What every command shares: it runs, and each way of ending becomes a message and an exit code."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from finetune.errors import UserError, describe
from finetune.redact import redact

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from finetune.config import Config

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def run_command(verb: str, argv: list[str] | None, run: Callable[[Config], int], purpose: str = "") -> int:
    """Load the configuration and run a command with it. Returns the exit code.

    Args:
        purpose: what it does, first in its help; `train` has a help text that lists all keys.
    """
    from finetune.config import help_text, load
    from finetune.runtime.options import Options

    text = help_text() if verb == "train" else Options(verb, purpose, usage="[--json PATH]").format_help()
    return run_with_options(text, argv, lambda arguments: run(load(arguments, verb=verb)))


def run_with_options(help_text: str, argv: list[str] | None, run: Callable[[list[str]], int]) -> int:
    """Run a command with its arguments, or print its help if they ask for it. Returns the exit code."""
    from finetune.runtime.options import help_asked

    argv = sys.argv[1:] if argv is None else argv
    if (text := help_asked(argv, help_text)) is not None:
        sys.stdout.write(text)
        return DONE
    return guarded(lambda: run(argv))


def guarded(run: Callable[[], int]) -> int:
    """Run to the end, or to an error: 2 for bad input, 1 for a failure, 130 for an interruption.

    Of all ranks the one that failed first shows its error; the others end quietly with it.
    """
    from finetune.runtime import disk, distributed, interrupt

    interrupt.install()
    try:
        return run()
    except interrupt.Interrupted:
        if distributed.ranks().is_main:
            sys.stderr.write(f"stopped by {interrupt.reason()}\n")
        return INTERRUPTED
    except UserError as error:
        _report(error, f"error: {_rank_name()}{error}\n")
        return error.exit_code
    except Exception as error:
        known = disk.failure(error)  # a disk that is full or gone, wherever it happened
        text = f"error: {_rank_name()}{known}\n" if known else _rank_name() + redact(traceback.format_exc())
        _report(known or error, text)
        return FAILED


def _report(error: Exception, text: str) -> None:
    """Write the error, on the one rank that is to show it."""
    from finetune.runtime import distributed

    try:
        mine = distributed.claim_failure(describe(error))
    except UserError:  # the launcher's variables themselves are wrong
        mine = True
    if mine or distributed.wait_for_launcher():
        sys.stderr.write(text)
        sys.stderr.flush()


def _rank_name() -> str:
    from finetune.runtime import distributed

    try:
        me = distributed.ranks()
    except UserError:
        return ""
    return f"[rank {me.rank}] " if me.world_size > 1 else ""


def print_line(text: RenderableType, style: str | None = None) -> None:
    """Print a sentence, or a rich object, on rank 0: no markup, no highlighting, wrapped by the terminal alone."""
    console().print(text, style=style, highlight=False, soft_wrap=True, markup=False)


@functools.cache
def console() -> Console:
    """The console of rank 0; quiet on the other ranks."""
    from rich.console import Console

    from finetune.runtime import distributed

    return Console(quiet=not distributed.ranks().is_main)
