"""Training rows: packs of whole documents, or one padded document per row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from finetune.data.packs import MULTIPLE, Packs, one_per_row, pack, random_order
from finetune.data.plan import Plan
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


MIX_STEPS = 256  # steps that the standard deviations are taken over, if the data has that many in MIX_EPOCHS epochs
MIX_EPOCHS = 32


def batch_mix(layout: Layout, plan: Plan) -> dict[str, float] | None:
    """How similar the steps of a plan are to each other: steps that are not random samples of the data cost
    held-out loss. None if an epoch has fewer than two full steps.

    Returns:
        sd_of_step_mean_length: standard deviation, over steps, of the mean length of a step's documents, in tokens
        sd_random_order: the same for documents in random order, put one after the other into packs of the same length
            (next-fit) or, without packing, into rows
        documents_per_step: mean number of documents in a step
    """
    packs, size = layout.packs, plan.global_batch_size
    per_epoch = plan.n_rows // size
    if per_epoch < 2:
        return None
    epochs = min(MIX_EPOCHS, -(-MIX_STEPS // per_epoch))
    orders = [np.concatenate([plan.step_rows(epoch, step) for step in range(per_epoch)]) for epoch in range(epochs)]
    documents = np.diff(packs.offsets)
    means, counts = zip(*(_step_means(packs.tokens[rows], documents[rows], size) for rows in orders), strict=True)
    lengths = np.asarray(layout.rows.lengths, dtype=np.int64)
    random = []
    for epoch in range(epochs):
        shuffled = lengths[random_order(len(lengths), f"{plan.seed} {epoch} {plan.fingerprint} mix")]
        ends = np.cumsum(shuffled)
        starts = next_fit(ends, packs.pack_length) if packs.pack_length else np.arange(len(lengths))
        tokens = np.add.reduceat(shuffled, starts)
        order = random_order(len(starts), f"{plan.seed} {epoch} {plan.fingerprint} steps")
        order = order[: len(order) // size * size]
        random.append(_step_means(tokens[order], np.diff(np.append(starts, len(lengths)))[order], size)[0])
    return {
        "sd_of_step_mean_length": float(np.concatenate(means).std()),
        "sd_random_order": float(np.concatenate(random).std()),
        "documents_per_step": float(np.concatenate(counts).mean()),
    }


def _step_means(tokens: np.ndarray, documents: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean document length, and number of documents, of each step of `size` rows."""
    counts = documents.reshape(-1, size).sum(axis=1)
    return tokens.reshape(-1, size).sum(axis=1) / counts, counts


def next_fit(ends: np.ndarray, pack_length: int) -> np.ndarray:
    """First document of each pack if documents are put one after the other into packs.

    ends: int64 [n_documents], cumulative sum of their lengths
    """
    starts, done = [], 0
    while done < len(ends):
        starts.append(done)
        done = int(np.searchsorted(ends, (ends[done - 1] if done else 0) + pack_length, side="right"))
    return np.array(starts, dtype=np.int64)
