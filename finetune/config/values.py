"""Checks a value that the YAML parser returned against the annotation of its field, and puts both in words."""

import math
import types
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

from finetune.errors import cut
from finetune.redact import redact

Values: TypeAlias = dict[str, Any]
"""Keys and values as YAML gives them."""


class NotAllowed(Exception):
    """The value does not fit the annotation."""


def members(annotation: object) -> tuple[object, ...]:
    """The members of a union, or the annotation alone; None is `type(None)`."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def convert(value: object, annotation: object) -> Any:
    """`value` in the type of `annotation`. Exact matches stay unchanged; an integer, or a number in quotes, becomes a
    float if only a float fits. Raises NotAllowed."""
    if any(_matches(value, member) for member in members(annotation)):
        return value
    if float in members(annotation) and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise NotAllowed from None
        if math.isfinite(number):
            return number
    if list[float] in members(annotation) and isinstance(value, list):
        return [convert(item, float) for item in value]
    raise NotAllowed


def _matches(value: object, annotation: object) -> bool:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if annotation is type(None):
        return value is None
    if origin is Literal:
        return value in inner
    if origin in (Union, types.UnionType):
        return any(_matches(value, member) for member in inner)
    if origin is list:
        return isinstance(value, list) and all(_matches(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _matches(key, inner[0]) and _matches(item, inner[1]) for key, item in value.items()
        )
    if annotation is float:
        return type(value) is float and math.isfinite(value)
    return type(value) is annotation  # not isinstance: True is not an int here


def describe(annotation: object) -> str:
    """An annotation in YAML's terms for tables, such as `int | null` or `auto | unsloth | transformers`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(describe(member) for member in inner)
    if origin is Literal:
        return " | ".join(str(choice) for choice in inner)
    if origin is list:
        return f"list of {describe(inner[0])}"
    if origin is dict:
        return f"mapping of {describe(inner[0])} to {describe(inner[1])}"
    plain: dict[object, str] = {type(None): "null", dict: "mapping", bool: "true | false", Any: "anything"}
    return plain.get(annotation) or getattr(annotation, "__name__", str(annotation))


_WORDS: dict[object, str] = {
    **{int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "a mapping", list: "a list"},
    **{type(None): "null", Any: "any value"},
}
_PLURALS: dict[object, str] = {
    int: "integers",
    float: "numbers",
    str: "strings",
    dict: "mappings",
    bool: "true or false",
}


def in_words(annotation: object) -> str:
    """An annotation in a sentence, such as `an integer or null` or `one of auto, unsloth, transformers`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        # In an order of our own: typing gives equal unions the order of the first one that the process has seen.
        parts = sorted((in_words(member) for member in inner), key=lambda words: (words == "null", words))
        return " or ".join([", ".join(parts[:-1]), parts[-1]])
    if origin is Literal:
        return str(inner[0]) if len(inner) == 1 else f"one of {', '.join(map(str, inner))}"
    if origin is list:
        return f"a list of {_PLURALS.get(inner[0]) or describe(inner[0])}"
    if origin is dict:
        return f"a mapping of {_PLURALS.get(inner[0]) or describe(inner[0])} to {_PLURALS.get(inner[1], 'values')}"
    return _WORDS.get(annotation) or getattr(annotation, "__name__", str(annotation))


def show(value: object) -> str:
    """A value as YAML writes it, on one line, shortened if it is long; secrets are masked before."""
    plain = {None: "null", True: "true", False: "false"}
    text = plain[value] if value is None or isinstance(value, bool) else redact(str(value))
    return cut(text)
