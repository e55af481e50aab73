"""The backward pass of Unsloth's fused cross entropy ignores the incoming gradient and assumes it is 1.

Each rank multiplies its loss by the world size, to cancel the division when DDP averages gradients over ranks. A
backward pass that ignores the factor leaves the division. Affects older releases of unsloth_zoo only. Separate from
the defect that the loss is a view: copying the loss fixes that error but not the wrong gradients.
Without this: gradients under DDP are 1/world_size of the correct ones, while the logged loss is right. Adam hides it;
gradient clipping, the logged gradient norm, weight decay and SGD do not.
"""

import functools

from patches.unsloth_fused_loss_view import fused_loss, small_loss

UPSTREAM = "https://github.com/unslothai/unsloth-zoo/pull/434"
REMOVE_WHEN = "unsloth_zoo>=2026.5.1"


def needed() -> bool:
    """Whether doubling the loss fails to double the gradient; a gradient of zero or NaN counts as a defect."""
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
    """Pass the incoming gradient that the original backward pass assumes, and scale its result by the actual one.

    It assumes 1, or the scale of the fp16 gradient scaler, which its saved gradients then already contain.
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
