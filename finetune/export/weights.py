"""Reads a model's safetensors files tensor by tensor, and writes new ones, of which memory holds one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune.engine.checkpoint import tensor_files
from finetune.engine.checkpoint.tensor_files import TensorFiles
from finetune.engine.preflight import model_files
from finetune.errors import UserError
from finetune.runtime import files

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_STATE = ".quant_state.bitsandbytes__"  # the tensor that describes a 4-bit weight, in bitsandbytes' checkpoints
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _STATE)


@dataclass(frozen=True)
class Entry:
    """What is known of a tensor without reading it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Weights:
    """The tensors of a model folder. 4-bit weights of bitsandbytes appear as 16-bit tensors, dequantized when read.

    Raises:
        UserError: the folder has no safetensors weights, they are damaged, or in a format that cannot be read here.
    """

    def __init__(self, folder: Path, what: str = "base model") -> None:
        self.folder, self.what = folder, what
        try:
            names = files.safetensors_names(folder)
        except (OSError, ValueError) as error:
            raise self._wrong(str(error)) from None
        if names is None:
            raise self._wrong("it has no model.safetensors and no index of several files")
        for name in names:
            if not (folder / name).is_file():
                raise self._wrong(f"{name} is missing")
            if why := model_files.why_damaged(folder / name):
                raise self._wrong(f"{name} is damaged ({why})")
        self._files = TensorFiles(folder, "model")
        stored = list(self._files.keys())
        self._states = {name.partition(_STATE)[0]: name for name in stored if _STATE in name}
        parts = {name for name in stored for part in _PARTS if part in name and name.partition(part)[0] in self._states}
        self.entries = {name: self._entry(name) for name in stored if name not in parts}

    def get(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU. A 4-bit weight is dequantized to the dtype that training saw."""
        found = self._files.read_full(name)
        if name not in self._states:
            return found
        from bitsandbytes.functional import QuantState, dequantize_4bit

        parts = {
            part[len(name) + 1 :]: self._files.read_full(part)
            for part in self._files.keys()
            if part.startswith(f"{name}.")
        }
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
        return dequantize_4bit(found, state).reshape(self.entries[name].shape)

    def _entry(self, name: str) -> Entry:
        if name in self._states:
            state = json.loads(bytes(self._files.read_full(self._states[name]).tolist()))
            return Entry(name, getattr(torch, state["dtype"]), tuple(state["shape"]))
        dtype = self._files.dtype(name)
        if dtype not in DTYPES:
            raise self._wrong(f"{name} is stored as {dtype}, which cannot be merged")
        return Entry(name, DTYPES[dtype], self._files.shape(name))

    def _wrong(self, why: str) -> UserError:
        return UserError(f"The {self.what} in {self.folder} cannot be read: {why}. Copy or download it again.")


def write(folder: Path, entries: Sequence[Entry], get: Callable[[str], torch.Tensor], most: int) -> None:
    """Write tensors into safetensors files of at most `most` bytes, with an index if there are several. `get` is called
    once for each, in order."""
    sizes = {entry.name: entry.bytes for entry in entries}
    planned = tensor_files.plan_files(sizes, most)
    for file, names in zip(tensor_files.file_names("model", len(planned)), planned, strict=True):
        tensor_files.save({name: get(name).contiguous() for name in names}, folder / file)
    tensor_files.write_index(folder, "model", planned, sizes)
