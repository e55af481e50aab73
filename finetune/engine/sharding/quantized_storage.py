"""4-bit weights of bitsandbytes in a form that FSDP2 can shard: the same bytes, stored as float32.

bitsandbytes' default is uint8, which accelerate leaves whole on every rank. bfloat16 and float16, which some guides
recommend, need not be exact: an all-gather of one 16-bit type copies through kernels that may rewrite bit patterns of
NaN on CUDA. No cast may be asked of these parameters, so `param_dtype` is unset.

The scales of the blocks, about 3 % of the bytes, stay whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from finetune.runtime.types import Model


def store_as_float32(model: Model, device: torch.device) -> int:
    """Store the 4-bit weights of `model` as float32, in place, and their scales on `device`. Returns their number.

    bitsandbytes finds a weight's state on its module once FSDP2 has replaced the parameter
    (`fix_4bit_weight_quant_state_from_module`).
    """
    found = 0
    for module in model.modules():
        weight = module._parameters.get("weight")
        if type(weight).__name__ != "Params4bit":
            continue
        packed: Any = weight
        content = packed.data.contiguous().view(torch.uint8).flatten()
        state = packed.quant_state
        state.to(device)
        module.quant_state = state  # type: ignore[assignment]
        module.quant_storage = torch.float32  # type: ignore[assignment]
        module.weight = nn.Parameter(content.view(torch.float32).view(-1, 1), requires_grad=False)
        found += 1
    return found


def restore_quant_states(model: Model) -> None:
    """Give each sharded 4-bit parameter its state again, by which its size is counted."""
    for module in model.modules():
        state, weight = getattr(module, "quant_state", None), module._parameters.get("weight")
        if state is not None and weight is not None:
            weight.quant_state = state  # type: ignore[attr-defined]
