"""The parent's side of the recording stubs: each request runs in one sandboxed process."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from finetune.convert import sandbox
from finetune.convert.knowledge import named, pattern
from finetune.convert.notebook.read import Refusal, Statement

# The folder is on the path only during this import, because other modules in it shadow the standard library.
_PROGRAM = """import sys
sys.path.append({folder!r})
import sandbox, stubs
sys.path.remove({folder!r})
stubs.main(lambda: sandbox.confine(sandbox.PURE).missing)
"""
_SECONDS = 30  # wall clock; the limit on CPU time is much lower, but a busy machine delays the process
_OUTPUT = 64 * 2**20  # bytes of all traces; a large notebook needs about 1% of this
_OUT_OF_CPU_TIME = (-9, -24)  # SIGKILL and SIGXCPU: how the kernel stops a process that exceeds RLIMIT_CPU
_YAML_TEXTS, _YAML_CHARACTERS = 100, 20_000  # per program, per string; a real configuration needs about 1% of these
ASSUMPTIONS = (True, False)  # the value of every condition that the stubs cannot know

Trace = dict[str, Any]


def trace_notebook(statements: Sequence[Statement]) -> list[Trace]:
    """One trace per assumption: `events`, `failed` (statement id as text -> reason), `words` (hash -> description)."""
    items = [(statement.id, statement.source) for statement in statements]
    common = {"statements": items, "yaml": _yaml(source for _, source in items)}
    return _run([common | {"assumed": assumed} for assumed in ASSUMPTIONS])


def training_events(trace: Trace) -> list[dict[str, Any]]:
    """The events up to `train()`, that call included: what comes later changes nothing about the training."""
    kinds = [item["kind"] for item in trace["events"]]
    return trace["events"][: kinds.index("train") + 1] if "train" in kinds else trace["events"]


def event_of(trace: Trace, kind: str) -> dict[str, Any] | None:
    """The last event of a kind until `train()`: a repeated call replaces the earlier one."""
    return next((item for item in reversed(training_events(trace)) if item["kind"] == kind), None)


def _yaml(sources: Iterable[str]) -> dict[str, Any]:
    """String literals parsed as YAML, if a program uses YAML: the stubs have no parser.

    Strings with aliases are skipped, because a short one can expand to a huge value."""
    import yaml

    found: dict[str, Any] = {}
    programs = list(sources)
    if not any("yaml" in source or "OmegaConf" in source for source in programs):
        return found
    nodes = (node for source in programs for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    literals = [node.value for node in nodes if isinstance(node.value, str) and ":" in node.value]
    for text in (
        text for literal in literals[:_YAML_TEXTS] for text in {literal, literal.strip(), textwrap.dedent(literal)}
    ):
        try:
            if len(text) > _YAML_CHARACTERS or any(isinstance(item, yaml.AliasEvent) for item in yaml.parse(text)):
                continue
            value = yaml.safe_load(text)
            if json.loads(json.dumps(value)) == value:
                found[text] = value
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):
            continue
    return found


def _run(jobs: list[dict[str, Any]]) -> list[Trace]:
    """Raises Refusal (R4) if the process exits early, does not finish, or returns anything but traces."""
    program = _PROGRAM.format(folder=str(Path(__file__).parent))
    known = {kind: sorted(named(kind)) for kind in ("keeps", "shows")} | {"account": [pattern("account")]}
    given = json.dumps({"jobs": jobs, "knowledge": known}).encode()
    done = sandbox.run([*sandbox.PYTHON, "-S", "-c", program], given, seconds=_SECONDS, output=_OUTPUT)
    if done.why == "seconds" or done.returncode in _OUT_OF_CPU_TIME and done.why != "output":
        raise Refusal("R4", "its code does not finish under the recording stubs, so the conversion cannot be verified")
    if done.why == "output":
        raise Refusal("R4", f"its traces exceed {_OUTPUT} bytes, so the conversion cannot be verified")
    try:
        return _traces(json.loads(done.output), len(jobs))
    except (ValueError, RecursionError):
        lines = done.errors.decode(errors="replace").strip().splitlines()
        why = lines[-1][:200] if lines else f"exit code {done.returncode}"
        reason = f"its code cannot run under the recording stubs ({why}), so the conversion cannot be verified"
        raise Refusal("R4", reason) from None


def _traces(answer: Any, count: int) -> list[Trace]:
    """Check the shape of the traces and add `unconfined`, what the kernel did not grant.

    Raises ValueError for any other shape: code that escaped the stubs could have written it."""
    results, missing = _of(dict, answer).get("results"), _of(dict, answer).get("missing")
    for item in _of(list, missing):
        _of(str, item)
    if len(_of(list, results)) != count:
        raise ValueError("expected one trace per job")
    for trace in results:
        for item in (*_of(dict, _of(dict, trace).get("failed")).values(), *_of(dict, trace.get("words")).values()):
            _of(str, item)
        for event in _of(list, trace.get("events")):
            _of(str, _of(dict, event).get("kind"))
            _of(str, event.get("words"))
            _of(int | None, event.get("statement"))
            _of(list | None, event.get("args"))
            _of(dict | None, event.get("forms"))
            for key in ("name", "role", "method", "api"):
                _of(str | None, event.get(key))
            if "detail" not in event:
                raise ValueError("an event without detail")
        trace["unconfined"] = missing
    return results


def _of(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected {kind}")
    return value
