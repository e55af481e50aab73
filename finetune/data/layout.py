"""Training rows: packs of whole documents, or one padded document per row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from finetune.data.packs import MULTIPLE, Packs, one_per_row, pack
from finetune.data.store import Rows
from finetune.runtime.types import JsonObject

Document = tuple[np.ndarray, np.ndarray]  # input_ids and labels, int32 of the same length


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The documents of every row of the plan; also the map-style dataset of the DataLoader.

    rows:  all documents
    packs: assignment of documents to rows
    """

    rows: Rows
    packs: Packs

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, row: int) -> list[Document]:
        """The documents of one row, without a copy; an empty list for -1, the plan's dummy row."""
        return [] if row < 0 else [self.rows[int(document)] for document in self.packs[row]]

    def __getitems__(self, rows: list[int]) -> list[list[Document]]:
        """Several rows at once: the batched lookup of torch's DataLoader."""
        return [self[row] for row in rows]

    @property
    def tokens(self) -> np.ndarray:
        """int64 [n_rows], tokens of each row without padding."""
        return self.packs.tokens

    @property
    def squared_lengths(self) -> np.ndarray:
        """int64 [n_rows], sum of squared document lengths per row: the cost of attention."""
        return self.packs.squares

    @cached_property
    def label_tokens(self) -> np.ndarray:
        """int64 [n_rows], supervised tokens of each row."""
        return self.packs.totals(self.rows.label_tokens)

    @property
    def padded_lengths(self) -> np.ndarray | None:
        """int32 [n_rows], tokens of each row if micro-batches are padded to their longest row; None for packs."""
        return self.rows.lengths if self.packs.pack_length is None else None

    def micro_batch_tokens(self, rows: np.ndarray, shared_by: int = 1) -> np.ndarray:
        """Tokens of each micro-batch, padding included: rows int64 [..., per_device] -> int64 [...].

        Args:
            shared_by: ranks that share it. If several do, its rows are concatenated.
        """
        per_device, length = rows.shape[-1], self.packs.pack_length
        if shared_by > 1:
            multiple = shared_by * MULTIPLE
            widths = np.where(rows >= 0, self.tokens[rows], 0) if length is None else np.full(rows.shape, length)
            return -(-widths.sum(axis=-1).clip(1) // multiple) * multiple
        if length is not None:
            return np.full(rows.shape[:-1], per_device * length, dtype=np.int64)
        longest = np.where(rows >= 0, self.rows.lengths[rows], 1).max(axis=-1).astype(np.int64)
        return -(-longest // MULTIPLE) * MULTIPLE * per_device

    def largest_first(self) -> np.ndarray:
        """Row indices by decreasing size, so that a micro-batch of neighbors needs little padding. Of rows with equally
        many tokens, the one with the most expensive attention comes first: a full pack of one document, for which
        Unsloth also selects another attention path."""
        return np.lexsort((-self.squared_lengths, -self.tokens))

    def take(self, rows: np.ndarray) -> Layout:
        """A layout of only these rows, in this order."""
        documents = np.concatenate([self.packs[int(row)] for row in rows])
        counts = [len(self.packs[int(row)]) for row in rows]
        packs = Packs(
            documents=np.arange(len(documents)),
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            tokens=self.packs.tokens[rows],
            squares=self.packs.squares[rows],
            pack_length=self.packs.pack_length,
        )
        return Layout(rows=self.rows.take(documents), packs=packs)

    def to_dict(self) -> JsonObject:
        """The layout's entry in the ledger of run.json."""
        return {
            "rows": len(self),
            "pack_length": self.packs.pack_length,
            "documents_per_row": len(self.rows) / len(self),
            "packing_efficiency": self.packs.efficiency if self.packs.pack_length else None,
        }


def lay_out(rows: Rows, pack_length: int | None, *, seed: int, fingerprint: str) -> Layout:
    """Pack documents into rows of exactly `pack_length` tokens, or make each document its own row (None).

    No document may be longer than `pack_length`: the encoder truncates, splits or drops longer ones.

    Args:
        seed, fingerprint: of the run and its data; with the lengths they decide which documents share a pack.
    """
    packs = (
        one_per_row(rows.lengths) if pack_length is None else pack(rows.lengths, pack_length, f"{seed} {fingerprint}")
    )
    return Layout(rows=rows, packs=packs)
