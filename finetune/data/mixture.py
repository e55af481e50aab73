"""The sources of rows: which a configuration or a script names, and how the rows of each are read."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from finetune.config import Config
from finetune.config.data_sources import DataSource, evaluation_sources, training_sources
from finetune.data import sources
from finetune.errors import UserError
from finetune.redact import redact
from finetune.runtime.types import JsonObject

Item = tuple[JsonObject, str]  # a row and its position in the source


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows of one origin, all read the same way.

    name:      in messages and in the ledger, where sources of the same name share a row
    open:      returns the rows; called at most once, and only if the cache entry is built. None: there are no rows, and
               a split without any source that has rows is omitted.
    identity:  JSON-safe; changes when the rows do (part of the cache key)
    format:    row format, see `formats.detect`; "auto" detects it from the first rows
    columns:   role -> column
    text_field: column of text, if the rows have no column that TRL reads first (see `formats.text_column`)
    template:  name or file of the chat template; None: the configuration's
    weight:    passes per epoch: 2.0 takes each row twice, 0.3 takes 30% of the rows
    raw:       how raw text is divided into documents, see `sources.divided`; empty for rows
    as_trl:    optional columns that TRL does not read are not read
    """

    name: str
    open: Callable[[], Iterator[Item] | None]
    identity: Any
    format: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    text_field: str = "text"
    template: str | None = None
    weight: float = 1.0
    raw: str = ""
    as_trl: bool = False


def configured_sources(config: Config) -> dict[str, list[Source]]:
    """The sources that `config` names."""
    splits = {"train": _sources(config, training_sources(config.data))}
    held_out = _sources(config, evaluation_sources(config.data))
    return splits | ({"eval": held_out} if held_out else {})


def _sources(config: Config, origins: list[DataSource]) -> list[Source]:
    """The sources of a split. Every entry has its own row of the ledger, also if two of them read the same file."""
    found, names = [], Counter[str]()
    for origin in origins:
        name = _name(origin)
        names[name] += 1
        name += f" (entry {names[name]})" if names[name] > 1 else ""
        format = origin.format or config.data.format
        whole = format == "document"
        settings = {
            "name": name,
            "format": format,
            "columns": config.data.columns if origin.columns is None else origin.columns,
            "text_field": config.data.dataset_text_field,
            "template": origin.template,
            "weight": origin.weight,
        }
        if origin.name is not None:
            hub = (origin.name, origin.config, origin.split or "train")
            found.append(Source(open=functools.partial(sources.iter_hub, *hub), identity=hub, **settings))
        # One source per file that a glob or a folder stands for: the format of each is detected on its own.
        for file in sources.expand(origin.files) if origin.files else ():
            found.append(
                Source(
                    open=functools.partial(sources.iter_rows, [file], whole=whole),
                    identity=sources.content_digest([file]),
                    raw=sources.divided(file, whole=whole),
                    **settings,
                )
            )
        if whole and not found[-1].raw:
            raise UserError(f"data.format: document is for .txt and .md files, and {name} has rows. Set it to text.")
    return found


def _name(origin: DataSource) -> str:
    if origin.name is not None:
        return ":".join(filter(None, (origin.name, origin.config, origin.split)))
    first, *others = origin.files
    return redact(first) + (f" and {len(others)} more" if others else "")
