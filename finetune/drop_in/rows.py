"""The user's `datasets.Dataset` objects as sources of rows, and prepared rows as a dataset again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from finetune.data.arrow import dataset_rows
from finetune.data.layout import Layout
from finetune.data.mixture import Item, Source
from finetune.data.store import Rows
from finetune.drop_in import refusals, settings
from finetune.drop_in.former import RowReader
from finetune.drop_in.refusals import Refused
from finetune.errors import UserError, describe
from finetune.runtime.command import print_line
from finetune.runtime.ranks import distributed

if TYPE_CHECKING:
    import trl
    from datasets import Dataset

Row = Mapping[str, Any]
Collator = Callable[[Sequence[Row]], Row]  # a data collator
_BATCH_ROWS = 1000  # of TRL's preparation
_DIGEST_ROWS = 1000
_PROBED_ROWS = 16


def sources(datasets: Mapping[str, object], args: trl.SFTConfig, reading: RowReader) -> dict[str, Source]:
    """The rows of every split, before anything is loaded. Every rank calls it.

    Args:
        datasets: by split: "train", "eval" or "eval_NAME".
        args: the user's SFTConfig.

    Raises:
        Refused: rows that this trainer cannot use.
        UserError: on every rank: the ranks were given different rows.
    """
    names = {split: refusals.argument_name(split) for split in datasets}
    options = {"skips_preparation": settings.skips_preparation(args), "assistant_only": args.assistant_only_loss}
    checked = {split: refusals.check_dataset(rows, names[split], **options) for split, rows in datasets.items()}
    found = {split: source(rows, names[split], reading) for split, rows in checked.items()}
    own = {one.name: one.identity for one in found.values()}
    for rank, theirs in enumerate(everyone := distributed.gather_objects(own)):
        for name in own:
            if theirs.get(name) != everyone[0].get(name):
                raise UserError(
                    f"rank {rank} has different rows from rank 0: `{name}` differs. Each process runs the whole "
                    "script, so a split, shuffle or sample without a seed differs between them. Give it one, such as "
                    "train_test_split(seed=42), or prepare the data in a file first."
                )
    return found


def source(rows: Any, name: str, reading: RowReader) -> Source:
    """The rows of a dataset. With `formatting_func`, its result is the text of a row that is not tokenized yet."""
    custom = rows.format["type"] == "custom"
    plain = rows if custom else rows.with_format(None)
    tokenized = "input_ids" in rows.column_names
    column = None if tokenized else reading.column(rows.column_names)
    formats = reading.formatting_func if not tokenized and column is None else None
    hidden = {"prompt", "completion"} & set(rows.column_names) if formats is not None and reading.hides_pairs else ()
    batched = formats is not None and reading.takes_batches(plain)
    if column is not None:
        print_line(f"{name}: only the column {column!r} is read, {reading.why}.")
    if tokenized and reading.formatting_func is not None:
        print_line(f"{name}: `formatting_func` is not used, as in TRL: the rows have token ids already.")

    def read() -> Iterator[Item]:
        if formats is not None and batched:
            yield from batch_texts(formats, plain, name)
            return
        for number, row in enumerate(rows if custom else dataset_rows(plain, rows.features), 1):
            where = f"{name}:row {number}"
            if column is not None:
                yield {"text": row[column]}, where
            else:
                own = {key: value for key, value in row.items() if key not in hidden}
                yield (own if formats is None else {**own, "text": row_text(formats, row, where)}), where

    transform = rows.format["format_kwargs"].get("transform") if custom else None
    identity = [content_digest(rows), code_digest(formats, transform)]
    identity += [column, batched] if batched or column is not None else []
    identity += ["text alone"] if hidden else []
    text_field = "text" if formats is not None or column is not None else reading.text_field
    return Source(name=name, open=read, identity=identity, text_field=text_field, as_trl=True)


def batch_texts(formatting_func: Callable[..., object], rows: Any, name: str) -> Iterator[Item]:
    """The texts of a formatting_func that takes batches: of 1,000 rows, as by TRL, and as many as it returns.

    Raises:
        Refused: it failed, or returns something else, or one text of several rows.
    """
    number, first = 0, 1
    for batch in rows.iter(_BATCH_ROWS):
        size = len(next(iter(batch.values())))
        where = f"{name}:rows {first} to {first + size - 1}"
        try:
            found = formatting_func(batch)
        except Exception as error:
            raise Refused(f"`formatting_func` failed on {where}: {describe(error)}.") from error
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise Refused(f"`formatting_func` returned other than a list of texts for {where}.")
        if len(found) == 1 < size:
            raise Refused(
                f"`formatting_func` returned a list with one text for {where}: of one row in some releases of TRL, of "
                "1,000 in others. Return the text of one row, without the list."
            )
        for text in found:
            number += 1
            yield {"text": text}, f"{name}:text {number}"
        first += size


def row_text(formatting_func: Callable[..., object], row: Mapping[str, object], where: str) -> str:
    """The text of one row.

    Raises:
        Refused: the function failed, or returned something else than a text.
    """
    try:
        text = formatting_func(row)
    except Exception as error:
        raise Refused(
            f"`formatting_func` failed on {where}: {describe(error)}. It gets one row and returns its text."
        ) from error
    if not isinstance(text, str):
        raise Refused(
            f"`formatting_func` returned a {type(text).__name__} for {where}. It gets one row, not a batch, and "
            "returns its text as one str."
        )
    return text


def content_digest(rows: Any) -> str:
    """xxh3-128 (hex) of a dataset's columns and rows, in their order, however they are stored."""
    import xxhash

    digest = xxhash.xxh3_128(repr(sorted(rows.features.items())).encode())
    for batch in rows.with_format("arrow").iter(_DIGEST_ROWS):
        # A copy, because a slice would be written with offsets into the array that it is a slice of.
        table = batch.take(pa.array(np.arange(len(batch)))).combine_chunks().replace_schema_metadata(None)
        written = pa.BufferOutputStream()
        with pa.ipc.new_stream(written, table.schema) as stream:
            stream.write_table(table)
        digest.update(written.getvalue())
    return digest.hexdigest()


