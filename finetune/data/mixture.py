"""The sources of rows: which a configuration or a script names, and how the rows of each are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from finetune.config import Config
from finetune.data import sources
from finetune.errors import UserError
from finetune.runtime.hooks import Hooks

Item = tuple[dict[str, Any], str]  # a row and its position in the source


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows of one origin, all read the same way.

    name:      in messages and in the ledger, where sources of the same name share a row
    open:      returns the rows; called at most once, and only if the cache entry is built. None: there are no rows, and
               a split without any source that has rows is omitted.
    identity:  JSON-safe; changes when the rows do (part of the cache key)
    format:    row format, see `formats.detect`; "auto" detects it from the first rows
    columns:   role -> column
    template:  name or file of the chat template; None: the configuration's
    weight:    passes per epoch: 2.0 takes each row twice, 0.3 takes 30% of the rows
    """

    name: str
    open: Callable[[], Iterator[Item] | None]
    identity: Any
    format: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    template: str | None = None
    weight: float = 1.0


def configured(config: Config, tokenizer: Any, hooks: Hooks) -> dict[str, list[Source]]:
    """The sources that `config` names; rows of a script's function come from a call of it."""
    data = config.data
    train_files, eval_files = _files(data.train_file), _files(data.eval_file)
    splits: dict[str, list[Source]] = {}
    if config.rows_from_script:
        splits |= _script_sources(config, tokenizer, hooks)
    elif train_files:
        weights = data.weights or [1.0] * len(train_files)
        splits["train"] = [
            source
            for name, weight in zip(train_files, weights, strict=True)
            for source in _file_sources(config, name, weight)
        ]
    else:
        splits["train"] = [_hub_source(config)]
    if eval_files:
        splits["eval"] = [source for name in eval_files for source in _file_sources(config, name)]
    return splits


def _file_sources(config: Config, name: str, weight: float = 1.0) -> Iterator[Source]:
    """One source per file that `name` (a path, a glob or a folder) stands for: each file has its own format."""
    for path in sources.expand([name]):
        yield Source(
            name=name,
            open=functools.partial(sources.iter_rows, [str(path)]),
            identity=sources.content_digest([str(path)]),
            format=config.data.format,
            columns=config.data.columns,
            weight=weight,
        )


def _hub_source(config: Config) -> Source:
    data = config.data
    identity = (str(data.dataset_name), data.dataset_config, data.split)
    return Source(
        name=identity[0],
        open=functools.partial(sources.iter_hub, *identity),
        identity=identity,
        format=data.format,
        columns=data.columns,
    )


def _script_sources(config: Config, tokenizer: Any, hooks: Hooks) -> dict[str, list[Source]]:
    """The rows that the script's function returns: one call of it opens both splits."""
    returned = functools.cache(lambda: _returned(config, tokenizer, hooks))
    identity = ["script", hooks.identity()]

    def source(index: int) -> list[Source]:
        return [
            Source(
                name=str(config.script),
                open=lambda: returned()[index],
                identity=identity,
                format=config.data.format,
                columns=config.data.columns,
            )
        ]

    # Held-out rows from data.eval_file or data.eval_fraction take the place of those that the function may return.
    chosen = config.data.eval_file is not None or config.data.eval_fraction
    return {"train": source(0)} | ({} if chosen else {"eval": source(1)})


def _returned(config: Config, tokenizer: Any, hooks: Hooks) -> tuple[Iterator[Item], Iterator[Item] | None]:
    """The training and evaluation rows that the script's function returns, possibly as generators."""
    returned = hooks.call("dataset", tokenizer)
    name = getattr(hooks.dataset, "__name__", "dataset")

    def read(rows: Any) -> Iterator[Item]:
        with hooks.user_errors("dataset"):
            yield from sources.iter_returned(rows, name)

    if not isinstance(returned, tuple):
        return read(returned), None
    if len(returned) != 2:
        raise UserError(
            f"{name}() returned {len(returned)} values. Return the rows, or a pair (training rows, evaluation rows)."
        )
    if returned[1] is not None and config.data.eval_fraction:
        raise UserError(
            f"{config.script} returns evaluation rows and data.eval_fraction is {config.data.eval_fraction}: only one "
            "may choose them. Set data.eval_fraction to 0, or return only the training rows."
        )
    return read(returned[0]), None if returned[1] is None else read(returned[1])


def _files(given: str | list[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or [])
