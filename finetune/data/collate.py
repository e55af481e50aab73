"""Turn the rows of one micro-batch into tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from finetune.data import IGNORE_INDEX
from finetune.data.layout import Document
from finetune.data.packs import MULTIPLE, padding_segments

LONG = 32_768  # tokens of a lone row from which it gets no padding: transformers' mask of width x width would be 1 GiB


def collate(
    rows: Sequence[list[Document]],
    *,
    pad_token_id: int,
    pack_length: int | None,
    uneven: bool = False,
    multiple: int | None = None,
) -> dict[str, torch.Tensor]:
    """Collate one micro-batch. Unsupervised tokens have the label IGNORE_INDEX, and so has the first token of each
    document: nothing precedes it, and in a pack it would be predicted from another document.

    Args:
        rows: the documents of each row; an empty list is a dummy row, which has no supervised token.
        pack_length: tokens per pack. Packs are concatenated into one sequence: returns input_ids, labels and
            position_ids, int64 [1, len(rows) * pack_length], and packed_seq_lengths, int32 [segments].
            None if each row is one document, padded to the longest: returns input_ids, attention_mask and labels,
            int64 [len(rows), width]. Either way also document_lengths, int64 [segments]: of documents and, negative, of
            padding, in the order of the tokens.
        uneven: where all segments of packs are equally long, append one of MULTIPLE padding tokens.
        multiple: concatenate the rows also without a pack length, and pad the whole to a multiple of this.
    """
    if pack_length is None and multiple is None:
        return _collate_padded(rows, pad_token_id)
    return _concatenate(rows, pad_token_id, pack_length, uneven, multiple or 1)


def _concatenate(
    rows: Sequence[list[Document]], pad_token_id: int, pack_length: int | None, uneven: bool, multiple: int
) -> dict[str, torch.Tensor]:
    lengths: list[int] = []
    starts_of_rows = []
    for documents in rows:
        starts_of_rows.append(sum(map(abs, lengths)))
        own = [len(ids) for ids, _ in documents]
        padding = 0 if pack_length is None else pack_length - sum(own)
        lengths += [*own, *(-length for length in padding_segments(padding))]
    if uneven and len({abs(length) for length in lengths}) == 1:
        lengths.append(-MULTIPLE)
    rest = -sum(map(abs, lengths)) % multiple if lengths else multiple
    lengths += [-length for length in padding_segments(rest)]
    segments = np.abs(np.array(lengths, dtype=np.int64))
    total = int(segments.sum())
    input_ids = np.full(total, pad_token_id, dtype=np.int64)
    labels = np.full(total, IGNORE_INDEX, dtype=np.int64)
    for place, documents in zip(starts_of_rows, rows, strict=True):
        for ids, supervised in documents:
            input_ids[place : place + len(ids)] = ids
            labels[place + 1 : place + len(ids)] = supervised[1:]
            place += len(ids)
    starts = np.cumsum(segments) - segments
    positions = np.arange(total) - np.repeat(starts, segments)  # restart at every segment
    return {
        "input_ids": torch.from_numpy(input_ids)[None],
        "labels": torch.from_numpy(labels)[None],
        "position_ids": torch.from_numpy(positions)[None],
        "packed_seq_lengths": torch.from_numpy(segments.astype(np.int32)),
        "document_lengths": torch.tensor(lengths),
    }


def _collate_padded(rows: Sequence[list[Document]], pad_token_id: int) -> dict[str, torch.Tensor]:
    width = max((len(documents[0][0]) for documents in rows if documents), default=1)
    if len(rows) > 1 or width < LONG:
        width = -(-width // MULTIPLE) * MULTIPLE
    input_ids = np.full((len(rows), width), pad_token_id, dtype=np.int64)
    labels = np.full((len(rows), width), IGNORE_INDEX, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    lengths = np.zeros((len(rows), 2), dtype=np.int64)
    lengths[:, 1] = -width
    for number, documents in enumerate(rows):
        for ids, supervised in documents:
            input_ids[number, : len(ids)] = ids
            labels[number, 1 : len(ids)] = supervised[1:]
            mask[number, : len(ids)] = 1
            lengths[number] = len(ids), len(ids) - width
        mask[number, 0] = 1  # softmax over a row with every position masked is undefined
    return {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(mask),
        "labels": torch.from_numpy(labels),
        "document_lengths": torch.from_numpy(lengths.ravel()),
    }
