"""Run notebooks, and scripts written as notebooks, under the stubs, in a process that cannot open anything."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .guard import DEEP, MODULES, fill_real_values, fixed_values, module, namespace
from .handlers import RANDOM, YAML, handlers_by_name, handlers_by_word
from .instrument import execute, prepared
from .state import BY_NAME, ENVIRONMENT, HANDLERS, KNOWLEDGE, REAL_VALUES, RUN, WORDS, Endless, Leave, Unsafe
from .symbols import OF_ELEMENTS, Symbol, add_operators


def run_notebook(statements: list[tuple[int, str]], assumed: bool) -> dict[str, Any]:
    """Execute the statements in order. A failure is recorded and the next statement runs."""
    reset(assumed)
    scope = namespace("notebook.py")
    failed: dict[str, str] = {}
    for identity, source in statements:
        RUN.statement, RUN.steps, RUN.noted = identity, 0, 0
        try:
            execute(prepared(source), scope)
        except Unsafe as error:
            failed[str(identity)] = f"unsafe: {error}"
        except Endless as error:
            failed[str(identity)] = f"endless: {error}"
        except Leave:
            failed[str(identity)] = "leaves: sys.exit()"
        except Exception as error:
            failed[str(identity)] = f"{type(error).__name__}: {error}"
    return result(failed)


def reset(assumed: bool) -> None:
    RUN.start(assumed)
    OF_ELEMENTS.clear()
    ENVIRONMENT.clear()
    RANDOM.clear()
    MODULES.clear()
    environ = Symbol(["attr", "os", "environ"], "os.environ", "os.environ")
    module("os")._known["environ"] = environ


def result(failed: dict[str, str]) -> dict[str, Any]:
    used = {item for e in RUN.events for item in _hashes(e["detail"])}
    known = {key: WORDS[key] for key in used if key in WORDS}
    return {"events": RUN.events, "failed": failed, "words": known}


def _hashes(detail: Any) -> Iterator[str]:
    if isinstance(detail, list):
        if len(detail) == 2 and detail[0] == "sym" and isinstance(detail[1], str):
            yield detail[1]
        for item in detail:
            yield from _hashes(item)


def _load_all() -> None:
    """Import what the standard library imports lazily: no import is possible after confinement."""
    import encodings.idna
    import locale
    import shutil  # argparse needs this and locale

    assert encodings.idna and locale and shutil


def lock() -> None:
    """Install the audit hook: from now on nothing outside this process can be reached."""
    harmless = (
        "compile",
        "exec",
        "object.__getattr__",
        "object.__setattr__",
        "object.__delattr__",
        "builtins.id",
        "code.__new__",
        "function.__new__",
        "sys._getframe",
        "import",
    )

    def hook(name: str, args: tuple[Any, ...]) -> None:
        if name not in harmless:
            raise Unsafe(f"{name} {args!r:.80}")

    sys.addaudithook(hook)


def main(confine: Callable[[], list[str]]) -> None:
    """Read jobs, and what is known about calls, as JSON from standard input; write the results to standard output.

    `confine` asks the kernel to confine this process and returns what was not granted.
    """
    given = json.loads(sys.stdin.buffer.read())
    KNOWLEDGE.update(given["knowledge"])
    add_operators()
    HANDLERS.update(handlers_by_word())
    BY_NAME.update(handlers_by_name())
    REAL_VALUES.update(fixed_values())
    fill_real_values()
    DEEP.update([json.dumps, json.loads, hashlib.sha256, hashlib.md5, str.join])
    out = sys.stdout.buffer
    _load_all()
    missing = confine()
    lock()
    sys.setrecursionlimit(600)
    results = []
    for job in given["jobs"]:
        YAML.clear()
        YAML.update(job["yaml"])
        statements = [tuple(item) for item in job["statements"]]
        results.append(run_notebook(statements, job["assumed"]))
    out.write(json.dumps({"missing": missing, "results": results}).encode())
    out.flush()
