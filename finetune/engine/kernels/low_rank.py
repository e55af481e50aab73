"""What an adapter adds to the product of a layer, and matrices with room beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGNMENT = 64  # elements of a row: kernels of cuBLAS that load by TMA want rows that begin at 128 bytes


@dataclass(frozen=True)
class LowRankTerm:
    """scaling * left (n, rank) @ right (rank, m)."""

    left: torch.Tensor
    right: torch.Tensor
    scaling: float = 1.0

    def added_to(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """y (n, m) and this, summed in float32 or more, as `dtype`."""
        precise = torch.promote_types(torch.promote_types(y.dtype, dtype), torch.float32)
        y, left, right = (one.to(precise) for one in (y, self.left, self.right))
        with torch.autocast(y.device.type, enabled=False):  # which would round them to 16 bits again
            return torch.addmm(y, left, right, alpha=self.scaling).to(dtype)


def aligned(rows: int, columns: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix (rows, columns) with aligned rows, for the caller to write."""
    pitch = -(-columns // ALIGNMENT) * ALIGNMENT
    # oneDNN's kernels for AMX multiply what lies behind a row by 0, which of an uninitialized NaN is NaN.
    empty = torch.zeros if like.device.type == "cpu" else torch.empty
    return empty(rows, pitch, dtype=dtype, device=like.device)[:, :columns]
