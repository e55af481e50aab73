"""Values of files that anyone may have written: each is either what it should be, or None."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from finetune.runtime.command import printable
from finetune.runtime.files import read_bytes
from finetune.runtime.types import JsonObject

MOST_CHARACTERS = 300  # of a name or a sentence that is shown


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def count(value: object) -> int | None:
    """A whole number from 0 to 2**53, or None."""
    found = number(value)
    return int(found) if found is not None and 0 <= found <= 2**53 and found == int(found) else None


def text(value: object) -> str | None:
    """A short text on one line, without control characters, or None."""
    if not isinstance(value, str):
        return None
    clean = printable(" ".join(value.split()))
    return clean if len(clean) <= MOST_CHARACTERS else clean[: MOST_CHARACTERS - 3] + "..."


def mapping(value: object) -> JsonObject:
    """A JSON object; empty if it is something else."""
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> list[Any]:
    """A JSON array; empty if it is something else."""
    return value if isinstance(value, list) else []


def at(tree: object, path: str) -> Any:
    """The value at a dotted path of nested objects, or None."""
    for key in path.split("."):
        tree = mapping(tree).get(key)
    return tree


def json_object(path: Path) -> tuple[JsonObject, str | None]:
    """The object in a JSON file, and what is wrong with the file."""
    try:
        content = json.loads(read_bytes(path))
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError, RecursionError):
        return {}, f"{path.name} cannot be read: incomplete or damaged."
    return (content, None) if isinstance(content, dict) else ({}, f"{path.name} holds no JSON object.")
