"""The backward of Unsloth's fused cross entropy assumes an incoming gradient of 1.

The loss of a rank carries the factor world size, which the mean that DDP takes over the ranks' gradients removes again.
A backward that drops the factor leaves the mean alone. Older releases of unsloth_zoo only; a separate
defect from the loss that is a view: copying that loss removes the error but not the wrong gradients.
Without this: gradients of 1/world_size under DDP, while the logged loss is right. Adam hides it; gradient clipping, the
logged gradient norm, weight decay and SGD do not.
"""

import functools

from patches.unsloth_fused_loss_view import fused_loss, small_loss

UPSTREAM = "https://github.com/unslothai/unsloth-zoo/pull/434"
REMOVE_WHEN = "unsloth_zoo>=2026.5.1"


def needed() -> bool:
    """Whether twice the loss does not have twice the gradient; a gradient of zero or NaN counts as a defect."""
    module = fused_loss()
    if module is None:
        return False
    import torch

    def gradient(factor: int) -> torch.Tensor:
        loss, *inputs = small_loss(module)
        return torch.cat([part.flatten() for part in torch.autograd.grad(factor * loss, inputs)])

    with torch.enable_grad():
        ratio = gradient(2).norm() / gradient(1).norm()
    return not abs(float(ratio) - 2) < 1e-3


def apply() -> None:
    """Ask for the gradients at the incoming gradient that the backward assumes, and scale them by the actual one.

    It assumes 1, or the factor of the fp16 gradient scaler, which its saved gradients then hold already.
    """
    module = fused_loss()
    if module is None or not needed():
        return
    import torch

    original = module.UnslothFusedLoss.backward

    @functools.wraps(original)
    def backward(ctx, grad_output):
        assumed = 1.0 if ctx.scaling is None else ctx.scaling
        gradients = original(ctx, torch.full_like(grad_output, assumed))
        factor = grad_output / assumed
        # Not in place: the gradients are saved tensors, and a retained graph is traversed again.
        return tuple(None if part is None else part * factor for part in gradients)

    module.UnslothFusedLoss.backward = staticmethod(backward)
