"""The sources of rows that a configuration names: the entries of data.train and data.eval, or their short forms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from finetune.config.schema import KEYS, DataConfig
from finetune.config.values import NotAllowed, Values, convert, in_words, show


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One entry of data.train or data.eval: files, or a dataset on the Hub, and how its rows are read."""

    file: str | list[str] | None = None
    name: str | None = None
    config: str | None = None
    split: str | None = None  # of a dataset on the Hub; None is "train"
    format: str | None = None  # None is data.format
    columns: dict[str, str] | None = None  # None is data.columns
    template: str | None = None  # None is model.chat_template
    weight: float = 1.0  # passes over the rows per epoch

    @property
    def files(self) -> list[str]:
        """The paths, globs and URLs; none for a dataset on the Hub."""
        return [self.file] if isinstance(self.file, str) else list(self.file or [])


# Key -> annotation of an entry of data.train or data.eval.
ENTRY_TYPES: Values = {
    "file": str | list[str],
    "format": KEYS["data.format"].type,
    "columns": dict[str, str],
    "weight": float,
    **dict.fromkeys(("name", "config", "split", "template"), str),
}
_OTHER_NAMES = {"path": "file", "files": "file", "train_file": "file", "dataset_name": "name", "dataset": "name"} | {
    "dataset_config": "config",
    "subset": "config",
    "chat_template": "template",
    "weights": "weight",
    "epochs": "weight",
}


def training_sources(data: DataConfig) -> list[DataSource]:
    """The sources of the training rows; none if a script returns them."""
    if data.train is not None:
        return [_data_source(entry) for entry in data.train]
    if data.dataset_name is not None:
        return [DataSource(name=data.dataset_name, config=data.dataset_config, split=data.split)]
    return [DataSource(file=file) for file in _listed(data.train_file)]


def evaluation_sources(data: DataConfig) -> list[DataSource]:
    """The sources of the evaluation rows; none if they are a fraction of the training rows, or if there are none."""
    if data.eval is not None:
        return [_data_source(entry) for entry in data.eval]
    return [DataSource(file=file) for file in _listed(data.eval_file)]


def entry_errors(entries: list[Values]) -> Iterator[str]:
    """Everything that is wrong with the entries of data.train or data.eval: what, then what to do."""
    if not entries:
        yield "the list is empty. Name a source, such as {file: a.jsonl}, or remove the key."
    for number, entry in enumerate(entries, 1):
        for text in _entry_errors(entry):
            yield f"entry {number}: {text}"


def _entry_errors(entry: Values) -> Iterator[str]:
    valid: Values = {}
    for key, value in entry.items():
        if key not in ENTRY_TYPES:
            near = _OTHER_NAMES.get(str(key)) or next(iter(get_close_matches(str(key), ENTRY_TYPES)), None)
            remedy = f"Nearest is {near}" if near else f"The keys are {', '.join(ENTRY_TYPES)}"
            yield f"`{show(key)}`: unknown key. {remedy}."
            valid[near or ""] = value  # what was meant is not also reported as missing
            continue
        try:
            valid[key] = convert(value, ENTRY_TYPES[key])
        except NotAllowed:
            yield f"`{key}: {show(value)}`: expected {in_words(ENTRY_TYPES[key])}."
            valid[key] = None
    yield from _contradictions(valid)


def _contradictions(entry: Values) -> Iterator[str]:
    if ("file" in entry) == ("name" in entry):
        both = "both name the rows" if "file" in entry else "neither names the rows"
        yield f"`file` and `name`: {both}. Set file (paths, globs or URLs) or name (a dataset on the Hub)."
    if entry.get("file") == [] or "" in (entry.get("file"), entry.get("name")):
        yield "the source is empty. Set file to a path, or name to a dataset on the Hub."
    for key in ("config", "split"):
        if key in entry and "name" not in entry:
            yield f"`{key}` applies to a dataset on the Hub. Set name, or remove it."
    weight = entry.get("weight")
    if isinstance(weight, int | float) and not (weight > 0 and math.isfinite(weight)):
        yield f"`weight: {weight:g}`: must be above 0. Remove the source to leave it out."


def _data_source(entry: Values) -> DataSource:
    return DataSource(**{key: convert(value, ENTRY_TYPES[key]) for key, value in entry.items()})


def _listed(given: str | list[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or [])
