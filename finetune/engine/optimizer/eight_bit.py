"""Adam's states in 8 bits (`training.optim: adamw_torch_8bit`, torchao's AdamW8bit): in parts, and in files.

A state is a code of one byte per number, and a scale per block of 256 numbers. Each rank has the blocks of its own
part. A part of fewer than 4,096 numbers, or not of whole blocks, keeps its states in the weight's type, so ranks may
differ in that.

In the files of a sharded checkpoint, states are codes and scales if the blocks of all ranks are blocks of whole rows,
which is so for the matrices of most models; else they are numbers in float32. Both lose nothing, and fit any number of
ranks: codes are made again if the blocks are others there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from finetune.engine.optimizer.state_bytes import BLOCK, has_codes

_SIGNED = "exp_avg"
CODES, SCALES = "codes", "scales"


def is_used(optimizer: object) -> bool:
    """Whether this is torchao's AdamW8bit, inside accelerate's wrapper if there is one."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__ == "AdamW8bit"


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor on this rank, whatever it is made of."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if _is_in_codes(local):
        return local.codes.nbytes + local.scale.nbytes + local.qmap.nbytes
    return local.nbytes


# --- codes and numbers ------------------------------------------------------------------------------------------------


def encode(state: torch.Tensor, name: str) -> torch.Tensor:
    """A rank's part of a state as torchao keeps a part of that size: in codes, or as numbers.

    What once was in codes of the same blocks becomes the same codes. torchao's own function would not do: the table of
    signed codes ends at -0.993, so a block whose largest number is negative would shrink each time.

    Args:
        state: codes, or numbers.
        name: of the state, such as "exp_avg".
    """
    if not has_codes(state.numel()):
        return decode(state)
    if _is_in_codes(state):
        return state
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    made = _zeros(state.shape, name, state.device)
    blocks = state.float().view(-1, BLOCK)
    largest = blocks.abs().amax(1).clip(1e-12)
    scale = torch.where(blocks.amin(1) == -largest, largest / -made.qmap[0], largest)
    made.codes.copy_(quantize_8bit_with_qmap(blocks / scale[:, None], made.qmap).view(state.shape))
    made.scale.copy_(scale)
    return made


def decode(state: torch.Tensor) -> torch.Tensor:
    """The numbers of a state in codes, in float32; other tensors as they are."""
    return state.dequantize() if _is_in_codes(state) else state  # type: ignore[operator]


def slice_rows(state: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Rows of a whole state: its codes if they are whole blocks, else numbers."""
    row = math.prod(state.shape[1:])
    if not _is_in_codes(state) or row % BLOCK:
        return decode(state)[first:end]
    whole: Any = state
    scale = whole.scale[first * row // BLOCK : end * row // BLOCK]
    return type(whole)(whole.codes[first:end], scale, whole.qmap, whole.signed)


def from_codes(codes: torch.Tensor, scales: torch.Tensor, name: str) -> torch.Tensor:
    """A state of these codes and scales."""
    made = _zeros(codes.shape, name, codes.device)
    made.codes.copy_(codes)
    made.scale.copy_(scales.flatten())
    return made


def _zeros(shape: Sequence[int], name: str, device: torch.device) -> Any:
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit.zeros(shape, name == _SIGNED, BLOCK, device)


def _is_in_codes(state: torch.Tensor) -> bool:
    return hasattr(state, "codes")


# --- files ------------------------------------------------------------------------------------------------------------


def to_files(key: str, state: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a checkpoint has of a state, by name. Only its shape decides how, so that all ranks agree.

    Args:
        key: of the state, such as "3.exp_avg".
    """
    if not isinstance(state, DTensor) or not state.dim():
        return {key: decode(state)}
    local: Any = state.to_local()
    row = math.prod(state.shape[1:])
    each = math.ceil(state.shape[0] / state.device_mesh.size())  # rows of a rank; the last one that has any has fewer
    kinds = {has_codes(min(each, state.shape[0] - first) * row) for first in range(0, state.shape[0], each)}
    if kinds == {False}:
        return {key: state}
    if kinds == {True} and row % BLOCK == 0:
        empty = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)  # of a rank without rows
        codes, scales = (local.codes, local.scale) if local.numel() else (empty, empty.float())
        scales = scales.view(local.shape[0], row // BLOCK)
        return {f"{key}.{CODES}": _to_dtensor(codes, state), f"{key}.{SCALES}": _to_dtensor(scales, state)}
    return {key: _to_dtensor(decode(local).float(), state)}


def _to_dtensor(local: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's rows as a DTensor of as many rows as `like`."""
    shape = torch.Size((like.shape[0], *local.shape[1:]))
    stride = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    return DTensor.from_local(local, like.device_mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
