"""Run notebooks and scripts under the stubs, in a process that cannot open anything."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .guard import DEEP, MODULES, fill_real_values, fixed_values, module, namespace
from .handlers import RANDOM, YAML, handlers_by_name, handlers_by_word
from .instrument import execute, prepared
from .state import BY_NAME, ENVIRONMENT, HANDLERS, KNOWLEDGE, REAL_VALUES, RUN, WORDS, Endless, Leave, Unsafe, event
from .symbols import OF_ELEMENTS, Symbol, add_operators, form, words


def run_notebook(statements: list[tuple[int, str]], assumed: bool, choices: dict[str, bool]) -> dict[str, Any]:
    """Execute the statements in order. A failure is recorded and the next statement runs."""
    reset(assumed, 0, choices)
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


def run_script(source: str, assumed: bool, rank: int, own_tokenizer: bool) -> dict[str, Any]:
    """Execute a converted script with a `finetune.script.run` that calls the hooks in the real order."""
    reset(assumed, rank)
    RUN.own_tokenizer = own_tokenizer
    ENVIRONMENT.update(zip("RANK LOCAL_RANK WORLD_SIZE".split(), (str(rank), str(rank), "2"), strict=True))
    failed: dict[str, str] = {}
    BY_NAME["finetune.script.run"] = _replay
    try:
        execute(prepared(source), namespace("script.py"))
    except (Unsafe, Endless) as error:
        failed["0"] = f"{type(error).__name__}: {error}"
    except SystemExit as error:
        if error.code not in (0, None) and not isinstance(error.code, Symbol):
            failed["0"] = f"SystemExit: {error.code}"
    except (Exception, Leave) as error:
        failed["0"] = f"{type(error).__name__}: {error}"
    return result(failed)


def _replay(function: Symbol, args: tuple[Any, ...], hooks: dict[str, Any]) -> Any:
    unknown = set(hooks) - {"dataset", "tokenizer", "model", "trainer", "save"}
    if unknown or len(args) != 1:
        raise TypeError(f"script.run takes a file and hooks, not {sorted(unknown)}")
    RUN.model, tokenizer = Symbol(["model"], "model"), Symbol(["tokenizer"], "tokenizer")
    RUN.tokenizer = None if RUN.own_tokenizer else tokenizer  # the first one loaded gets the role
    event("load", None, "script.run")
    if "tokenizer" in hooks:
        tokenizer = (
            hooks["tokenizer"](tokenizer) or tokenizer if RUN.assumed else _or(hooks["tokenizer"](tokenizer), tokenizer)
        )
    RUN.tokenizer = tokenizer if RUN.tokenizer is None else RUN.tokenizer
    event("adapt", None, "script.run")
    data = hooks["dataset"](tokenizer) if "dataset" in hooks else None
    train, held_out = data if isinstance(data, tuple) else (data, None)
    if "model" in hooks:
        hooks["model"](RUN.model, tokenizer)
    RUN.trainer = Symbol(["trainer"], "trainer")
    RUN.trainer._known["processing_class"] = RUN.trainer._known["tokenizer"] = tokenizer
    event("trainer", None, "script.run", forms={"processing_class": form(tokenizer)})
    event("dataset", ["train_dataset", form(train)], words(train))
    event("dataset", ["eval_dataset", form(held_out)], words(held_out))
    if "trainer" in hooks:
        hooks["trainer"](RUN.trainer)
    event("train", None, "script.run")
    if "save" in hooks and RUN.rank == 0:
        hooks["save"](RUN.model, tokenizer)
    return 0


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def reset(assumed: bool, rank: int, choices: dict[str, bool] | None = None) -> None:
    RUN.start(assumed, rank, choices)
    OF_ELEMENTS.clear()
    ENVIRONMENT.clear()
    RANDOM.clear()
    MODULES.clear()
    environ = Symbol(["attr", "os", "environ"], "os.environ", "os.environ")
    module("os")._known["environ"] = environ
    BY_NAME.pop("finetune.script.run", None)


def result(failed: dict[str, str]) -> dict[str, Any]:
    used = {item for e in RUN.events for item in _hashes(e["detail"])}
    known = {key: WORDS[key] for key in used if key in WORDS}
    return {"events": RUN.events, "failed": failed, "words": known, "decisions": RUN.decisions}


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
        if job["kind"] == "notebook":
            statements = [tuple(item) for item in job["statements"]]
            results.append(run_notebook(statements, job["assumed"], job.get("choices", {})))
        else:
            results.append(run_script(job["source"], job["assumed"], job["rank"], job["own_tokenizer"]))
    out.write(json.dumps({"missing": missing, "results": results}).encode())
    out.flush()
