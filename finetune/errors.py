"""The two errors that are shown to users: printed without a traceback."""

from finetune.redact import redact


class UserError(Exception):
    """A mistake in the configuration, the data or the machine's set-up. The message names what is
    wrong, what was given and what to do; secrets in it are masked. The process exits with `exit_code`."""

    exit_code = 2

    def __str__(self) -> str:
        return redact(super().__str__())


class RunError(UserError):
    """The input was valid but the run could not continue (out of memory, loss not finite, no disk space)."""

    exit_code = 1


def describe(error: BaseException) -> str:
    """An error as one line of text, without secrets: a library's error is preceded by the name of its class."""
    return str(error) if isinstance(error, UserError) else redact(f"{type(error).__name__}: {error}")
