"""Several sources of rows: each read its own way, together one set of documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.config import Config, load
from finetune.data.prepare import Source, prepare_splits
from finetune.errors import UserError
from tests import tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def config(tmp_path: Path, *extra: str) -> Config:
    base = ["--model.model_name_or_path", "m", "--data.train_file", "unused", "--data.cache_dir", str(tmp_path / "c")]
    return load([*base, *extra])


def source(name: str, rows: list[dict], **settings: Any) -> Source:
    items = [(row, f"{name}:{number}") for number, row in enumerate(rows, 1)]
    return Source(name=name, open=lambda: iter(items), identity=[name, rows], **settings)


def documents(rows: Any) -> list[tuple[list[int], list[int]]]:
    return [tuple(side.tolist() for side in rows[index]) for index in range(len(rows))]  # type: ignore[misc]


def texts(word: str, count: int) -> list[dict]:
    return [{"text": f"{word} {index}"} for index in range(count)]


def test_splits_of_any_name_and_none_to_train_on(tmp_path: Path, tokenizer: Any) -> None:
    one, two = source("one", texts("one", 3)), source("two", texts("one", 2) + texts("two", 4))
    data = prepare_splits(config(tmp_path), tokenizer, {"train": [one], "eval_a/b": [two], "eval_data2": [one]})
    assert [len(rows) for rows in data.splits.values()] == [3, 6, 3] and list(data.ledgers) == list(data.splits)
    assert data.ledgers["eval_a/b"]["leaked"] == {"rows": 2, "first": {"file": "two", "line": 1}}
    assert data.ledgers["eval_data2"]["leaked"]["rows"] == 3 and "leaked" not in data.ledgers["train"]
    alone = prepare_splits(config(tmp_path), tokenizer, {"eval": [two]})
    assert alone.eval is not None and documents(alone.eval) == documents(data.splits["eval_a/b"])
    assert "leaked" not in alone.ledgers["eval"] and "train" not in alone.splits


def test_sources_are_opened_only_to_build_an_entry(tmp_path: Path, tokenizer: Any) -> None:
    opened: list[int] = []
    rows = source("one", texts("one", 3))
    counted = Source(name="one", open=lambda: opened.append(1) or rows.open(), identity="same")
    first = prepare_splits(config(tmp_path), tokenizer, {"train": [counted]})
    again = prepare_splits(config(tmp_path), tokenizer, {"train": [counted]})
    assert opened == [1] and again.cached and again.fingerprint == first.fingerprint
    other = Source(name="one", open=rows.open, identity="other")
    assert prepare_splits(config(tmp_path), tokenizer, {"train": [other]}).fingerprint != first.fingerprint


def test_held_out_rows_have_no_copy_among_the_training_rows(tmp_path: Path, tokenizer: Any) -> None:
    given = {"train": [source("one", texts("one", 60), weight=3.0), source("two", texts("two", 60))]}
    data = prepare_splits(config(tmp_path, "--data.eval_fraction", "0.3"), tokenizer, given)
    assert data.eval is not None and data.ledgers["eval"]["leaked"]["rows"] == 0
    held_out = documents(data.eval)
    assert len(held_out) == len({tuple(ids) for ids, _ in held_out}) and 20 < len(held_out) < 55
    assert data.ledgers["train"]["duplicates"] == 0  # copies that a weight asks for are none


def test_a_source_without_usable_rows_is_named(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"mine: none of the 1 rows \(eval\) has a supervised token"):
        given = {"train": [source("one", texts("one", 3))], "eval": [source("mine", [{"text": ""}])]}
        prepare_splits(config(tmp_path), tokenizer, given)
    assert not list((tmp_path / "c").glob("*/"))
