"""One value against one annotation: what the YAML parser read, and what the field takes."""

import math
import types
from typing import Any, Literal, Union, get_args, get_origin


class NotAllowed(Exception):
    """The value does not fit the annotation."""


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone; None is `type(None)`."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def convert(value: Any, annotation: Any) -> Any:
    """`value` as `annotation` has it. Exact matches stay as they are; a whole number, and a number in quotes, become a
    float where only a float fits. Raises NotAllowed."""
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


def _matches(value: Any, annotation: Any) -> bool:
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
    return type(value) is annotation  # not isinstance: True is no int here


def describe(annotation: Any) -> str:
    """An annotation in the words of a YAML file, such as `int | null` or `auto | unsloth | transformers`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(describe(member) for member in inner)
    if origin is Literal:
        return " | ".join(str(choice) for choice in inner)
    if origin is list:
        return f"list of {describe(inner[0])}"
    if origin is dict:
        return f"mapping of {describe(inner[0])} to {describe(inner[1])}"
    plain = {type(None): "null", dict: "mapping", bool: "true | false", Any: "anything"}
    return plain.get(annotation) or annotation.__name__
