"""The parent's side of the recording stubs: one caged process per question."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from finetune.convert.read import Refusal, Statement

_STUBS = Path(__file__).with_name("stubs.py")
_SECONDS = 120  # on the clock; the stubs limit their steps and their own seconds, of which a busy machine gives few
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
    """Raises Refusal (R4) where the process ends itself or does not end."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_STUBS)],
            input=json.dumps(jobs).encode(),
            capture_output=True,
            timeout=_SECONDS,
            env={
                name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ
            },  # Windows starts nothing without
            check=False,
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode in _OUT_OF_SECONDS:
        raise Refusal("R4", "its code does not end under the recording stubs, so the conversion cannot be verified")
    try:
        return json.loads(done.stdout)
    except ValueError:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        why = words[-1][:200] if words else f"exit code {done.returncode}"
        raise Refusal(
            "R4", f"its code cannot be run under the recording stubs ({why}), so nothing can be verified"
        ) from None
