"""What one execution under the stubs records, and what all of its parts share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

# Per statement. A single operation that does not finish runs into the sandbox's CPU time limit.
STEPS, EVENTS = 200_000, 2_000


class Unsafe(BaseException):
    """The code used something that is not allowed. Not an Exception, so that the code cannot catch it."""


class Endless(BaseException):
    """The statement took more steps than allowed."""


class Leave(BaseException):
    """sys.exit, exit or quit was called."""


# A short description of what each hash stands for, to explain differences.
WORDS: dict[str, str] = {}
# What calls mean that are more than a record: by the last word of their name, and by their full name. And values that
# are real, by full name. Filled before anything runs.
HANDLERS: dict[str, Callable[..., Any]] = {}
BY_NAME: dict[str, Callable[..., Any]] = {}
REAL_VALUES: dict[str, Any] = {}


def digest(form: Any) -> str:
    return hashlib.sha1(json.dumps(form, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Run:
    """One execution: the values of unknown conditions, the events, and the roles."""

    def __init__(self) -> None:
        self.start(True)

    def start(self, assumed: bool) -> None:
        """Forget the last execution."""
        self.assumed = assumed
        self.events: list[dict[str, Any]] = []
        self.statement: int | None = None
        self.steps, self.noted = 0, 0
        self.inside: set[int] = set()
        self.model: Any = None
        self.tokenizer: Any = None
        self.trainer: Any = None


RUN = Run()


ENVIRONMENT: dict[str, Any] = {}
KNOWLEDGE: dict[str, list[str]] = {}  # kind of call -> names, or one pattern, from knowledge.py


def event(kind: str, detail: Any, text: str, **more: Any) -> None:
    RUN.noted += 1
    if RUN.noted > EVENTS:
        raise Endless(f"more than {EVENTS} calls")
    RUN.events.append({"kind": kind, "detail": detail, "words": text[:500], "statement": RUN.statement, **more})
