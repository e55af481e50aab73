"""Continuous integration and releases: the scripts of .ci/, and the workflows as far as they can be read."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import finetune
from tests.helpers import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the first test that failed ---------------------------------------------------------------------------------------

REPORT = """<testsuites><testsuite tests="4">
<testcase classname="tests.unit.project.test_ci" name="test_good" time="1"/>
<testcase classname="tests.unit.project.test_ci" name="test_bad[a.b-1]"><failure message="short">def f():
E   AttributeError: 'SFTTrainer' has no `_signature_columns`</failure></testcase>
<testcase classname="" name="tests.unit.project.test_site"><error>ImportError: x</error></testcase>
<testcase classname="" name="tests.unit.test_gone"><error>ImportError: x</error></testcase>
<testcase classname="tests.unit.project.test_ci" name="test_left"><skipped/></testcase>
</testsuite></testsuites>"""


def test_the_first_failed_test_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "report.xml").write_text(REPORT)
    assert script("first_failure").main(tmp_path / "report.xml") == 0
    shown = capsys.readouterr().out
    assert "5 tests, 3 failed. The first: **`tests/unit/project/test_ci.py::test_bad[a.b-1]`**" in shown
    assert "_signature_columns" in shown and "test_good" not in shown
    assert "- `tests/unit/project/test_site.py`\n- `tests.unit.test_gone`\n" in shown, "files that cannot be imported"


@pytest.mark.process
def test_a_run_without_failures_or_tests(tmp_path: Path) -> None:
    first_failure = script("first_failure")
    (tmp_path / "good.xml").write_text('<testsuite><testcase classname="a" name="b"/></testsuite>')
    (tmp_path / "cut.xml").write_text("<testsuite>")
    (tmp_path / "empty.xml").write_text('<testsuites><testsuite tests="0"/></testsuites>')
    assert first_failure.failures(tmp_path / "good.xml") == ["1 tests, none failed."]
    for file in ("cut.xml", "empty.xml", "none.xml"):
        (line,) = first_failure.failures(tmp_path / file)
        assert line.startswith("No test is reported:")
    (unknown,) = first_failure.versions(tmp_path / "no-venv")
    assert unknown.startswith("versions unknown"), "the installation failed"


# --- a release --------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose release is ready."""
    for folder in ("finetune", "dist"):
        (tmp_path / folder).mkdir()
    (tmp_path / "finetune" / "__init__.py").write_text('"""x"""\n\n__version__ = "1.2.3"\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "fine-tune"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2026-11-26\n")
    for name in ("fine_tune-1.2.3.tar.gz", "fine_tune-1.2.3-py3-none-any.whl"):
        (tmp_path / "dist" / name).touch()
    return tmp_path


def test_a_release_that_agrees_is_let_through(checkout: Path) -> None:
    assert script("check_release").problems(checkout, "v1.2.3", "fine-tune") == []
    assert script("check_release").problems(checkout, "v1.2.3", "") == []


@pytest.mark.parametrize(
    ("tag", "project", "file", "text", "words"),
    [
        ("v1.2.4", "", None, "", "the tag is v1.2.4 and the version 1.2.3"),
        ("1.2.3", "", None, "", "the tag is 1.2.3"),
        ("v1.2.3", "finetune", None, "", "names the project fine-tune, and PYPI_PROJECT is finetune"),
        ("v1.2.3", "", "CHANGELOG.md", "## [Unreleased]\n", "CHANGELOG.md has no section `## [1.2.3] - YYYY-MM-DD`"),
        ("v1.2.3", "", "dist/fine_tune-1.2.2.tar.gz", "", "dist/ has fine_tune-1.2.2.tar.gz, fine_tune-1.2.3-py3"),
    ],
)
def test_a_release_that_disagrees_is_stopped(
    tag: str, project: str, file: str | None, text: str, words: str, checkout: Path
) -> None:
    if file:
        (checkout / file).write_text(text)
    (problem,) = script("check_release").problems(checkout, tag, project)
    assert words in problem


def test_the_version_stands_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", finetune.__version__)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in text and f'"{finetune.__version__}"' not in text


# --- workflows --------------------------------------------------------------------------------------------------------


def jobs(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_use_pinned_actions_and_what_the_makefile_has(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    assert content["permissions"] in ({}, {"contents": "read"})
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)$", text, re.MULTILINE)) <= targets
    for used in re.findall(r"uses: (.*)", text):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used), used
    for name in re.findall(r"(\.ci/[\w.]+)", text):
        path = ROOT / name
        assert path.is_file() and path.stat().st_mode & 0o111, name
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_only_the_publishing_job_may_prove_who_it_is() -> None:
    """It has no checkout, so none of this project's code runs beside the permission."""
    for file in WORKFLOWS:
        for name, job in jobs(file).items():
            allowed = set(job.get("permissions", {})) - {"contents"}
            assert allowed == ({"id-token", "attestations"} if name == "publish" else set()), name
    publish = jobs(ROOT / ".github" / "workflows" / "release.yml")["publish"]
    assert "PYPI_PROJECT" in publish["if"] and "tag" in publish["if"] and publish["environment"]["name"] == "pypi"
    assert not any("run" in step or "checkout" in step.get("uses", "") for step in publish["steps"])


def test_the_nightly_job_may_fail_and_names_the_first_failing_test() -> None:
    job = jobs(ROOT / ".github" / "workflows" / "nightly.yml")["upstream"]
    assert job["continue-on-error"] is True
    (last,) = [step for step in job["steps"] if "first_failure" in step.get("run", "")]
    assert last["if"] == "always()" and "GITHUB_STEP_SUMMARY" in last["run"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "GITHUB := git+https://github.com/huggingface\n" in makefile
    for library in ("transformers", "trl", "peft"):
        assert f" {library}@$(GITHUB)/{library}" in makefile
    _, report, venv, *_ = last["run"].split()
    assert f"--junitxml={report}\n" in makefile and f"UPSTREAM := {venv}\n" in makefile
