"""torchao 0.17 and later give 8-bit optimizer states the type of their weight, but `view` forgets it.

`DTensor.from_local` makes a view, so the state of a sharded weight is float32 to its operators and bfloat16 to the
propagation of shapes.
Without this: the first step of `adamw_torch_8bit` on a sharded model in bfloat16 ends with "expected dtype
torch.bfloat16 for `end`, but got dtype torch.float32".
"""

import importlib.util

UPSTREAM = "https://github.com/pytorch/ao/issues/3314"
REMOVE_WHEN = None  # unreleased: present in torchao 0.18


def _state():
    """The class of the states; None if torchao is not installed or cannot be imported."""
    if importlib.util.find_spec("torchao") is None:
        return None
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError:
        return None
    return OptimState8bit


def needed() -> bool:
    """Whether a view of a state has another type than the state."""
    import torch

    kind = _state()
    if kind is None:
        return False
    state = kind.zeros((256,), True, 256, torch.device("cpu")).to(torch.bfloat16)
    return state.view(256).dtype != state.dtype


def apply() -> None:
    """Keep the type."""
    import torch

    kind = _state()
    if kind is None or not needed():
        return

    @kind.implements(torch.ops.aten.view.default)
    def view(func, types, args, kwargs):
        state, shape = args
        return kind(state.codes.view(shape), state.scale, state.qmap, state.signed, dtype=state.dtype)
