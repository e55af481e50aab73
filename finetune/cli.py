"""`finetune VERB`: parse, run, and turn every way of ending into a message and an exit code."""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from finetune.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.config import Config

VERBS = {
    "train": "train a model; --dry-run tries everything on one device first and keeps nothing",
}
DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    """`finetune VERB ...`, the same as `python -m finetune.VERB ...`."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:10} {about}" for name, about in VERBS.items()]
        sys.stdout.write("usage: finetune VERB [--help] ...\n\n" + "\n".join(lines) + "\n")
        return DONE if argv else BAD_INPUT
    if argv[0] == "--version":
        from finetune import __version__

        sys.stdout.write(f"{__version__}\n")
        return DONE
    if argv[0] not in VERBS:
        import difflib

        near = difflib.get_close_matches(argv[0], VERBS, n=1)
        hint = f"; the nearest is `{near[0]}`" if near else ""
        sys.stderr.write(f"error: no verb `{argv[0]}`; there are {', '.join(VERBS)}{hint}\n")
        return BAD_INPUT
    return importlib.import_module(f"finetune.{argv[0]}").main(argv[1:])


def run_verb(verb: str, argv: list[str] | None, run: Callable[[Config], int]) -> int:
    """Load the configuration and run a verb with it. Returns the exit code; prints an error once, in its own words."""
    from finetune.config import help_text, load

    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(help_text(verb) + "\n")
        return DONE
    return guarded(lambda: run(load(argv, verb=verb)))


def guarded(run: Callable[[], int]) -> int:
    """Run to the end, or to an error: 2 for bad input, 1 for a failure, 130 for an interruption.

    Of all ranks the one that failed first shows its error; the others end quietly with it.
    """
    from finetune import distributed, interrupt

    interrupt.install()
    try:
        return run()
    except interrupt.Interrupted as signal:
        if distributed.ranks().is_main:
            sys.stderr.write(f"stopped by {signal}\n")
        return INTERRUPTED
    except UserError as error:
        if _speaks(str(error)):
            sys.stderr.write(f"error: {_rank_name()}{error}\n")
        return error.exit_code
    except Exception as error:
        if _speaks(f"{type(error).__name__}: {error}"):
            sys.stderr.write(_rank_name() + traceback.format_exc())
        return FAILED


def _speaks(message: str) -> bool:
    from finetune import distributed

    try:
        return distributed.claim_failure(message)
    except UserError:  # the launcher's variables themselves are wrong
        return True


def _rank_name() -> str:
    from finetune import distributed

    try:
        me = distributed.ranks()
    except UserError:
        return ""
    return f"[rank {me.rank}] " if me.world_size > 1 else ""


@functools.cache
def console() -> Console:
    """Where rank 0 speaks; silent on the other ranks."""
    from rich.console import Console

    from finetune import distributed

    return Console(quiet=not distributed.ranks().is_main)


if __name__ == "__main__":
    raise SystemExit(main())
