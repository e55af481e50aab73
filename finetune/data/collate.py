"""Documents of one micro-batch -> tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

MULTIPLE = 8  # widths of 8: matrix units work on tiles of 8 bf16 values or more


def collate(rows: Sequence[tuple[np.ndarray, np.ndarray] | None], *, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad documents to the longest of them.

    Args:
        rows: (input_ids, labels), int32 [length] each; None is a dummy row, which is nothing but padding.

    Returns:
        input_ids, attention_mask and labels, int64 [len(rows), width]; labels are -100 where nothing is learnt.
    """
    width = max((len(row[0]) for row in rows if row is not None), default=1)
    width = -(-width // MULTIPLE) * MULTIPLE
    input_ids = np.full((len(rows), width), pad_token_id, dtype=np.int64)
    labels = np.full((len(rows), width), -100, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    for place, row in enumerate(rows):
        length = 0 if row is None else len(row[0])
        if row is not None:
            input_ids[place, :length], labels[place, :length] = row
        mask[place, : max(length, 1)] = 1  # a row without any visible token has no softmax to compute
    return {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(mask),
        "labels": torch.from_numpy(labels),
    }
