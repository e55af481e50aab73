"""Unsloth's fused loss asks the GPU in each pass which tokens are supervised, and sends it the documents' lengths.

The host waits for both until the forward pass is computed, and launches the loss and what follows only then, while the
GPU has nothing to do. It has the labels itself, and those of packs leave out already what the lengths would mask.
Without this: in a step of a small model, whose passes are replayed as CUDA graphs, the GPU idles while each loss is
launched. Of steps of Qwen2.5-Coder-1.5B that are launched, the host spent 9 % sending lengths (one H200).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # patches are imported before torch
    import torch

UPSTREAM = "https://github.com/unslothai/unsloth-zoo/blob/main/unsloth_zoo/fused_losses/fused_linear.py"
REMOVE_WHEN = None  # when the loss takes the positions as an argument

MODULE, ASKS = "unsloth_zoo.fused_losses.fused_linear", "_keep_index"
PACKING, SENDS = "unsloth.utils.packing", "_normalize_packed_lengths"
_known: list[tuple[torch.Tensor, int]] = []  # by the passes that are computed now


@contextlib.contextmanager
def known(positions: torch.Tensor, tokens: int) -> Iterator[None]:
    """Context in which a loss over so many tokens does not ask, and lengths are not sent.

    Args:
        positions: int64 [supervised tokens] on the loss's device, ascending: those that predict a supervised token.
        tokens: of the micro-batch, supervised or not.
    """
    _known.append((positions, tokens))
    try:
        yield
    finally:
        _known.pop()


def _function(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def needed() -> bool:
    """Whether it looks for positions that are known, or sends lengths."""
    return _asks() or _sends()


def _asks() -> bool:
    if (ask := _function(MODULE, ASKS)) is None:
        return False
    import torch

    targets, positions = torch.tensor([-100, 3]), torch.tensor([1])
    with known(positions, 2):
        try:
            found, count = ask(targets, None, 4, -100)
        except (TypeError, ValueError):  # another release's arguments; without the patch runs are slower, not wrong
            return False
    return count == 1 and found is not positions


def _sends() -> bool:
    if (send := _function(PACKING, SENDS)) is None:
        return False
    import torch

    with known(torch.tensor([1]), 2):
        try:
            return send(torch.tensor([2]), device=torch.device("cpu")) is not None
        except TypeError:
            return False


def apply() -> None:
    """Take the positions that are known, of a loss over all tokens, and send no lengths to it."""
    ask, send = _function(MODULE, ASKS), _function(PACKING, SENDS)

    def positions_of(targets: torch.Tensor, mask: torch.Tensor | None, *further: Any) -> tuple[torch.Tensor, int]:
        if mask is None and _known:
            positions, tokens = _known[-1]
            if targets.numel() == tokens and targets.device == positions.device:
                return positions, len(positions)
        return ask(targets, mask, *further)

    def lengths_on(lengths: Any, **where: Any) -> Any:
        return None if _known else send(lengths, **where)

    if _asks():
        setattr(sys.modules[MODULE], ASKS, functools.wraps(ask)(positions_of))
    if _sends():
        setattr(sys.modules[PACKING], SENDS, functools.wraps(send)(lengths_on))
