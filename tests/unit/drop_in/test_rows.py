"""Tests of finetune/drop_in/rows.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.drop_in import PAIRS, TEXTS, WARNINGS, dataset, refusal

pytestmark = WARNINGS


def test_a_formatting_function_gives_the_text_of_a_row(make: Callable[..., Any]) -> None:
    trainer = make(PAIRS_AS_COLUMNS, formatting_func=lambda row: f"{row['question']} {row['answer']}")
    plain = make([{"text": f"{row['question']} {row['answer']}"} for row in PAIRS_AS_COLUMNS])
    assert trainer.train_dataset["input_ids"] == plain.train_dataset["input_ids"]
    assert "returned a list" in refusal(make, PAIRS_AS_COLUMNS, formatting_func=lambda row: [row["question"], 1])
    assert "failed on train_dataset:row 1: KeyError" in refusal(make, formatting_func=lambda row: row["no"])


def test_a_formatting_function_of_batches_gives_as_many_texts_as_it_returns(make: Callable[..., Any]) -> None:
    """As in TRL before 0.20: it gets columns of lists. Text of one row is what the others do not change."""

    def texts(batch: dict[str, list[str]]) -> list[str]:
        pairs = zip(batch["question"], batch["answer"], strict=True)
        return [text for question, answer in pairs for text in (question, f"{question} {answer}")]

    wanted = [
        {"text": text} for row in PAIRS_AS_COLUMNS for text in (row["question"], "{question} {answer}".format(**row))
    ]
    found = make(PAIRS_AS_COLUMNS, formatting_func=texts)
    assert found.train_dataset["input_ids"] == make(wanted).train_dataset["input_ids"]
    # A row's other columns do not count, though TRL would read messages first.
    beside = [row | {"messages": [{"role": "user", "content": "no"}]} for row in PAIRS_AS_COLUMNS]
    assert make(beside, formatting_func=texts).train_dataset["input_ids"] == found.train_dataset["input_ids"]
    text = refusal(make, PAIRS_AS_COLUMNS, formatting_func=lambda batch: [f"Q: {batch['question']}"])
    assert "returned a list with one text for train_dataset:rows 1 to 12" in text


def test_the_text_field_of_the_trainer_is_the_one_column(
    make: Callable[..., Any], capsys: pytest.CaptureFixture
) -> None:
    from finetune import SFTTrainer

    rows = [row | {"messages": [{"role": "user", "content": "no"}]} for row in TEXTS]
    trainer = make(rows, trainer=functools.partial(SFTTrainer, dataset_text_field="text"))
    assert trainer.train_dataset["input_ids"] == make(TEXTS).train_dataset["input_ids"]
    assert "only the column 'text' is read, as given to the trainer" in capsys.readouterr().out


PAIRS_AS_COLUMNS = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(12)]


@pytest.mark.parametrize("empty", [{"prompt": "0 + 1 =", "completion": ""}, {"text": ""}], ids=["completion", "text"])
def test_an_empty_answer_is_a_row_as_in_trl(make: Callable[..., Any], empty: dict[str, str]) -> None:
    """A completion trains its end; a text that is empty has no token to predict, so it is no row here."""
    others = [row for row in (*PAIRS, *TEXTS) if row.keys() == empty.keys()]
    trainer = make([*others[:7], empty])
    assert len(trainer.job.data.train) == (8 if "completion" in empty else 7)


def test_wrapped_rows_are_one_sequence_cut_to_length(make: Callable[..., Any]) -> None:
    whole, rows = make().train_dataset, make(packing=True, packing_strategy="wrapped", max_length=20).train_dataset
    assert [token for row in rows["input_ids"] for token in row] == [t for row in whole["input_ids"] for t in row]
    assert {len(row) for row in rows["input_ids"][:-1]} == {20} and "seq_lengths" not in rows.column_names


def test_a_digest_follows_the_content_and_not_the_storage() -> None:
    from datasets import concatenate_datasets

    from finetune.drop_in.rows import content_digest

    rows = dataset([{"a": f"row {number}", "b": [number, None]} for number in range(3000)])
    part = rows.select(range(500, 2500))
    assert content_digest(part) == content_digest(dataset(part.to_list()))
    assert content_digest(part) == content_digest(
        concatenate_datasets([rows.select(range(500, 900)), rows.select(range(900, 2500))])
    )
    others = [part.shuffle(seed=1), part.select(range(1999)), part.rename_column("a", "c"), rows]
    assert len({content_digest(one) for one in [part, *others]}) == 5


def test_a_collator_that_makes_labels_is_followed(make: Callable[..., Any]) -> None:
    """transformers' collator for language modeling masks every padding token, the end of the text among them."""
    from transformers import DataCollatorForLanguageModeling

    plain = make(PAIRS)
    collator = DataCollatorForLanguageModeling(plain.processing_class, mlm=False)
    trainer = make(PAIRS, data_collator=collator)
    padding = plain.processing_class.pad_token_id
    for row, before in zip(trainer.train_dataset, plain.train_dataset, strict=True):
        assert row["input_ids"] == before["input_ids"]
        assert row["labels"] == [-100 if token == padding else token for token in row["input_ids"]]


def test_collators_of_chance_or_of_several_rows_are_refused(make: Callable[..., Any]) -> None:
    import random

    def padded(rows: list[Any], change: Callable[[list[int], int], list[int]]) -> dict[str, Any]:
        width = max(len(row["input_ids"]) for row in rows)
        filled = [row["input_ids"] + [2] * (width - len(row["input_ids"])) for row in rows]
        labels = [change(row["labels"], len(rows)) + [-100] * (width - len(row["input_ids"])) for row in rows]
        return {"input_ids": torch.tensor(filled), "labels": torch.tensor(labels)}

    def chance(rows: list[Any]) -> Any:
        return padded(rows, lambda labels, _: [one if random.random() < 0.5 else -100 for one in labels])

    def neighbors(rows: list[Any]) -> Any:
        return padded(rows, lambda labels, count: labels if count == 1 else [-100] * len(labels))

    def further(rows: list[Any]) -> Any:
        return padded(rows, lambda labels, _: labels) | {"weights": torch.ones(len(rows))}

    def joined(rows: list[Any]) -> Any:
        whole = torch.tensor([[token for row in rows for token in row["input_ids"]]])
        return {"input_ids": whole, "labels": whole}

    def fine(rows: list[Any]) -> Any:
        return padded(rows, lambda labels, _: labels)

    assert "different labels each time" in refusal(make, data_collator=chance)
    assert "depend on the other rows in its batch" in refusal(make, data_collator=neighbors)
    assert "also returns weights" in refusal(make, data_collator=further)
    assert "joins them" in refusal(make, data_collator=joined)
    assert make(data_collator=fine).train_dataset["labels"] == make().train_dataset["labels"]
