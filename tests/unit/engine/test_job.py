"""A job is frozen, and made in two places."""

from __future__ import annotations

import ast
import dataclasses

import pytest

from finetune.engine.job import Job
from tests.helpers import ROOT


def made_in(source: str, within: str = "") -> set[str]:
    """The functions in which a job is made or changed: `Job(...)`, `replace(job, ...)`, or an assignment to `job.X`."""
    return _made_in(ast.parse(source), within)


def _made_in(tree: ast.AST, within: str) -> set[str]:
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            called, first = ast.unparse(node.func).split(".")[-1], ast.unparse(node.args[0]) if node.args else ""
            if called == "Job" or (called == "replace" and first.split(".")[-1] in ("job", "_job")):
                found.add(within)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            places = [place for target in targets for place in ast.walk(target) if isinstance(place, ast.Attribute)]
            if any(ast.unparse(place.value).split(".")[-1] in ("job", "_job") for place in places):
                found.add(within)
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else within
        found |= _made_in(node, inside)
    return found


def test_a_job_is_frozen() -> None:
    job = object.__new__(Job)
    for field in dataclasses.fields(Job):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(job, field.name, None)


def test_a_job_is_made_by_assemble_and_settle_alone() -> None:
    found = {
        f"{path.relative_to(ROOT / 'finetune')}:{function}"
        for path in sorted((ROOT / "finetune").rglob("*.py"))
        for function in made_in(path.read_text(encoding="utf-8"))
    }
    assert found == {"engine/job.py:assemble", "measure/settle.py:settle"}


def test_the_search_finds_each_way_to_make_or_change_a_job() -> None:
    for line in ("Job(a=1)", "replace(job, a=1)", "dataclasses.replace(self.job, a=1)", "job.a = 1", "x = t.job.a = 1"):
        assert made_in(f"def f():\n    {line}") == {"f"}, line
    assert not made_in("self.job = job\nx = replace(job.config, a=1)\njob.parts(a=1)")
