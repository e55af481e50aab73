"""What an adapter adds to the product of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LowRankTerm:
    """scaling * left (n, rank) @ right (rank, m)."""

    left: torch.Tensor
    right: torch.Tensor
    scaling: float = 1.0


def add_term(y: torch.Tensor, term: LowRankTerm | None, dtype: torch.dtype) -> torch.Tensor:
    """y (n, m) with the term added in the precision of y or `dtype`, whichever is higher, as `dtype`."""
    if term is None:
        return y.to(dtype)
    if y.is_cuda:
        from finetune.engine.kernels import triton_kernels

        return triton_kernels.add_term(y, term, dtype)
    precise = torch.promote_types(y.dtype, dtype)
    left, right = term.left.to(precise), term.right.to(precise)
    return torch.addmm(y.to(precise), left, right, alpha=term.scaling).to(dtype)
