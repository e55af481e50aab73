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


def add_term(y: torch.Tensor, term: LowRankTerm | None) -> torch.Tensor:
    """y (n, m) with the term added, as a new tensor; y itself without one."""
    return y if term is None else torch.addmm(y, term.left, term.right, alpha=term.scaling)
