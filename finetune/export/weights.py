"""Reads a model's safetensors files tensor by tensor, and writes new ones the same way: memory holds one tensor.

The format: 8 bytes of header length, a JSON header with the type, shape and offsets of each tensor, then the data.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune.engine.checkpoint import tensor_files
from finetune.engine.preflight import model_files
from finetune.errors import UserError
from finetune.runtime import files
from finetune.runtime.types import JsonObject

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
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
        self._where: dict[str, tuple[Path, JsonObject, int]] = {}  # file, the header's entry, offset of the data
        try:
            names = files.safetensors_names(folder)
        except (OSError, ValueError) as error:
            raise self._wrong(str(error)) from None
        if names is None:
            raise self._wrong("it has no model.safetensors and no index of several files")
        for name in names:
            self._open(folder / name)
        self._states = {name.partition(_STATE)[0]: name for name in self._where if _STATE in name}
        parts = {name for name in self._where for part in _PARTS if part in name and self._owner(name, part)}
        self.entries = {name: self._entry(name) for name in self._where if name not in parts}

    @property
    def quantized(self) -> bool:
        """Whether any weight is stored in 4 bits."""
        return bool(self._states)

    def get(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU. A 4-bit weight is dequantized to the dtype that training saw."""
        found = self._read(name)
        if name not in self._states:
            return found
        from bitsandbytes.functional import QuantState, dequantize_4bit

        parts = {part[len(name) + 1 :]: self._read(part) for part in self._where if part.startswith(f"{name}.")}
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
        return dequantize_4bit(found, state).reshape(self.entries[name].shape)

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise self._wrong(f"{path.name} is missing")
        if why := model_files.why_damaged(path):
            raise self._wrong(f"{path.name} is damaged ({why})")
        with files.open_regular(path) as file:
            header, start = files.safetensors_header(file)
        self._where |= {name: (path, one, start) for name, one in header.items()}

    def _read(self, name: str) -> torch.Tensor:
        """A stored tensor. It is read, not mapped, so that no other part of the file stays in memory."""
        path, stored, start = self._where[name]
        entry, (begin, end) = self._stored(name), stored["data_offsets"]
        content = torch.empty(entry.bytes, dtype=torch.uint8)
        view = content.numpy().data
        with files.open_regular(path) as file:
            file.seek(start + begin)
            while len(view) and (count := file.readinto(view)):
                view = view[count:]
        if len(view) or end - begin != entry.bytes:
            raise self._wrong(f"{path.name} does not hold {name}")
        return content.view(entry.dtype).reshape(entry.shape)

    def _stored(self, name: str) -> Entry:
        stored = self._where[name][1]
        try:
            found = Entry(name, DTYPES[stored["dtype"]], tuple(stored["shape"]))
            if all(type(size) is int and size >= 0 for size in found.shape):
                return found
        except (LookupError, TypeError):
            pass
        raise self._wrong(f"{name} is stored as {stored.get('dtype')}, which cannot be merged")

    def _owner(self, name: str, part: str) -> bool:
        return name.partition(part)[0] in self._states

    def _entry(self, name: str) -> Entry:
        if name in self._states:
            state = json.loads(bytes(self._read(self._states[name]).tolist()))
            return Entry(name, getattr(torch, state["dtype"]), tuple(state["shape"]))
        return self._stored(name)

    def _wrong(self, why: str) -> UserError:
        return UserError(f"The {self.what} in {self.folder} cannot be read: {why}. Copy or download it again.")


def write(folder: Path, entries: Sequence[Entry], get: Callable[[str], torch.Tensor], most: int) -> None:
    """Write tensors into safetensors files of at most `most` bytes, with an index if there are several. `get` is called
    once for each, in order."""
    sizes = {entry.name: entry.bytes for entry in entries}
    planned = tensor_files.plan_files(sizes, most)
    rest = iter(entries)
    for name, group in zip(tensor_files.file_names("model", len(planned)), planned, strict=True):
        _write_file(folder / name, list(itertools.islice(rest, len(group))), get)
    tensor_files.write_index(folder, "model", planned, sizes)


def _write_file(path: Path, entries: Sequence[Entry], get: Callable[[str], torch.Tensor]) -> None:
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.bytes
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            tensor = get(entry.name)
            if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
                raise AssertionError(f"{entry}: got {tensor.dtype} {tuple(tensor.shape)}")
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
