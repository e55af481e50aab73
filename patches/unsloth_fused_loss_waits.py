"""Unsloth's fused loss asks the GPU in each pass which tokens are supervised.

The host, which has the labels too, waits for the answer until the forward pass is computed, and launches the loss and
what follows only then, while the GPU has nothing to do.
Without this: in a step of a small model, whose passes are replayed as CUDA graphs, the GPU idles while each loss is
launched. In large models the wait is hidden.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # patches are imported before torch
    import torch

UPSTREAM = "https://github.com/unslothai/unsloth-zoo/blob/main/unsloth_zoo/fused_losses/fused_linear.py"
REMOVE_WHEN = None  # when the loss takes the positions as an argument

MODULE, ASKS = "unsloth_zoo.fused_losses.fused_linear", "_keep_index"
_known: list[tuple[torch.Tensor, int]] = []  # by the passes that are computed now


@contextlib.contextmanager
def known(positions: torch.Tensor, tokens: int) -> Iterator[None]:
    """Context in which a loss over so many tokens does not ask.

    Args:
        positions: int64 [supervised tokens] on the loss's device, ascending: those that predict a supervised token.
        tokens: of the micro-batch, supervised or not.
    """
    _known.append((positions, tokens))
    try:
        yield
    finally:
        _known.pop()


def _loaded() -> ModuleType | None:
    module = sys.modules.get(MODULE)
    return module if module is not None and hasattr(module, ASKS) else None


def needed() -> bool:
    """Whether it looks for positions that are known."""
    module = _loaded()
    if module is None:
        return False
    import torch

    targets = torch.tensor([-100, 3])
    positions = torch.tensor([1])
    with known(positions, 2):
        try:
            found, count = getattr(module, ASKS)(targets, None, 4, -100)
        except (TypeError, ValueError):  # another release's arguments; without the patch runs are slower, not wrong
            return False
    return count == 1 and found is not positions


def apply() -> None:
    """Take those that are known, of a loss over all tokens."""
    module = _loaded()
    if module is None or not needed():
        return
    ask = getattr(module, ASKS)

    @functools.wraps(ask)
    def positions_of(targets: torch.Tensor, mask: torch.Tensor | None, *further: Any) -> tuple[torch.Tensor, int]:
        if mask is None and _known:
            positions, tokens = _known[-1]
            if targets.numel() == tokens and targets.device == positions.device:
                return positions, len(positions)
        return ask(targets, mask, *further)

    setattr(module, ASKS, positions_of)
