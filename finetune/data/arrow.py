"""Rows of Arrow tables and of `datasets` as Python objects, as they were before they were written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from finetune.runtime.types import JsonObject

if TYPE_CHECKING:
    import pyarrow as pa

Convert = Callable[[object], object]


class Struct(dict):
    """An object from Arrow, which gives it the keys of the objects of all rows, with None for those that it lacked."""


def batch_rows(batch: pa.RecordBatch) -> Iterator[JsonObject]:
    """The rows of an Arrow record batch. Values of Arrow's JSON type, in which `datasets` stores values of mixed types,
    are decoded; objects are `Struct`s, except those inside JSON, whose nulls are their own."""
    found = {field.name: _arrow_converter(field.type, field.metadata) for field in batch.schema}
    return _convert_rows(batch.to_pylist(), found)


def dataset_rows(rows: Iterable[Any], features: Mapping[str, object] | None) -> Iterator[JsonObject]:
    """Rows of a `datasets` object, which decodes JSON itself, with `Struct`s for objects.

    Args:
        features: of the object; None if they are unknown.
    """
    found = {name: _feature_converter(feature) for name, feature in (features or {}).items()}
    return _convert_rows((dict(row) for row in rows), found)


def _convert_rows(rows: Iterable[JsonObject], found: Mapping[str, Convert | None]) -> Iterator[JsonObject]:
    converters = {name: convert for name, convert in found.items() if convert}
    for row in rows:
        for name, convert in converters.items():
            if name in row:
                row[name] = convert(row[name])
        yield row


def _arrow_converter(kind: pa.DataType, metadata: Mapping[bytes, bytes] | None) -> Convert | None:
    """What turns a value of this type, as `to_pylist` gives it, into the value that was written; None: nothing."""
    import pyarrow as pa

    name = getattr(kind, "extension_name", None) or (metadata or {}).get(b"ARROW:extension:name", b"").decode()
    if name == "arrow.json":
        return lambda value: json.loads(value) if isinstance(value, str) else value
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return _struct_converter({field.name: _arrow_converter(field.type, field.metadata) for field in fields})
    if hasattr(kind, "value_field") and not pa.types.is_map(kind):
        return _list_converter(_arrow_converter(kind.value_type, kind.value_field.metadata))
    return None


def _feature_converter(feature: object) -> Convert | None:
    if isinstance(feature, Mapping):
        return _struct_converter({name: _feature_converter(inner) for name, inner in feature.items()})
    if isinstance(feature, list):
        return _list_converter(_feature_converter(feature[0]))
    inner = getattr(feature, "feature", None)  # List, LargeList and Sequence
    return None if inner is None else _list_converter(_feature_converter(inner))


def _struct_converter(fields: Mapping[str, Convert | None]) -> Convert:
    converters = {name: convert for name, convert in fields.items() if convert}

    def convert(value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return Struct((key, converters[key](inner) if key in converters else inner) for key, inner in value.items())

    return convert


def _list_converter(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda value: [convert(inner) for inner in value] if isinstance(value, list) else value
