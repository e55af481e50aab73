"""The parent's side of the recording stubs: one caged process per question."""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from finetune.convert import sandbox
from finetune.convert.read import Refusal, Statement

# The folder is on the path only for the import: others of its modules are named as some of the standard library.
_PROGRAM = """import sys
sys.path.append({folder!r})
import sandbox, stubs
sys.path.remove({folder!r})
stubs.main(lambda: sandbox.confine(sandbox.PURE).missing)
"""
_SECONDS = 30  # on the clock; the process has few of its own, of which a busy machine gives it less
_OUTPUT = 64 * 2**20  # bytes of all traces: those of a large notebook have a hundredth
_OUT_OF_SECONDS = (-9, -24)  # SIGKILL and SIGXCPU, with which the kernel ends what is over its own seconds
_YAML_TEXTS, _YAML_LETTERS = 100, 20_000  # of one program, of one text: a configuration has a hundredth
WORLDS = (True, False)

Trace = dict[str, Any]


def trace_notebook(statements: Sequence[Statement]) -> list[Trace]:
    """One trace per world: `events`, `failed` (statement id as text -> why) and `words` of hashes."""
    items = [(statement.id, statement.source) for statement in statements]
    common = {"kind": "notebook", "statements": items, "yaml": _yaml(source for _, source in items)}
    return _run([common | {"world": world} for world in WORLDS])


def trace_script(source: str, *, own_tokenizer: bool = False) -> dict[tuple[bool, int], Trace]:
    """Traces of a converted script by world and rank. `own_tokenizer`: it loads another than the model's."""
    keys = [(world, rank) for world in WORLDS for rank in (0, 1)]
    common = {"kind": "script", "source": source, "own_tokenizer": own_tokenizer, "yaml": _yaml([source])}
    jobs = [common | {"world": world, "rank": rank} for world, rank in keys]
    return dict(zip(keys, _run(jobs), strict=True))


def _yaml(sources: Iterable[str]) -> dict[str, Any]:
    """What literal texts say as YAML, of programs that read YAML: the stubs have no parser.

    Texts with aliases are left out, which can be short and say a lot."""
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
            if len(text) > _YAML_LETTERS or any(isinstance(item, yaml.AliasEvent) for item in yaml.parse(text)):
                continue
            value = yaml.safe_load(text)
            if json.loads(json.dumps(value)) == value:
                found[text] = value
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):
            continue
    return found


def _run(jobs: list[dict[str, Any]]) -> list[Trace]:
    """Raises Refusal (R4) if the process ends itself, does not end, or answers with something other than traces."""
    program = _PROGRAM.format(folder=str(Path(__file__).parent))
    done = sandbox.run(
        [sys.executable, "-I", "-S", "-c", program], json.dumps(jobs).encode(), seconds=_SECONDS, output=_OUTPUT
    )
    if done.why == "seconds" or done.returncode in _OUT_OF_SECONDS and done.why != "output":
        raise Refusal("R4", "its code does not end under the recording stubs, so the conversion cannot be verified")
    if done.why == "output":
        raise Refusal("R4", f"its code makes traces of more than {_OUTPUT} bytes, so nothing can be verified")
    try:
        return _traces(json.loads(done.output), len(jobs))
    except (ValueError, RecursionError):
        words = done.errors.decode(errors="replace").strip().splitlines()
        why = words[-1][:200] if words else f"exit code {done.returncode}"
        raise Refusal(
            "R4", f"its code cannot be run under the recording stubs ({why}), so nothing can be verified"
        ) from None


def _traces(answer: Any, count: int) -> list[Trace]:
    """The traces, each with what the kernel did not grant as `unconfined`. Raises ValueError for another shape, which
    code that escaped the stubs could have written."""
    results, missing = _of(dict, answer).get("results"), _of(dict, answer).get("missing")
    for item in _of(list, missing):
        _of(str, item)
    if len(_of(list, results)) != count:
        raise ValueError("not one trace per job")
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
        raise ValueError(f"not {kind}")
    return value
