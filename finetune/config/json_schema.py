"""The configuration as a JSON schema (draft 2020-12), with which editors complete and check a YAML file."""

from __future__ import annotations

from typing import Any, Literal, Union, get_args, get_origin

from finetune.config import arguments
from finetune.config.data_sources import ENTRY_TYPES
from finetune.config.schema import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    DEFAULTS,
    FRACTION,
    KEYS,
    NOT_EMPTY,
    SECTIONS,
    SEED,
    STEPS_OR_OFF,
    Range,
)
from finetune.config.sft_fields import CHOICES, choices, sft_fields
from finetune.config.values import Values, members

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TITLE = "Configuration of finetune"
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", dict: "object", list: "array"}
# JSON's keywords apply to the types that they know and pass all others, so `null` needs no case.
_RANGES: dict[Range, Values] = {
    AT_LEAST_0: {"minimum": 0},
    AT_LEAST_1: {"minimum": 1},
    ABOVE_0: {"exclusiveMinimum": 0},
    FRACTION: {"minimum": 0, "exclusiveMaximum": 1},
    STEPS_OR_OFF: {"minimum": -1, "not": {"exclusiveMinimum": -1, "exclusiveMaximum": 1}},
    SEED: {"minimum": 0, "maximum": 2**32 - 1},
    NOT_EMPTY: {"minLength": 1, "minItems": 1},
}


def json_schema() -> Values:
    """The schema of a configuration file: every key of every section, and the fields of the installed SFTConfig that
    `training:` accepts. Rules between keys are not part of it: `config.load` checks them.

    Raises:
        UserError: trl or transformers is not installed.
    """
    sections = {name: _section(name) for name in SECTIONS}
    sections["training"]["properties"] |= {name: one for name, one in _sft_fields().items() if name not in _own_names()}
    return {
        "$schema": DIALECT,
        "title": TITLE,
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }


def _section(section: str) -> Values:
    # The loader takes a former name in any section: max_seq_length was also an argument of the model.
    keys = {name: _former(now) for name, now in arguments.former_names().items() if name not in arguments.REFUSED}
    keys |= {name.partition(".")[2]: _key(name) for name in KEYS if name.startswith(f"{section}.")}
    return {
        "description": (SECTIONS[section].__doc__ or "").splitlines()[0],
        "type": ["object", "null"],  # a section with all its keys commented out
        "properties": keys,
        "additionalProperties": False,
    }


def _key(name: str) -> Values:
    """A key of ours."""
    section, _, key = name.partition(".")
    item = KEYS[name]
    found: Values = {"description": item.metadata["help"], "default": DEFAULTS[name]}
    if section == "training" and key in CHOICES:
        found["enum"] = list(dict.fromkeys([DEFAULTS[name], *choices(key)]))
    elif name in ("data.train", "data.eval"):
        entry = {key: _type(annotation) for key, annotation in ENTRY_TYPES.items()}
        found |= {"type": ["array", "null"], "minItems": 1}
        found["items"] = {"type": "object", "properties": entry, "additionalProperties": False}
    else:
        found |= _type(item.type)
    return found | (_RANGES[item.metadata["allowed"]] if item.metadata["allowed"] else {})


def _sft_fields() -> dict[str, Values]:
    """The fields of SFTConfig that can be set, and the values of refused ones that mean the same as a key of ours."""
    found = {
        name: {"description": "A field of TRL's SFTConfig."} | _type(annotation)
        for name, annotation in sft_fields().items()
        if name not in arguments.REFUSED
    }
    for name in sorted(arguments.TAKEN):
        found[name] = {
            "description": "A field of TRL's SFTConfig that sets a key of ours, or says what every run does."
        }
        values = arguments.values(name)
        found[name] |= {} if values is None else {"enum": values}
    return found


def _former(now: str) -> Values:
    return {"description": f"Former name of {now}." if now else "Has no effect.", "deprecated": True}


def _own_names() -> set[str]:
    """Names of keys of any section: under `training:` they can be set only if they belong there."""
    return {name.partition(".")[2] for name in KEYS} - arguments.TAKEN


def _type(annotation: object) -> Values:
    """An annotation in the keywords of JSON schema; none for one that accepts every value."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return {}
    if annotation is type(None):
        return {"type": "null"}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _type(inner[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(inner[1]) or True}
    if origin is Union or len(members(annotation)) > 1:
        return _union([_type(member) for member in members(annotation)])
    return {"type": _TYPES[annotation]}


def _union(kinds: list[Values]) -> Values:
    """One of several types: in one keyword if all are plain, which editors show best."""
    if not all(kinds):
        return {}
    if all(set(kind) == {"type"} for kind in kinds):
        return {"type": [kind["type"] for kind in kinds]}
    if all(set(kind) <= {"type", "enum"} and kind.get("type", "null") in ("null", "boolean") for kind in kinds):
        plain = {"null": [None], "boolean": [True, False]}
        return {"enum": [value for kind in kinds for value in kind.get("enum", plain.get(kind.get("type", ""), []))]}
    return {"anyOf": kinds}
