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


def pitch(columns: int) -> int:
    """The elements from one row to the next of a matrix of so many columns."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


def aligned(rows: int, columns: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized matrix (rows, columns) with aligned rows."""
    return torch.empty(rows, pitch(columns), dtype=dtype, device=like.device)[:, :columns]