def code_digest(*functions: object) -> str | None:
    """Digest of functions and objects that change rows, with what they refer to. Where it cannot be computed, the id of
    this launch: the cache is then not used again."""
    used = [function for function in functions if function is not None]
    if not used:
        return None
    from datasets.fingerprint import Hasher

    try:
        own = Hasher.hash(used)
    except Exception:
        own = None
    everyone = distributed.gather_objects(own)
    if own is not None and len(set(everyone)) == 1:
        return own
    import uuid

    return distributed.gather_objects(uuid.uuid4().hex)[0]


# --- a data collator of the user's ------------------------------------------------------------------------------------


def only_pads(collator: object) -> bool:
    """Whether a collator is one of those that take the labels as they are: the batches of this trainer say the same."""
    import transformers
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    padding = (
        transformers.DataCollatorForSeq2Seq,
        transformers.DataCollatorWithFlattening,
        transformers.DefaultDataCollator,
    )
    return collator is None or type(collator) in (DataCollatorForLanguageModeling, *padding)


def labeled_source(rows: Any, collator: Collator, name: str, identity: object) -> Source:
    """Tokenized rows with the labels that the collator computes for each of them.

    Args:
        rows: tokenized documents, as a dataset with input_ids and labels.
        identity: of the rows.

    Raises:
        Refused: the labels of a row depend on the other rows of its batch or on chance, or the batch holds more than
            tokens and labels.
    """
    check_collator(collator, [rows[number] for number in range(min(_PROBED_ROWS, len(rows)))])

    def read() -> Iterator[Item]:
        for number, row in enumerate(rows, 1):
            ids, labels = _collated(collator, [row])[0]
            yield {"input_ids": ids, "labels": labels}, f"{name}:row {number}"

    kind = f"{type(collator).__module__}.{type(collator).__qualname__}"
    return Source(name=name, open=read, identity=[identity, kind, code_digest(collator)], format="tokenized")


def check_collator(collator: Collator, rows: Sequence[Row]) -> None:
    """Check on a few rows that a collator treats each row by itself, and always in the same way.

    Raises:
        Refused: it does not.
    """
    name = getattr(type(collator), "__name__", repr(collator))
    alone = [_collated(collator, [row])[0] for row in rows]
    if alone != [_collated(collator, [row])[0] for row in rows]:
        raise Refused(
            f"`data_collator` {name} returns different labels each time, so a run could not be repeated. Compute the "
            "labels once, with `Dataset.map()`, or remove it."
        )
    for first in range(0, len(rows) - 1, 2):
        if _collated(collator, rows[first : first + 2]) != alone[first : first + 2]:
            raise Refused(
                f"`data_collator` {name} makes a row's tokens or labels depend on the other rows in its batch: "
                "the result would depend on how rows are dealt to GPUs. Use `packing=True` to join rows, or remove it."
            )


