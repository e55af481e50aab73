"""Unsloth's fused cross entropy returns its loss as a view, which autograd does not allow to be modified in place.

transformers' `Trainer.compute_loss` multiplies the loss by the number of processes in place, so training on more than
one rank fails in its first step. Affects older releases of unsloth_zoo only; the CPU backend does not load this loss.
Without this: "Output 0 of UnslothFusedLossBackward is a view and is being modified inplace" under `loss *= world_size`.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # patches are imported before torch
    import torch

UPSTREAM = "https://github.com/unslothai/unsloth/issues/3452"
REMOVE_WHEN = "unsloth_zoo>=2026.10.1"

MODULE = "unsloth_zoo.fused_losses.cross_entropy_loss"


def fused_loss() -> ModuleType | None:
    """The module of the fused loss; None if `import unsloth` has not loaded it, so nothing can call it."""
    return sys.modules.get(MODULE)


def small_loss(module: ModuleType) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training's fused loss on 24 fixed tokens: (loss [], hidden [2, 12, 16], head [64, 16]).

    Runs on the training device, through the code path that the installed release and its environment variables select,
    but without torch.compile, which takes up to half a minute.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.linspace(-1, 1, 2 * 12 * 16, device=device).reshape(2, 12, 16).requires_grad_()
    head = torch.linspace(-9, 9, 64 * 16, device=device).sin().reshape(64, 16).requires_grad_()
    labels = torch.arange(2 * 12, device=device).reshape(2, 12)
    with torch.compiler.set_stance("force_eager"):
        loss = module.unsloth_fused_ce_loss(
            trainer=None,
            hidden_states=hidden,
            lm_head_weight=head,
            lm_head_bias=None,
            labels=labels,
            torch_compile=False,
        )
    return loss, hidden, head


def needed() -> bool:
    """Whether multiplying the loss in place fails because it is a view."""
    module = fused_loss()
    if module is None:
        return False
    import torch

    with torch.enable_grad():
        loss, _, _ = small_loss(module)
        try:
            loss *= 2
        except RuntimeError as error:
            if "is a view" not in str(error):
                raise
            return True
    return False


def apply() -> None:
    """Return a copy of the loss, a scalar, from the autograd function itself, so that every caller gets it."""
    module = fused_loss()
    if module is None or not needed():
        return
    original = module.UnslothFusedLoss.forward

    @functools.wraps(original)  # Unsloth reads argument names and defaults from the signature
    def forward(*args, **kwargs):
        return original(*args, **kwargs).clone()

    module.UnslothFusedLoss.forward = staticmethod(forward)
