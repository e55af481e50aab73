"""The options of the commands: `pytest tests/unit/runtime/test_options.py` on any machine, offline."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune import cli, prepare
from finetune.advise import command as advise
from finetune.bench import command as bench
from finetune.config.schema import SECTIONS
from finetune.convert import command as convert
from finetune.errors import UserError
from finetune.runtime.options import Options, count, counts, requested_help, without_option

OWN = {"advise": advise.own_options(), "convert": convert.own_options(), "bench comm": bench.own_options()}


def an_option() -> Options:
    found = Options("try", "Try it.", notes="Exit code 0: done.")
    found.add("--world-sizes", counts, "1,2", "numbers of GPUs", [1])
    found.add("--steps", count, "N", "steps (default: %(default)s)", 4)
    found.add_switch("--fastest", "the fastest one")
    return found


def test_own_options_are_taken_and_the_configuration_is_left_in_order() -> None:
    argv = ["--training.max_steps", "-1", "--steps=7", "--config", "a.yaml", "--fastest", "--json", "out.json"]
    options, rest = an_option().split([*argv, "--model.load_in_4bit", "--data.system_prompt", "Be: brief"])
    assert (options.steps, options.fastest, options.world_sizes, options.json) == (7, True, [1], Path("out.json"))
    assert rest == [*argv[:2], "--config", "a.yaml", "--model.load_in_4bit", "--data.system_prompt", "Be: brief"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--steps", "0"], "--steps: expected an integer of at least 1, got '0'. See finetune try --help."),
        (["--world-sizes", "1,,2"], "--world-sizes: expected integers of at least 1, such as 1,2,4, got '1,,2'."),
        (["--steps"], "--steps: expected one argument."),
        (["--json="], "--json: expected a path."),
        (["--worldsizes", "1"], "unknown option: `--worldsizes`. Nearest is --world-sizes."),
        (["--fastes"], "unknown option: `--fastes`. Nearest is --fastest."),
    ],
)
def test_mistakes_are_ours_to_report(argv: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        an_option().split(argv)
    assert str(caught.value).startswith(said) and caught.value.exit_code == 2


def test_what_resembles_a_setting_is_left_to_the_configuration() -> None:
    argv = ["--model_name", "m", "--learning_rate", "1", "--trainin.steps", "3"]
    assert an_option().split(argv)[1] == argv
    assert advise.own_options().split(argv)[1] == argv  # which has --model


def test_a_command_without_configuration_refuses_the_rest() -> None:
    with pytest.raises(UserError, match=r"unknown option: `--overwrit`\. Nearest is --overwrite"):
        convert.own_options().split(["a.ipynb", "--overwrit"])
    with pytest.raises(UserError, match="unexpected argument: `b.ipynb`"):
        convert.own_options().split(["a.ipynb", "b.ipynb"])


def test_arguments_without_json() -> None:
    words = ["--a.b", "1", "--json", "x", "--c.d=2"]
    assert without_option("--json", words) == ["--a.b", "1", "--c.d=2"]
    assert without_option("--json", ["--json=x", *words[:2]]) == words[:2]
    assert without_option("--json", ["--json"]) == []
    assert without_option("--c.d", words) == words[:-1] and without_option("--a.b", words) == words[2:]


@pytest.mark.parametrize("options", OWN.values(), ids=OWN)
def test_help_has_the_purpose_and_own_options_first(options: Options) -> None:
    text = options.format_help()
    usage, purpose, *rest = text.split("\n\n")
    assert usage.startswith(f"usage: {options.prog} ") and purpose.startswith(str(options.description)[:40])
    common = [place for place, part in enumerate(rest) if "--config FILE.yaml" in part]
    assert len(common) == options.configuration
    for flag in options.flags:
        assert flag in text
    assert len(text.splitlines()) <= 50 and max(map(len, text.splitlines())) <= 110


def test_every_command_with_a_configuration_explains_its_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert requested_help(["--steps", "3"], "general") is None
    assert requested_help(["-h"], "general") == requested_help(["--help", "--steps"], "general") == "general"
    for section in SECTIONS:
        assert cli.main(["prepare", "--help", section]) == 0
        assert capsys.readouterr().out.startswith(f"{section}: ")


def test_a_command_shows_its_purpose_and_refers_to_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "Tokenize, mask and pack" in text and "`finetune train --help` lists all keys" in text
    assert "--data.max_length" not in text and len(text.splitlines()) < 22


def test_a_configuration_file_in_place_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["s.yaml"]) == 2
    assert "unknown command: `s.yaml`" in (said := capsys.readouterr().err)
    assert "finetune train s.yaml" in said
    assert (
        cli.main(["s.py"]) == 2
        and "accelerate launch s.py. To measure it: finetune dryrun s.py" in capsys.readouterr().err
    )
    for words in (["s.py"], ["--dry-run", "s.py"]):
        assert cli.main(["train", *words]) == 2 and "`finetune dryrun s.py` measures it" in capsys.readouterr().err
    assert cli.main(["trian"]) == 2 and "Nearest is `train`." in capsys.readouterr().err
    assert cli.main(["x\x1b[2J"]) == 2 and "\x1b" not in capsys.readouterr().err
    assert cli.main(["prepare", "s.yaml"]) == 2  # as --config s.yaml
    assert "s.yaml: the configuration file does not exist" in capsys.readouterr().err
