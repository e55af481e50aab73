"""The errors that are reported to users without a traceback, and how they quote what a user gave."""

import re
from collections.abc import Iterable

from finetune.redact import redact

_LONG = re.compile(r"\S{400,}")  # longer than a path


def cut(given: object, most: int = 80) -> str:
    """What a user gave, on one line of at most `most` characters."""
    text = " ".join(str(given).split())
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def listed(names: Iterable[object], most: int = 20) -> str:
    """`a, b, c`, each cut; `a, b and 93 more` if there are more than `most`."""
    texts = [cut(name) for name in names]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most:,} more" if len(texts) > most else "")


class UserError(Exception):
    """A mistake in the configuration, the data or the setup of the machine. The message states what is wrong, what was
    given and what to do; secrets in it are masked, and words without an end are cut. The process exits with
    `exit_code`."""

    exit_code = 2

    def __str__(self) -> str:
        return _LONG.sub(lambda found: cut(found[0]), redact(super().__str__()))


class RunError(UserError):
    """The input is valid but the run cannot continue (out of memory, loss not finite, no disk space)."""

    exit_code = 1


def describe(error: BaseException) -> str:
    """An error as one line of text with secrets masked. Errors of libraries are preceded by their class name."""
    return str(error) if isinstance(error, UserError) else redact(f"{type(error).__name__}: {error}")
