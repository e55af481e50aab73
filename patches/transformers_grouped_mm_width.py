"""transformers computes experts of any width with torch's grouped products, which take rows of whole 16 bytes.

`_can_use_grouped_mm` looks at the device, the dtype and the versions, but not at the sizes; beside it transformers has
products for each expert, which take any.
Without this: `RuntimeError: strides should be multiple of 16 bytes` in the first step of a mixture of experts whose
width is not a multiple of 8 numbers in 16 bits, or of 4 in 32 bits.
"""

import functools
from typing import Any

UPSTREAM = "https://github.com/huggingface/transformers/issues/48644"
REMOVE_WHEN = None  # when a release looks at the sizes; 5.17 does not

FUNCTION = "_can_use_grouped_mm"
BYTES = 16


def _module() -> Any:
    from transformers.integrations import moe

    return moe if hasattr(moe, FUNCTION) else None


def needed() -> bool:
    """Whether experts of 3 x 3 numbers would go to the grouped products."""
    import torch

    module = _module()
    if module is None:
        return False
    ends = torch.tensor([1], dtype=torch.int32)
    return bool(getattr(module, FUNCTION)(torch.zeros(1, 3), torch.zeros(1, 3, 3), ends))


def apply() -> None:
    """Compute experts of such widths one by one."""
    module = _module()
    if module is None or not needed():
        return
    original = getattr(module, FUNCTION)

    @functools.wraps(original)
    def can_use(input: Any, weight: Any, offs: Any) -> bool:
        whole = all(size * weight.element_size() % BYTES == 0 for size in weight.shape[-2:])
        return whole and original(input, weight, offs)

    setattr(module, FUNCTION, can_use)
