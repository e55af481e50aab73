"""The JSON schema for editors says what `config.load` says, of the shipped examples and of single values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from finetune.config import ConfigError, load
from finetune.config.arguments import REFUSED
from finetune.config.json_schema import json_schema
from finetune.config.load import dump_setting
from finetune.config.schema import KEYS, SECTIONS
from finetune.config.sft_fields import sft_fields
from tests.helpers import ROOT

SCHEMA = json_schema()


def mistakes(document: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)]


def read(text: str) -> Any:
    """As an editor reads it, by YAML 1.2: 2e-5 is a number."""
    return yaml.load(text.replace("2e-", "2.0e-").replace("1e-", "1.0e-"), yaml.SafeLoader)


def test_the_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_fit(path: Path) -> None:
    assert not mistakes(read(path.read_text()))


def test_every_key_is_described() -> None:
    described = {
        f"{section}.{key}": one["description"]
        for section, part in SCHEMA["properties"].items()
        for key, one in part["properties"].items()
    }
    assert {name: item.metadata["help"] for name, item in KEYS.items()}.items() <= described.items()
    assert list(SCHEMA["properties"]) == list(SECTIONS)
    keys = {name.partition(".")[2] for name in KEYS}
    further = {f"training.{name}" for name in sft_fields() if name not in REFUSED and name not in keys}
    assert further and further <= set(described)


# section, key, value
RIGHT = [
    ("training", "warmup_ratio", 0.1),
    *((section, "max_seq_length", 64) for section in SECTIONS),
    *((section, "ray_scope", "last") for section in SECTIONS),
    ("model", "warmup_ratio", 0.1),
    ("training", "adam_beta2", 0.95),
    ("training", "neftune_noise_alpha", 5),
    ("training", "eval_strategy", "no"),
    ("training", "gradient_checkpointing", True),
    ("training", "max_steps", -1),
    ("lora", "target_modules", ["q_proj"]),
    ("lora", "target_modules", "all-linear"),
    ("data", "train", [{"file": "a.jsonl", "weight": 2}]),
    ("data", "columns", {"text": "body"}),
    ("data", "max_length", None),
    ("model", "loader_kwargs", {"a": [1, {"b": None}]}),
]
WRONG = [
    ("training", "learning_rat", 1),
    ("training", "learning_rate", "fast"),
    ("training", "learning_rate", 0),
    ("training", "max_steps", 0),
    ("training", "seed", 2**32),
    ("training", "global_batch_size", "16"),
    ("training", "global_batch_size", 1.5),
    ("training", "optim", "adamm"),
    ("training", "push_to_hub", True),
    ("training", "lora_alpha", 16),
    ("lora", "lora_dropout", 1.0),
    ("data", "train_on_roles", []),
    ("lora", "bias", "some"),
    ("data", "packing", "yes"),
    ("data", "train", [{"path": "a.jsonl"}]),
    ("data", "format", "jsonl"),
    ("model", "model_name_or_path", ""),
    ("model", "extra", {}),
]


@pytest.mark.parametrize(("section", "key", "value"), [*RIGHT, *WRONG])
def test_it_agrees_with_the_loader(section: str, key: str, value: Any, tmp_path: Path) -> None:
    right = (section, key, value) in RIGHT
    assert (not mistakes({section: {key: value}})) == right
    given = {section: {key: value}}
    if "model_name_or_path" not in given.setdefault("model", {}):
        given["model"]["model_name_or_path"] = "m"
    if key != "train":
        given.setdefault("data", {})["train_file"] = "a.jsonl"
    lines = [
        f"{name}:\n" + "".join(f"  {dump_setting(*one)}\n" for one in part.items()) for name, part in given.items()
    ]
    (tmp_path / "c.yaml").write_text("".join(lines))
    if right:
        load(["--config", str(tmp_path / "c.yaml")])
    else:
        with pytest.raises(ConfigError, match=key):
            load(["--config", str(tmp_path / "c.yaml")])


def test_unknown_sections_are_wrong_and_empty_ones_are_not() -> None:
    assert mistakes({"modle": {}}) and mistakes([]) and mistakes({"training": 3})
    assert not mistakes({"training": None})


@pytest.mark.parametrize("name", [name for name, item in KEYS.items() if item.metadata["allowed"]])
def test_ranges_are_those_of_the_loader(name: str) -> None:
    section, key = name.split(".")
    _, allowed = KEYS[name].metadata["allowed"]
    for value in (-2, -1, 0, 0.5, 1, 2, 2**32 - 1, 2**32, "", "a", [], ["a"]):
        part = dict(SCHEMA["properties"][section]["properties"][key])
        for keyword in ("type", "anyOf", "items", "enum"):
            part.pop(keyword, None)
        numeric = isinstance(value, int | float)
        if numeric != any(word in part for word in ("minimum", "exclusiveMinimum")):
            continue
        assert jsonschema.Draft202012Validator(part).is_valid(value) == bool(allowed(value)), (name, value)
