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


def aligned(rows: int, columns: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized matrix (rows, columns) with aligned rows."""
    pitch = -(-columns // ALIGNMENT) * ALIGNMENT
    return torch.empty(rows, pitch, dtype=dtype, device=like.device)[:, :columns]