def _collated(collator: Collator, rows: Sequence[Row]) -> list[tuple[list[int], list[int]]]:
    """(input_ids, labels) of each row of a batch, without padding.

    Raises:
        Refused: the batch has more than that, or other tokens than its rows.
    """
    name = getattr(type(collator), "__name__", repr(collator))
    whole = [{"input_ids": list(row["input_ids"]), "labels": list(row["labels"])} for row in rows]
    try:
        try:
            batch = collator(whole)
        except (ValueError, TypeError):  # one that makes the labels itself may not know how to pad others
            batch = collator([{"input_ids": row["input_ids"]} for row in whole])
    except Exception as error:
        raise Refused(f"`data_collator` {name} failed on tokenized rows: {describe(error)}. Remove it.") from error
    further = sorted(set(batch) - {"input_ids", "labels", "attention_mask", "position_ids"})
    if further or "labels" not in batch:
        what = f"also returns {', '.join(further)}" if further else "returns no labels"
        raise Refused(f"`data_collator` {name} {what}: this trainer's batches hold tokens and labels. Remove it.")
    found = []
    for row, ids, labels in zip(rows, np.asarray(batch["input_ids"]), np.asarray(batch["labels"]), strict=False):
        own = list(row["input_ids"])
        at = next((at for at in (0, len(ids) - len(own)) if ids[at : at + len(own)].tolist() == own), None)
        if at is None or len(labels) != len(ids):
            break
        found.append((own, labels[at : at + len(own)].tolist()))
    if len(found) != len(rows):
        raise Refused(f"`data_collator` {name} changes the tokens of its rows or joins them. Remove it.")
    return found


# --- rows of a constant length ----------------------------------------------------------------------------------------


def wrapped_source(found: Rows, length: int, name: str, identity: object) -> Source:
    """`packing_strategy="wrapped"`: all documents in order as one sequence, cut into rows of `length` tokens. A row
    is then one document: its tokens attend to those of the document before, as in TRL.

    Args:
        identity: of the documents.
    """

    def read() -> Iterator[Item]:
        ids, labels, number = np.empty(0, np.int32), np.empty(0, np.int32), 0
        for index in range(len(found)):
            ids, labels = (np.concatenate(pair) for pair in zip((ids, labels), found[index], strict=True))
            while len(ids) >= length or (len(ids) and index == len(found) - 1):
                number += 1
                row = {"input_ids": ids[:length].tolist(), "labels": labels[:length].tolist()}
                yield row, f"{name}:row {number}"
                ids, labels = ids[length:], labels[length:]

    return Source(name=name, open=read, identity=[identity, "wrapped", length], format="tokenized")


# --- prepared rows, as a dataset --------------------------------------------------------------------------------------


class PackedRows:
    """`trainer.train_dataset` with packing: a row per pack, with the columns that TRL's packing makes.

    Rows are put together when they are looked at. Whatever else a `datasets.Dataset` has is taken from a copy in
    memory.
    """

    column_names: Sequence[str] = ("input_ids", "labels", "seq_lengths")

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __len__(self) -> int:
        return len(self._layout)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return (self._row(number) for number in range(len(self)))

    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, str):
            return [row[key] for row in self]
        if isinstance(key, int):
            return self._row(range(len(self))[key])
        rows = [self._row(number) for number in range(len(self))[key]]
        return {name: [row[name] for row in rows] for name in self.column_names}

    def _row(self, number: int) -> dict[str, list[int]]:
        documents = self._layout[number]
        ids, labels = (np.concatenate([document[side] for document in documents]).tolist() for side in (0, 1))
        return {"input_ids": ids, "labels": labels, "seq_lengths": [len(document[0]) for document in documents]}

    @cached_property
    def _copy(self) -> Dataset:
        import datasets

        return datasets.Dataset.from_dict(self[:])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._copy, name)


def as_dataset(layout: Layout) -> Dataset | PackedRows:
    """The rows of a layout as TRL would hold them: a `datasets.Dataset`, or PackedRows."""
    return layout.rows.dataset if layout.packs.pack_length is None else PackedRows(layout)
