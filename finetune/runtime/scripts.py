"""Commands that are given a training script instead of a configuration: they run it up to its training, and answer.

A script trains by `SFTTrainer.train()`, which calls `answer_trainer` first: while a command runs the script, its answer
takes the place of the training, and nothing after it runs.
"""

from __future__ import annotations

import ast
import contextlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.load import FINETUNE
from finetune.errors import UserError
from finetune.runtime import files

_TRAINS = {"SFTTrainer", "*"}  # what a script imports from finetune to train


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command does instead of the training.

    trainer:   takes the `finetune.SFTTrainer` whose `train()` was called, and returns the command's exit code
    without:   patches that the trainer's backend skips
    overrides: settings of the trainer, as --finetune gives them
    """

    trainer: Callable[[Any], int]
    without: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


class ScriptEnd(SystemExit):
    """Ends the script. A SystemExit, so that `except Exception` of the script does not catch it."""


@dataclass(kw_only=True)
class _Running:
    words: list[str]  # the script and its arguments
    answer: Answer
    answers: bool = False  # the answer may train
    code: int | None = None  # of the answer, once there is one


_running: _Running | None = None


def run(words: Sequence[str], answer: Answer) -> int:
    """Run a script up to its training and return the exit code of the answer, or of the script if it exits before with
    another code than 0.

    Args:
        words: the script and its arguments.

    Raises:
        UserError: it is no script of this project, or ends without training.
    """
    global _running
    check(words[0])
    mine = _running = _Running(words=list(words), answer=answer)
    kept = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = list(words), [str(Path(words[0]).resolve().parent)]
    try:
        runpy.run_path(words[0], run_name="__main__")
    except UserError as error:
        if line := error_line(error, words[0]):
            error.add_note(line)
        raise
    except SystemExit as end:
        if mine.code is None and end.code not in (None, 0):
            if isinstance(end.code, int):
                return end.code
            sys.stderr.write(f"{end.code}\n")  # as Python does
            return 1
    finally:
        _running = None
        sys.argv, sys.path[:] = kept
    if mine.code is None:
        raise UserError(
            f"{words[0]} ended without calling SFTTrainer.train(), so there is nothing to look at. "
            "Call it when the script runs as the main program, with the same arguments as for training."
        )
    return mine.code


def answer_trainer(trainer: Any) -> None:
    """Called by `SFTTrainer.train`. Returns if no command has been asked, or if its answer trains; else answers and
    ends the script.

    Raises:
        ScriptEnd: with the exit code of the answer.
    """
    running = _running
    if running is None or (running.answers and running.code is None):
        return
    if running.code is None:  # else the script has caught the end
        running.answers = True
        running.code = running.answer.trainer(trainer)
    raise ScriptEnd(running.code)


def skipped_patches() -> tuple[str, ...]:
    """Names of patches to skip, to measure their effect."""
    return () if _running is None else _running.answer.without


def overrides() -> tuple[str, ...]:
    """Settings of the trainer that a command changes, as --finetune gives them."""
    return () if _running is None else _running.answer.overrides


def running_script() -> list[str] | None:
    """The script that a command runs now, and its arguments; None if none runs."""
    return None if _running is None else list(_running.words)


@contextlib.contextmanager
def remove_new_folder(path: Path) -> Iterator[None]:
    """Context in which a library makes the output folder, which is removed again for a command: it keeps nothing."""
    remains = _running is None or path.exists()
    yield
    if not remains:
        with contextlib.suppress(OSError):  # of another rank
            path.rmdir()


def setting_arguments(key: str, value: object) -> list[str]:
    """A setting as an argument of what runs: a script, or a configuration."""
    if _running is not None:
        return [FINETUNE, f"{key}={value}"]
    return [f"--{key}", str(value)]


def is_script(word: str) -> bool:
    """Whether an argument of a command names a script."""
    return word.endswith(".py") and not word.startswith("-")


def check(script: str) -> None:
    """Check, before anything is run, that a script trains by this project.

    Raises:
        UserError: it does not, or cannot be read.
    """
    try:
        source = ast.parse(files.read_bytes(Path(script)), script)
    except OSError as error:
        raise UserError(
            f"the script cannot be read: {script}: {error.strerror or error}. Give the path of a script."
        ) from None
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{script}{line} is not valid Python: {getattr(error, 'msg', error)}. Correct it.") from None
    if not any(_trains(node) for node in ast.walk(source)):
        raise UserError(
            f"{script} does not train with finetune: it does not import finetune.SFTTrainer, and would train "
            "for real. Change `from trl import SFTTrainer` to `from finetune import SFTTrainer`, or "
            "convert a notebook with `finetune convert`."
        )


def _trains(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "finetune" for alias in node.names)
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = {alias.name for alias in node.names}
        return node.module == "finetune.drop_in" or node.module == "finetune" and bool(names & _TRAINS)
    return False


def error_line(error: BaseException, script: str) -> str | None:
    """The innermost line of the script that led to an error."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    return f"  at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else None
