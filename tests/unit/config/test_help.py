"""Tests of finetune/config/help.py."""

import re
from dataclasses import fields

import pytest

from finetune.config import (
    ConfigError,
    help_text,
    load,
)
from finetune.config.help import COMMON, default_of
from finetune.config.schema import KEYS, SECTIONS
from finetune.config.values import describe
from finetune.train import main as train_main
from tests.helpers.config import problem


def test_help_of_train_has_the_common_keys_first_and_fits_two_screens():
    text = help_text()
    common, others = text.split("Set these six first")[1].split("All other settings")
    for name in COMMON:
        assert f"  --{name} " in common
    sections = dict(re.findall(r"^ (\w+): .*\n((?:  .*\n)+)", others, re.MULTILINE))
    assert list(sections) == list(SECTIONS)
    for name, field in KEYS.items():
        section, key = name.split(".")
        entry = f"  {key:27} {describe(field.type)} ({default_of(name)})"  # one of two on a line if both are short
        shown = bool(re.search(rf"{re.escape(entry)}(  |$)", sections[section], re.MULTILINE))
        assert shown == (name not in COMMON), name
    assert "  seed                        int (42)" in others
    assert "Peak learning rate. Use about a tenth for full fine-tuning. [0.0002]" in " ".join(common.split())
    assert text.startswith("usage: finetune train [--config FILE.yaml]")
    assert len(text.splitlines()) <= 100 and max(map(len, text.splitlines())) <= 122


@pytest.mark.parametrize("section", SECTIONS)
def test_help_of_a_section_has_every_key_with_type_default_and_meaning(section, capsys):
    assert train_main(["--help", section]) == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    for field in fields(SECTIONS[section]):
        if field.name != "extra":
            assert f"--{section}.{field.name}  " in text and " ".join(field.metadata["help"].split()) in flat
    if section == "training":
        assert "--training.learning_rate  float, above 0  (default: 0.0002)" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_comes_before_any_mistake(capsys, flag):
    assert train_main(["--config", "none.yaml", "--training.lr", "1", flag]) == 0
    assert capsys.readouterr().out == help_text()


def test_without_arguments_train_says_how_to_begin_and_without_a_model_what_is_missing(capsys):
    assert train_main([]) == 2
    text = capsys.readouterr().out
    assert text.startswith("usage: finetune train") and max(map(len, text.splitlines())) <= 120
    for command in ("train --demo", "init", "train my.yaml", "convert MINE.ipynb", "train --model.", "train --help"):
        assert f"finetune {command}" in text
    assert train_main(["--training.max_steps", "4"]) == 2
    assert capsys.readouterr().err.startswith("error: no model is named. Set model.model_name_or_path")


def test_dry_run_belongs_to_train():
    with pytest.raises(ConfigError, match="only `train` has --dry-run"):
        load(["--dry-run"], command="prepare")
    assert "takes no value" in problem("--dry-run=yes")
