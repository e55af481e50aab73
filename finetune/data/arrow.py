"""Rows of Arrow tables and of `datasets` as Python objects, as they were before they were written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Convert = Callable[[Any], Any]


class Struct(dict):
    """An object from Arrow, which gives it the keys of the objects of all rows, with None for those that it lacked."""


def batch_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow record batch. Values of Arrow's JSON type, in which `datasets` stores values of mixed types,
    are decoded; objects are `Struct`s, except those inside JSON, whose nulls are their own."""
    converters = {field.name: convert for field in batch.schema if (convert := _of_arrow(field.type, field.metadata))}
    return _converted(batch.to_pylist(), converters)


def dataset_rows(rows: Iterable[Any], features: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Rows of a `datasets` object, which decodes JSON itself, with `Struct`s for objects.

    Args:
        features: of the object; None if they are unknown.
    """
    converters = {name: convert for name, feature in (features or {}).items() if (convert := _of_feature(feature))}
    return _converted((dict(row) for row in rows), converters)


def _converted(rows: Iterable[dict[str, Any]], converters: Mapping[str, Convert]) -> Iterator[dict[str, Any]]:
    for row in rows:
        for name, convert in converters.items():
            if name in row:
                row[name] = convert(row[name])
        yield row


def _of_arrow(kind: Any, metadata: Mapping[bytes, bytes] | None) -> Convert | None:
    """What turns a value of this type, as `to_pylist` gives it, into the value that was written; None: nothing."""
    import pyarrow as pa

    name = getattr(kind, "extension_name", None) or (metadata or {}).get(b"ARROW:extension:name", b"").decode()
    if name == "arrow.json":
        return _decoded
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return _struct({field.name: _of_arrow(field.type, field.metadata) for field in fields})
    if hasattr(kind, "value_field") and not pa.types.is_map(kind):
        return _list(_of_arrow(kind.value_type, kind.value_field.metadata))
    return None


def _of_feature(feature: Any) -> Convert | None:
    if isinstance(feature, Mapping):
        return _struct({name: _of_feature(inner) for name, inner in feature.items()})
    if isinstance(feature, list):
        return _list(_of_feature(feature[0]))
    inner = getattr(feature, "feature", None)  # List, LargeList and Sequence
    return None if inner is None else _list(_of_feature(inner))


def _decoded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _struct(fields: Mapping[str, Convert | None]) -> Convert:
    converters = {name: convert for name, convert in fields.items() if convert}

    def convert(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return Struct((key, converters[key](inner) if key in converters else inner) for key, inner in value.items())

    return convert


def _list(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda value: [convert(inner) for inner in value] if isinstance(value, list) else value
