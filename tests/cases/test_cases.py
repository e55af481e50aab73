"""What people brought, a folder each: their input, the commands that met it, and what is right.

`case.yaml` has
    model       a kind of tests/cases/models.py, made as ./m (optional)
    process     true if a command starts a process, as a conversion does (optional)
    unsloth     true if it needs Unsloth (optional)
    commands    run in order in a copy of the folder. Each has
        run             the words after `finetune`
        exit            its exit code (0 unless given)
        prints          texts that stdout and stderr together contain
        not_printed     texts that they do not
and `check.py`, where a case has one, `check(folder, output)` on what the commands left behind. A traceback is never
right. So a new report is a new folder.
"""

from __future__ import annotations

import runpy
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune import cli
from tests.cases import models
from tests.helpers.runs import in_this_process

MARKS = ("process", "unsloth", "campaign")
KEYS = {"model", "commands", *MARKS}
KEYS_OF_A_COMMAND = {"run", "exit", "prints", "not_printed"}


def _cases() -> list[Any]:
    cases = []
    for file in sorted(Path(__file__).parent.glob("*/case.yaml")):
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
        marks = [getattr(pytest.mark, name) for name in MARKS if given.get(name)]
        cases.append(pytest.param(file.parent, id=file.parent.name, marks=marks))
    return cases


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models made in this session, by kind."""
    return {"": tmp_path_factory.mktemp("models")}


@pytest.mark.parametrize("case", _cases())
def test_case(
    case: Path, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    expected = yaml.safe_load((case / "case.yaml").read_text(encoding="utf-8"))
    assert expected.keys() <= KEYS
    folder = tmp_path / "case"
    shutil.copytree(case, folder, symlinks=True)
    if kind := expected.get("model"):
        if kind not in made:
            made[kind] = models.make(kind, made[""] / kind)
        shutil.copytree(made[kind], folder / "m")
    monkeypatch.chdir(folder)
    output = ""
    with in_this_process(monkeypatch, tmp_path):
        for command in expected["commands"]:
            output += _run(command, capfd)
    if (case / "check.py").is_file():
        runpy.run_path(str(case / "check.py"))["check"](folder, output)


def _run(command: dict[str, Any], capfd: pytest.CaptureFixture) -> str:
    assert command.keys() <= KEYS_OF_A_COMMAND
    capfd.readouterr()
    code = cli.main(shlex.split(command["run"]))
    captured = capfd.readouterr()
    output = captured.out + captured.err
    assert code == command.get("exit", 0), output
    for text in command.get("prints", []):
        assert text in output
    for text in ["Traceback (most recent call last)", *command.get("not_printed", [])]:
        assert text not in output
    return output
