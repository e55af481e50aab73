"""Render untrusted chat templates with bounded time and memory.

A chat template is a program that comes with the model. Jinja's sandbox limits it to the messages, but does not stop it
from running forever or growing a string to 10 GB. Here it is rendered as transformers does, so the text is identical to
the character, while the kernel limits this process: a timer for the processor time, and a limit for its memory. Both
are far above what templates need, and a template that exceeds one ends with a UserError. On Windows and macOS memory is
not limited; outside the main thread, time is not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from datetime import datetime
from types import FrameType

from jinja2 import TemplateError

from finetune.errors import UserError
from finetune.runtime.types import JsonObject

try:
    import resource
except ImportError:  # Windows
    resource = None

MAX_SECONDS = 10.0  # of processor time; several thousand times what a row takes
KILL_SECONDS = 60.0  # then the kernel ends the process: Python stops no C code, such as a comparison of nested lists
MAX_BYTES = 1 << 30  # that a rendering may allocate
MAX_CHARACTERS, PER_CHARACTER = 1_000_000, 20  # of a text, and in addition for each character of the input
MAX_TEMPLATE = 1_000_000  # characters of a template; the longest known has 40,000
DATE = "2026-01-01"  # today, to a template that asks with strftime_now: every rank, machine and day gets the same text

Span = tuple[int, int]


class TemplateLimit(UserError):
    """A chat template exceeds the limits of a rendering."""


def render(
    template: str,
    messages: list[JsonObject],
    *,
    tools: list[JsonObject] | None = None,
    add_generation_prompt: bool = False,
    marks: bool = False,
    **special: object,
) -> tuple[str, list[Span]]:
    """The text of a conversation, equal to that of `apply_chat_template`, and with `marks` the spans [start, end) of
    its `{% generation %}` blocks. The variable `strftime_now` is the date that the template gets as today's.

    Raises:
        TemplateLimit: the template needs too much time or memory.
        jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError: it fails on these messages.
    """
    from transformers.utils import chat_template_utils
    from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices

    # From transformers 5.23 on, a message's reasoning is given to the template under each name that templates read.
    if alias := getattr(chat_template_utils, "_alias_reasoning_fields", None):
        messages = alias(messages)
    special["strftime_now"] = datetime.fromisoformat(str(special.get("strftime_now", DATE))).strftime
    given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    spans: list[Span] = []
    try:
        with _limits(template):
            compiled = _compile_jinja_template(template)
            if marks:
                text, found = _render_with_assistant_indices(compiled_template=compiled, **given, **special)
                spans = [(int(start), int(end)) for start, end in found]
            else:
                text = compiled.render(**given, **special)
    except (ArithmeticError, RuntimeError) as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    most = MAX_CHARACTERS if len(text) <= MAX_CHARACTERS else MAX_CHARACTERS + PER_CHARACTER * len(f"{messages}{tools}")
    if len(text) > most:
        raise TemplateLimit(_message(template, f"its text has {len(text)} characters for one conversation"))
    return text, spans


def check_syntax(template: str) -> None:
    """Compile a template. Raises jinja2.TemplateSyntaxError, or TemplateLimit if compiling it needs too much."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    with _limits(template):
        _compile_jinja_template(template)


def _message(template: str, why: str) -> str:
    return (
        f"The chat template ({' '.join(template.split())[:60]!r}...) was stopped: {why[:300]}. Read it before you "
        "trust this model, or set model.chat_template to another one (a known name or a Jinja file)."
    )


@contextlib.contextmanager
def _limits(template: str) -> Iterator[None]:
    """Limit the time and memory of what is done with a template.

    Raises:
        TemplateLimit: a limit was exceeded.
    """
    try:
        if len(template) > MAX_TEMPLATE:
            raise TemplateLimit(f"it has {len(template)} characters, more than {MAX_TEMPLATE}")
        with _limited_memory(), _limited_time():
            yield
    except TemplateLimit as error:
        raise TemplateLimit(_message(template, str(error))) from None
    except MemoryError:
        raise TemplateLimit(_message(template, f"it takes more than {MAX_BYTES >> 20} MiB of memory")) from None
    except (RecursionError, OverflowError) as error:
        raise TemplateLimit(_message(template, f"{type(error).__name__}: {error}")) from None


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """A timer that counts the processor time of this process, not that of its neighbors."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TemplateLimit(f"it takes more than {MAX_SECONDS:g} seconds for one conversation")

    before = signal.signal(signal.SIGVTALRM, stop)
    faulthandler.register(signal.SIGPROF, file=2, all_threads=False, chain=True)
    try:
        signal.setitimer(signal.ITIMER_PROF, KILL_SECONDS)
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS, 1.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """A limit of this process's own data, which files and a GPU's memory do not count in."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            pages = int(file.read().split()[5])
    except OSError:  # no Linux
        pages = None
    if resource is None or pages is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = pages * os.sysconf("SC_PAGE_SIZE") + MAX_BYTES
    most = min([most, *(one for one in (soft, hard) if one != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
