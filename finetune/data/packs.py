"""Group documents into training rows: packs of whole documents or, without packing, one document per row."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

MULTIPLE = 8  # padded widths are multiples of this: tensor cores work on tiles of at least 8 bf16 values
MAX_PADDING_SEGMENT = 256  # tokens; padding is split into segments about as long as real documents
OPEN_PACKS = 4096  # with more, packs of two documents are fuller, and packing is slower
SORTED_PAIRS = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Packs:
    """The documents of each row. Row i holds `documents[offsets[i]:offsets[i + 1]]`, in that order.

    documents:   int64 [n_documents], document indices grouped by row, each exactly once
    offsets:     int64 [n_rows + 1]
    tokens:      int64 [n_rows], sum of the row's document lengths (padding not counted)
    squares:     int64 [n_rows], sum of the squares of the row's document lengths
    pack_length: tokens per row including padding; None if every document is its own row
    """

    documents: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray
    squares: np.ndarray
    pack_length: int | None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Document indices of one row, int64."""
        row = range(len(self))[row]  # IndexError if out of range; negative indices count from the end
        return self.documents[self.offsets[row] : self.offsets[row + 1]]

    def totals(self, values: np.ndarray) -> np.ndarray:
        """Sum a per-document value (such as label tokens) over each row: [n_documents] -> [n_rows]."""
        return _row_sums(values[self.documents], self.offsets)

    def costs(self, hidden_size: int) -> np.ndarray:
        """Compute cost of each row in units of one token's linear layers, float64 [n_rows]: tokens + squares / (12 d).

        Forward FLOPs of a layer of width d are 2 * 12 d^2 per token, plus 2 n d per token for causal attention in a
        document of n tokens (Kaplan et al. 2020, arXiv 2001.08361, table 1), so attention adds n^2 / (12 d) tokens to
        a document. Each padding segment of a pack costs as much as a document of its length.
        """
        padding = self.pack_length - self.tokens if self.pack_length else np.zeros_like(self.tokens)
        sizes, size_of_row = np.unique(padding, return_inverse=True)
        squares = np.array([sum(n * n for n in padding_segments(size)) for size in sizes.tolist()], dtype=np.int64)
        return (self.tokens + padding) + (self.squares + squares[size_of_row]) / (12 * hidden_size)

    def segments(self, rows: int) -> tuple[int, int]:
        """Fewest and most documents in that many packs, with the segments of padding; packs of padding alone, which
        fill up the plan's last step, included."""
        assert self.pack_length is not None
        sizes, size_of_row = np.unique(self.pack_length - self.tokens, return_inverse=True)
        padding = np.array([len(padding_segments(size)) for size in sizes.tolist()], dtype=np.int64)
        counts = np.sort(np.diff(self.offsets) + padding[size_of_row])
        dummy = len(padding_segments(self.pack_length))
        fewest, most = min(dummy, int(counts[0])), max(dummy, int(counts[-1]))
        return rows * fewest, rows * most + 1  # collate's `uneven` may append one

    @property
    def efficiency(self) -> float:
        """Share of positions that are not padding; 1.0 without packing, when padding depends on the batch."""
        if self.pack_length is None or not len(self):
            return 1.0
        return float(self.tokens.sum() / (len(self) * self.pack_length))


def padding_segments(tokens: int) -> list[int]:
    """Lengths of the segments that pad a pack by `tokens` tokens. A dummy row consists of padding only.

    A single segment would cost as much as a document of that length, quadratic in attention, and if all segments have
    the same length, Unsloth 2026.10.9 selects another attention path (`_torch_varlen_beats_segments`). On H200s, ranks
    with a dummy row of 16,384 tokens needed 0.8 GiB more than ranks without one. So segments are short and not all
    equally long.
    """
    first = min(tokens, MAX_PADDING_SEGMENT - 1)
    full, rest = divmod(tokens - first, MAX_PADDING_SEGMENT)
    return [size for size in (first, *[MAX_PADDING_SEGMENT] * full, rest) if size]


def pack(lengths: np.ndarray, pack_length: int, key: str) -> Packs:
    """Pack the documents in a random order, each into the fullest of at most OPEN_PACKS packs that has room for it.

    A pack is thus nearly a random sample of the documents. Packs made of the longest documents first, as in best-fit
    decreasing, are fuller by up to 1.5 points, and each holds documents of one length. Steps of packs of one length
    cost 1.4 % of held-out loss on GSM8K (docs/learning.md).

    Within each block of about as many documents as a pack holds, the longest comes first, which leaves the short ones
    to fill gaps. If fewer than two documents fit a pack on average, the blocks have SORTED_PAIRS documents: in any
    order, their lengths decide which of them can share a pack, and sorted ones fill the packs better.

    The result depends only on the arguments.

    lengths: int [n_documents], tokens per document, each at least 1. ValueError if one is above pack_length.
    key:     selects the order, the same on every rank and machine
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and lengths.max() > pack_length:
        longest = int(lengths.argmax())
        raise ValueError(
            f"document {longest} has {lengths[longest]} tokens and a pack holds {pack_length}; "
            "drop, truncate or split longer documents before packing"
        )
    order = random_order(len(lengths), key)
    documents_per_pack = int(pack_length * len(lengths) // max(lengths.sum(), 1))
    block = SORTED_PAIRS if documents_per_pack < 2 else documents_per_pack
    order = order[np.lexsort((-lengths[order], np.arange(len(order)) // block))]

    open_packs: list[tuple[int, int]] = []  # (room left, pack), sorted
    placed: list[int] = []  # the pack of each document, in `order`
    n_packs = 0
    for length in lengths[order].tolist():
        best = bisect_left(open_packs, (length, 0))
        if best < len(open_packs):
            room, chosen = open_packs.pop(best)
        else:
            if len(open_packs) == OPEN_PACKS:
                del open_packs[0]
            room, chosen = pack_length, n_packs
            n_packs += 1
        placed.append(chosen)
        if room > length:
            insort(open_packs, (room - length, chosen))
    pack_of = np.array(placed, dtype=np.int64)
    documents = order[np.argsort(pack_of, kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(pack_of, minlength=n_packs))])
    return _packs(lengths, documents, offsets, pack_length)


def random_order(count: int, key: str) -> np.ndarray:
    """A permutation of `count` indices, int64, from a counter-based generator keyed by `key`."""
    digest = hashlib.sha256(key.encode()).digest()[:16]
    # Sorted raw draws instead of Generator.permutation: NEP 19 guarantees the same numbers across numpy releases only
    # for the raw stream, and a run may be resumed with a different release.
    draws = np.random.Philox(key=int.from_bytes(digest, "little"))
    return np.argsort(draws.random_raw(count), kind="stable")


def one_per_row(lengths: np.ndarray) -> Packs:
    """One row per document, in the order given. lengths: int [n_documents], each at least 1."""
    lengths = np.asarray(lengths, dtype=np.int64)
    return _packs(lengths, np.arange(len(lengths)), np.arange(len(lengths) + 1), None)


def _packs(lengths: np.ndarray, documents: np.ndarray, offsets: np.ndarray, pack_length: int | None) -> Packs:
    grouped = lengths[documents]
    return Packs(
        documents=documents.astype(np.int64),
        offsets=offsets.astype(np.int64),
        tokens=_row_sums(grouped, offsets),
        squares=_row_sums(grouped**2, offsets),
        pack_length=pack_length,
    )


def _row_sums(grouped: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    return np.add.reduceat(grouped, offsets[:-1]) if len(grouped) else grouped[:0]
