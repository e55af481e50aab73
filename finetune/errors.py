"""The errors that are reported to users without a traceback."""

from finetune.redact import redact


class UserError(Exception):
    """A mistake in the configuration, the data or the setup of the machine. The message states what is wrong, what was
    given and what to do; secrets in it are masked. The process exits with `exit_code`."""

    exit_code = 2

    def __str__(self) -> str:
        return redact(super().__str__())


class RunError(UserError):
    """The input is valid but the run cannot continue (out of memory, loss not finite, no disk space)."""

    exit_code = 1


def describe(error: BaseException) -> str:
    """An error as one line of text with secrets masked. Errors of libraries are preceded by their class name."""
    return str(error) if isinstance(error, UserError) else redact(f"{type(error).__name__}: {error}")
