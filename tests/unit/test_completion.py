"""`finetune completion`: the scripts offer what the commands take. The one for bash is run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import shtab

from finetune import cli, completion
from finetune.bench.command import COMM
from finetune.config.schema import KEYS

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p finetune | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function" finetune "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "finetune.bash"
    path.write_text(shtab.complete(completion.parser(), shell="bash"))
    return path


def offered(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    command = ["bash", "--norc", "-c", ASK, "bash", str(script), "finetune", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=script.parent, timeout=60)
    return done.stdout.split()


@pytest.mark.process
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tra",), ["train"]),
        (("train", "--training.learning_r"), ["--training.learning_rate"]),
        (("train", "--model.dtype", "bf"), ["bfloat16"]),
        (("train", "--training.lr_scheduler_type", "cosine_with_r"), ["cosine_with_restarts"]),
        (("train", "--model.dtype", "auto", "--dr"), ["--dry-run"]),
        (("train", "--help", "mo"), ["model"]),
        (("train", "--config", "my"), ["my.yaml"]),
        (("prepare", "--dry"), []),
        (("advise", "--price"), ["--price-per-gpu-hour"]),
        (("bench", "co"), ["comm"]),
    ],
)
def test_bash_completes(script: Path, words: tuple[str, ...], expected: list[str]) -> None:
    (script.parent / "my.yaml").touch()
    assert sorted(found for found in offered(script, *words) if found != "") == expected


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_script_has_every_command_and_key(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main([shell, "--json", str(tmp_path / "c.json")]) == 0
    text = capsys.readouterr().out
    assert json.loads((tmp_path / "c.json").read_text())["script"] == text
    for name in (*cli.COMMANDS, COMM):
        assert re.search(rf"\b{name}\b", text), name
    for name in KEYS:
        assert name in text.replace("\\", ""), name


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name not in ("bench", "completion")])
def test_the_options_are_those_of_the_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A new command has an `own_options`, or this fails."""
    assert cli.main([command, "--help"]) == 0
    helped = set(re.findall(r"(?m)^  (--[a-z-]+)(?= |$|,)", capsys.readouterr().out)) - {
        "--config",
        "--help",
        "--section",
    }
    assert helped == {flag for flag in completion.command_options(command).flags} | {"--json"}


def test_unknown_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main(["ksh"]) == 2 and "unknown shell: ksh. Choose bash, zsh, fish" in capsys.readouterr().err
    assert completion.main([]) == 2 and "no shell was given" in capsys.readouterr().err
