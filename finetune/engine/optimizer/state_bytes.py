"""Bytes that training holds for each weight, an optimizer's state among them. Importing this does not import torch."""

from __future__ import annotations

# Tensors of a weight's shape that an optimizer keeps.
STATES = {"adamw_torch": 2, "adamw_torch_fused": 2, "adamw_torch_8bit": 2, "sgd": 0}
# torchao's Adam in 8 bits: a byte per number and a scale per block, for tensors that are worth it
# (torchao/optim/adam.py, `_new_buffer`).
IN_8_BITS = "adamw_torch_8bit"
BLOCK = 256  # numbers
MIN_NUMBERS = 4096  # numbers
_TABLE_BYTES = 4 * 256  # of each tensor: what its codes stand for


def has_codes(numbers: int) -> bool:
    """Whether torchao keeps a state of that many numbers in codes of 8 bits."""
    return numbers >= MIN_NUMBERS and numbers % BLOCK == 0


def bytes_per_number(optimizer: str, each: int, weights: str) -> int:
    """Bytes of a number in a state that is not in codes, of a weight of `each` bytes.

    Args:
        weights: as `training.master_weights`; stochastic rounding keeps the states of torch's AdamW in float32.
    """
    return 4 if weights == "stochastic" and optimizer != IN_8_BITS else each


def optimizer_state_bytes(optimizer: str, numbers: int, each: int) -> int | None:
    """Bytes of a rank's part of a weight, with that many numbers of `each` bytes; None if it is not known."""
    if optimizer not in STATES:
        return None
    in_codes = optimizer == IN_8_BITS and has_codes(numbers)
    return STATES[optimizer] * (numbers + 4 * (numbers // BLOCK) + _TABLE_BYTES if in_codes else numbers * each)


def state_bytes_per_weight(optimizer: str, each: int) -> float:
    """Bytes per number of a large weight that has `each`; as of Adam if it is not known."""
    return STATES.get(optimizer, 2) * (1 + 4 / BLOCK if optimizer == IN_8_BITS else each)


def held_per_weight(each: float, state: float, *, trained: bool = True) -> float:
    """Bytes of a weight of `each` bytes; of a trained one with its gradient and the `state` of the optimizer."""
    return 2 * each + state if trained else each
