"""The two errors that are meant for people: printed as they are, without a traceback."""

from finetune.redact import redact


class UserError(Exception):
    """A mistake in the configuration, the data or the machine's set-up. The message says what was given, what is
    allowed and what to do next; a secret in it is masked. The process exits with `exit_code`."""

    exit_code = 2

    def __str__(self) -> str:
        return redact(super().__str__())


class RunError(UserError):
    """The input was sound and the run still could not go on (out of memory, loss not finite, no disk space)."""

    exit_code = 1


def describe(error: BaseException) -> str:
    """An error in one text, without secrets: ours are sentences, the others need the name of their kind."""
    return str(error) if isinstance(error, UserError) else redact(f"{type(error).__name__}: {error}")
