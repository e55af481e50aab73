"""Runs a command, and turns every way it can end into a message and an exit code. Shared by all commands."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from finetune.errors import RunError, UserError, describe
from finetune.redact import redact

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    from finetune.config import Config

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def run_command(command: str, argv: list[str] | None, run: Callable[[Config], int], purpose: str = "") -> int:
    """Load the configuration and run a command with it. Returns the exit code.

    Args:
        purpose: first line of the command's help; unused for `train`, whose help lists all keys.
    """
    from finetune.config import help_text
    from finetune.runtime.options import Options

    text = help_text() if command == "train" else Options(command, purpose, usage="[--json PATH]").format_help()
    return run_with_options(text, argv, lambda arguments: run(load_config(arguments, command=command)))


def load_config(arguments: list[str], **about: Any) -> Config:
    """`config.load`, with the notes on former names printed. A model is named, unless `doctor` or the demo runs; the
    file of --json can be written."""
    from finetune.config import load
    from finetune.runtime.files import check_writable

    config = load(arguments, **about)
    if config.model.model_name_or_path is None and not (config.demo or about["command"] == "doctor"):
        raise UserError("no model is named. Set model.model_name_or_path and data.train_file, or try --demo.")
    if config.json:
        check_writable(config.json, "--json")
    for note in config.notes:
        print_line(note)
    return config


def run_with_options(
    help_text: str, argv: list[str] | None, run: Callable[[list[str]], int], *, takes_script: bool = False
) -> int:
    """Run a command with its arguments, or print `help_text` if they contain `--help`. Returns the exit code.

    Args:
        takes_script: whether the arguments may name a script; what follows it is the script's, also `--help`.
    """
    keep_printing()
    from finetune.runtime.options import requested_help
    from finetune.runtime.scripts import is_script

    argv = sys.argv[1:] if argv is None else argv
    own = itertools.takewhile(lambda word: not (takes_script and is_script(word)), argv)
    if (text := requested_help(list(own), help_text)) is not None:
        sys.stdout.write(text)
        return DONE
    return run_guarded(lambda: run(argv))


def run_guarded(run: Callable[[], int]) -> int:
    """Call `run` and return its exit code, or 2 for bad input, 1 for a failure, 130 for an interruption.

    Only the rank that failed first prints its error; the others exit quietly.
    """
    from finetune.runtime.machine import cpu_threads
    from finetune.runtime.ranks import distributed, failures, interrupt

    cpu_threads.sleep_while_waiting()
    try:
        interrupt.install()
        return run()
    except interrupt.Interrupted:
        failures.announce_interruption(interrupt.reason())
        if distributed.ranks().is_main:
            Output(sys.stderr).write(f"stopped by {interrupt.reason()}\n")
        return INTERRUPTED
    except UserError as error:
        report(error)
        return error.exit_code
    except Exception as error:
        known = known_error(error)
        if known:
            report(known)
        else:
            _report(error, redact(traceback.format_exc()))
        return FAILED


def known_error(error: Exception) -> RunError | None:
    """The error to report for a full or missing disk or a broken connection, wherever it occurred; None for others."""
    from finetune.runtime.machine import disk
    from finetune.runtime.ranks import failures

    broken = failures.explain_broken_connection(describe(error))
    return disk.failure(error) or (RunError(broken) if broken else None)


def report(error: UserError) -> None:
    """Write a user's error to stderr, on the one rank that reports it; each of its notes follows on a separate line."""
    notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
    _report(error, f"{error}\n{notes}", "error: ")


def _report(error: Exception, text: str, prefix: str = "") -> None:
    """Write the error to stderr on the one rank that reports it, after `prefix` and, unless all ranks fail with this
    error, the rank. It may quote a file's content or name."""
    from finetune.runtime.ranks import distributed, failures, launcher

    try:
        me = distributed.ranks()
    except UserError:  # the launcher's variables themselves are wrong
        rank = ""
    else:
        if not failures.claim_failure(describe(error)) and not failures.wait_for_launcher():
            return
        alone = me.world_size == 1 or failures.all_ranks_fail_with(describe(error))
        rank = "" if alone else f"[rank {me.rank}] "
    launcher.leave_error(printable(f"error: {rank}{describe(error)}"))
    output = Output(sys.stderr)
    output.write(printable(f"{prefix}{rank}{text}"))
    output.flush()


def print_line(text: RenderableType, style: str | None = None) -> None:
    """Print text or a rich object on rank 0, without markup, highlighting or line wrapping."""
    console().print(text, style=style, highlight=False, soft_wrap=True, markup=False)


def warn(text: str) -> None:
    """Write a warning to standard error."""
    output = Output(sys.stderr)
    output.write(printable(f"warning: {text}\n"))
    output.flush()


# Terminals obey C0 and C1 controls; bidirectional controls and line separators show a text in another order. A stream
# cannot encode a lone surrogate, as in a file name that is not UTF-8.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters shown as escapes (`\\x1b`). Line ends and tabs stay."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@functools.cache
def console() -> Console:
    """A console that prints on rank 0 and is quiet on the other ranks."""
    from finetune.runtime.ranks import distributed

    return new_console(quiet=not distributed.ranks().is_main)


def new_console(**options: Any) -> Console:
    """A console that shows every text as `printable`, whatever it is part of."""
    from rich.console import Console, RenderHook

    class Hook(RenderHook):
        def process_renderables(self, renderables: list[Any]) -> list[Any]:
            return [_Printable(one) for one in renderables]

    made = Console(file=Output(options.pop("file", None)), **options)  # type: ignore[arg-type]  # what rich needs of one
    made.push_render_hook(Hook())
    return made


def keep_printing() -> None:
    """Let standard output and error replace the characters that they cannot encode, such as in a pipe on Windows
    (cp1252) or with LANG=C: output must never end a run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started the program
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


class Output:
    """A stream that takes every text: what its encoding lacks is replaced, and what cannot be written is lost, because
    a reader has gone, a terminal was closed, or a disk is full."""

    def __init__(self, stream: object = None) -> None:
        """
        Args:
            stream: None for standard output, whatever that is when something is written.
        """
        self._given = stream

    @property
    def _stream(self) -> Any:
        stream = sys.stdout if self._given is None else self._given
        return getattr(stream, "rich_proxied_file", stream)  # a progress bar replaces sys.stdout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what can be written."""
        stream = self._stream
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = getattr(stream, "encoding", None) or "ascii"
            self._try(lambda: stream.write(text.encode(encoding, "replace").decode(encoding)))
        except (OSError, ValueError) as error:
            self._lost(error)
        return len(text)

    def flush(self) -> None:
        """Flush what can be written."""
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        if isinstance(error, BrokenPipeError):  # else Python fails again when it flushes at the end
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class _Printable:
    """A rich object whose text is `printable`. Rich's own control codes, such as of a progress bar, stay."""

    def __init__(self, renderable: RenderableType) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
