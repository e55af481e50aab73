"""Rows of token ids: the documents that a row packs, labels that are missing, and how the ledger counts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.config import load
from finetune.data import formats
from finetune.data.formats import RowError
from finetune.data.prepare import Data, prepare
from finetune.data.templates.encoder import Encoder
from tests.helpers import tiny

# Two documents of 2 and 4 tokens; the only supervised token of the second one is its last.
PACKED = {"input_ids": [10, 11, 12, 13, 14, 15], "labels": [10, 11, -100, -100, -100, 15], "seq_lengths": [2, 4]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def prepared(folder: Path, tokenizer: Any, row: dict[str, Any], *extra: str) -> Data:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    arguments = ["--model.model_name_or_path", "m", "--data.train_file", str(file), "--data.cache_dir", str(folder)]
    return prepare(load([*arguments, *extra]), tokenizer)


def test_a_document_without_labels_leaves_the_others_of_its_row(tokenizer: Any) -> None:
    tokens = formats.to_conversation(PACKED, formats.detect(list(PACKED), [PACKED]))
    (found,) = Encoder(tokenizer, None, max_length=3).encode_batch([tokens])
    assert not isinstance(found, RowError)
    assert [piece.input_ids.tolist() for piece in found] == [[10, 11]]  # the other's only label was cut off


def test_a_row_without_the_labels_that_others_have_is_dropped() -> None:
    """Training on all of its tokens would be a guess."""
    rows = [{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [5, 6], "labels": None}]
    found = formats.detect(["input_ids", "labels"], rows)
    with pytest.raises(RowError, match="missing_field: the column 'labels' has no value"):
        formats.to_conversation(rows[1], found)


@pytest.mark.parametrize(
    "extra, documents, truncated, split",
    [((), 2, 0, 0), (("--data.max_length", "3", "--data.over_length", "keep_end"), 2, 1, 0)]
    + [(("--data.max_length", "3", "--data.over_length", "split"), 2, 0, 1)],
)
def test_documents_of_a_packed_row_are_not_pieces_of_a_split_one(
    extra: tuple[str, ...], documents: int, truncated: int, split: int, tmp_path: Path, tokenizer: Any
) -> None:
    ledger = prepared(tmp_path, tokenizer, PACKED, *extra).ledgers["train"]
    assert (ledger["rows_kept"], ledger["truncated"], ledger["split"]) == (documents, truncated, split)
