"""The parent's side of the recording stubs: one caged process per question."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from finetune.convert.read import Refusal, Statement

_STUBS = Path(__file__).with_name("stubs.py")
_SECONDS = 60  # on the clock; the stubs limit their steps and their own seconds, of which a busy machine gives few
_ANSWER_BYTES = 64 * 2**20
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
    """Raises Refusal (R4) if the process ends itself or does not end.

    Its answer goes to a file and not through a pipe: the kernel bounds the size of files.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as complaint:
        given.write(json.dumps(jobs).encode())
        given.seek(0)
        code = _wait(given, answer, complaint)
        answer.seek(0)
        lines = answer.read(_ANSWER_BYTES).splitlines()
        complaint.seek(0)
        words = complaint.read(10_000).decode(errors="replace").strip().splitlines()
    if code is None or code in _OUT_OF_SECONDS:
        raise Refusal("R4", "its code does not end under the recording stubs, so the conversion cannot be verified")
    try:
        missing, results = (json.loads(line) for line in lines)
        return [_checked(result) | {"unconfined": missing["missing"]} for result in results]
    except (ValueError, TypeError, KeyError):
        why = words[-1][:200] if words else f"exit code {code}"
        raise Refusal(
            "R4", f"its code cannot be run under the recording stubs ({why}), so nothing can be verified"
        ) from None


def _wait(given: IO[bytes], answer: IO[bytes], complaint: IO[bytes]) -> int | None:
    """Run the stubs to their end. Their exit code, or None if they were ended."""
    named = {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ}  # Windows starts nothing without
    command = [sys.executable, "-I", "-S", str(_STUBS)]
    try:
        return subprocess.run(
            command, stdin=given, stdout=answer, stderr=complaint, timeout=_SECONDS, env=named, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def _checked(result: Any) -> Trace:
    """A trace has the shape that the rest of the converter relies on. Raises TypeError if not."""
    shape = {"events": list, "failed": dict, "words": dict}
    if not isinstance(result, dict) or any(not isinstance(result.get(key), kind) for key, kind in shape.items()):
        raise TypeError("not a trace")
    return result
