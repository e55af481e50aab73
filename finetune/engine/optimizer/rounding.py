"""Rounding of trained weights to 16 bits: of merged adapters, and of the final model of full fine-tuning.

Rounding to nearest returns the old weight wherever the update is less than half of the distance to the next number, so
it removes much of a short training. Stochastic rounding goes up or down with probabilities that keep the expected value
(Croci et al., Stochastic rounding: implementation, error analysis and applications, 2022), so sums over many weights
keep the update. Measured by `benchmarks.quality.rounding`.
"""

from __future__ import annotations

import zlib

import torch

DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of float32's fraction


def round_stochastically(exact: torch.Tensor, dtype: torch.dtype, name: str, seed: int = 0) -> torch.Tensor:
    """float32 weights in 16 bits. A number that 16 bits can hold stays as it is.

    The random numbers depend on the seed and the tensor's name alone, not on the files, the order of tensors, the
    number of ranks or the device. Float16's subnormal numbers, below 6.1e-5, are rounded to nearest.

    Args:
        exact: a whole tensor.
    """
    bits = DROPPED_BITS[dtype]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    drawn = torch.randint(1 << bits, exact.shape, dtype=torch.int32, generator=generator).to(exact.device)
    found = drawn.add_(exact.contiguous().view(torch.int32)).bitwise_and_(-1 << bits).view(torch.float32)
    return torch.where(exact.isfinite(), found, exact).to(dtype)


def round_to(trained: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Trained weights in the dtype that they are saved in: stochastically if float32 becomes 16 bits."""
    narrows = trained.dtype == torch.float32 and dtype in DROPPED_BITS
    return round_stochastically(trained, dtype, name) if narrows else trained.to(dtype)
