"""Whole tensors in safetensors files, written by all ranks together and read in parts.

A tensor that is sharded is gathered for the file, one at a time, so the files do not depend on the number of ranks: a
checkpoint of a sharded run is read like any other. Files have the names of transformers: `STEM.safetensors`, or
`STEM-00001-of-00004.safetensors` and so on with `STEM.safetensors.index.json`. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Replicate, Shard

from finetune.engine.optimizer import eight_bit, rounding
from finetune.errors import RunError
from finetune.runtime import files
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject

FILE_BYTES = 2 * 2**30  # of one file, unless a single tensor is larger: what a rank keeps on its host while it writes
ONE_FILE_BYTES = 256 * 2**20  # below this, more files than needed would only be clutter


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    stem: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    file_bytes: int | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Write `tensors` into `folder`. Every rank calls it with the same names; each writes some of the files, which are
    flushed to the disk, and waits until all are written.

    Args:
        stem: the files' name without `.safetensors`.
        tensors: DTensors are gathered one after the other. A plain tensor is the same on all ranks.
        file_bytes: of one file at most. By default each rank gets files, unless there is little to write.
        dtypes: that whole tensors are rounded to, as `rounding` does; without it they stay as they are.
    """
    me = distributed.ranks()
    dtypes = dtypes or {name: tensor.dtype for name, tensor in tensors.items()}
    sizes = {name: tensor.numel() * dtypes[name].itemsize for name, tensor in tensors.items()}
    total = sum(sizes.values())
    each = FILE_BYTES if total <= ONE_FILE_BYTES else min(FILE_BYTES, math.ceil(total / me.world_size))
    planned = plan_files(sizes, file_bytes or each)
    names = file_names(stem, len(planned))
    for first in range(0, len(planned), me.world_size):  # one file per rank at a time
        wave = planned[first : first + me.world_size]
        kept: dict[str, torch.Tensor] = {}
        for writer, keys in enumerate(wave):
            for key in keys:
                tensor = tensors[key].detach()
                tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if writer == me.rank:
                    kept[key] = rounding.round_to(tensor.to("cpu"), dtypes[key], key).contiguous()
                del tensor
        if kept:
            path = folder / names[first + me.rank]
            save(kept, path)
            files.sync_file(path)
        distributed.barrier()  # of the host, where a rank with a slow disk is waited for; the next gather has a timeout
    if me.is_main:
        write_index(folder, stem, planned, sizes)


def write_index(folder: Path, stem: str, planned: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> None:
    """Write the index of files, if there are several.

    Args:
        planned: as `plan_files` returns it for these `sizes`.
    """
    if len(planned) > 1:
        names = file_names(stem, len(planned))
        where = {key: name for name, keys in zip(names, planned, strict=True) for key in keys}
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        files.write_json(folder / f"{stem}.safetensors.index.json", content)


def plan_files(sizes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    """The names in each file, in order; at least one file, and no file above `file_bytes` with more than one tensor.

    Args:
        sizes: of the tensors, in bytes.
    """
    found: list[list[str]] = [[]]
    used = 0
    for key, size in sizes.items():
        if found[-1] and used + size > file_bytes:
            found.append([])
            used = 0
        found[-1].append(key)
        used += size
    return found


def file_names(stem: str, count: int) -> list[str]:
    """The names of so many files."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write one file.

    Raises:
        RunError: the disk cannot take it.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # with the operating system's error in its text, which `disk_errors` reads
        raise RunError(f"{path} cannot be written: {error}.") from error


# --- reading ----------------------------------------------------------------------------------------------------------


class TensorFiles:
    """The tensors of a folder's safetensors files, read by name, whole or in part."""

    def __init__(self, folder: Path, stem: str) -> None:
        """
        Raises:
            FileNotFoundError: there are no such files, or one that the index names is missing.
            ValueError: the index is not valid.
        """
        self.folder = folder
        self._open: JsonObject = {}
        index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
        if single.is_file():
            self._file_of = dict.fromkeys(self._file(single.name).keys(), single.name)
            return
        self._file_of = files.safetensors_index(index)
        if missing := [name for name in set(self._file_of.values()) if not (folder / name).is_file()]:
            raise FileNotFoundError(f"{folder / missing[0]} is missing")

    def __contains__(self, key: str) -> bool:
        return key in self._file_of

    def keys(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._file_of.keys()

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, "pt")
        return self._open[name]

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header alone."""
        return tuple(self._file(self._file_of[key]).get_slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """The type of a tensor, by safetensors' name."""
        return self._file(self._file_of[key]).get_slice(key).get_dtype()

    def read_full(self, key: str) -> torch.Tensor:
        """A tensor, on the host."""
        return self._file(self._file_of[key]).get_tensor(key)

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor, on the host; nothing else is read."""
        return self._file(self._file_of[key]).get_slice(key)[start:stop]

    def read_like(self, key: str, target: torch.Tensor) -> torch.Tensor:
        """The tensor, or of a sharded `target` this rank's part, on the host."""
        span = local_rows(target)
        return self.read_full(key) if span is None else self.read_rows(key, *span)


def local_rows(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First row of this rank's part and the row after its last; None for a tensor that is whole.

    Raises:
        ValueError: it is split in another way than FSDP2 does by default, along the first dimension.
    """
    if not isinstance(tensor, DTensor) or all(isinstance(one, Replicate) for one in tensor.placements):
        return None
    if tensor.placements != (Shard(0),):
        raise ValueError(f"expected a tensor split along its first dimension, got {tensor.placements}")
    each = math.ceil(tensor.shape[0] / tensor.device_mesh.size())  # torch.chunk: equal parts, the last ones smaller
    start = min(tensor.device_mesh.get_local_rank() * each, tensor.shape[0])
    return start, start + tensor.to_local().shape[0]


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy what `TensorFiles.read_like` has read into a parameter, without touching its gradient."""
    with torch.no_grad():
        (target.to_local() if isinstance(target, DTensor) else target).copy_(source)


def to_dtensor(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part as a DTensor that is split as `like`; a whole tensor as it is."""
    if not isinstance(like, DTensor):
        return local
    local = local.to(like.to_local().device).contiguous()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


# --- an optimizer's state ---------------------------------------------------------------------------------------------

OPTIMIZER = "optimizer"  # stem of the tensors' files
OPTIMIZER_FILE = f"{OPTIMIZER}.json"  # the rest


def write_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Write the state of an optimizer: tensors with `write`, everything else as JSON. Every rank calls it."""
    state, in_codes = optimizer.state_dict(), eight_bit.is_used(optimizer)
    tensors, plain = {}, {}
    for index, values in state["state"].items():
        for name, value in values.items():
            key = f"{index}.{name}"
            if torch.is_tensor(value):
                tensors |= eight_bit.to_files(key, value) if in_codes else {key: value}
            else:
                plain.setdefault(str(index), {})[name] = value
    write(folder, OPTIMIZER, tensors)
    if distributed.ranks().is_main:
        groups = [
            {name: value.item() if torch.is_tensor(value) else value for name, value in group.items()}
            for group in state["param_groups"]
        ]
        text = json.dumps({"param_groups": groups, "state": plain}, allow_nan=False)
        files.write_text(folder / OPTIMIZER_FILE, text + "\n")
    distributed.barrier()


def read_optimizer(folder: Path, parameters: Sequence[torch.Tensor], *, in_codes: bool = False) -> JsonObject:
    """What `write_optimizer` wrote, as an optimizer of these parameters loads it: parts of sharded ones, whole tensors
    of others.

    Args:
        in_codes: whether the optimizer is torchao's in 8 bits.

    Raises:
        ValueError: a tensor has another shape than its parameter.
    """
    content = files.read_json(folder / OPTIMIZER_FILE)
    stored = TensorFiles(folder, OPTIMIZER)
    state: dict[int, JsonObject] = {int(index): dict(values) for index, values in content["state"].items()}
    for key in stored.keys():
        if key.endswith(f".{eight_bit.SCALES}"):  # read with their codes
            continue
        state_key = key.removesuffix(f".{eight_bit.CODES}")
        number, _, name = state_key.partition(".")
        index, shape = int(number), stored.shape(key)
        if not shape:  # the count of steps
            value = stored.read_full(key)
        elif shape == tuple(parameters[index].shape):
            part = stored.read_like(key, parameters[index])
            if state_key != key:
                scales = stored.read_like(f"{state_key}.{eight_bit.SCALES}", parameters[index])
                part = eight_bit.from_codes(part, scales, name)
            value = to_dtensor(eight_bit.encode(part, name) if in_codes else part, parameters[index])
        else:
            raise ValueError(f"{key} has shape {list(shape)}, its parameter {list(parameters[index].shape)}")
        state.setdefault(index, {})[name] = value
    groups = [
        {name: tuple(value) if name == "betas" else value for name, value in group.items()}
        for group in content["param_groups"]
    ]
    for group in groups if in_codes else ():
        group["lr"] = torch.tensor(group["lr"])  # torchao refuses a number
    return {"state": state, "param_groups": groups}


def split_optimizer(state: JsonObject, parameters: Sequence[torch.Tensor], *, in_codes: bool = False) -> JsonObject:
    """An optimizer's state with whole tensors, as an optimizer of sharded parameters loads it.

    Args:
        in_codes: whether the optimizer is torchao's in 8 bits.
    """

    def part(name: str, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        span = local_rows(like)
        if not in_codes:
            return value if span is None else to_dtensor(value[span[0] : span[1]], like)
        own = value if span is None else eight_bit.slice_rows(value, *span)
        return to_dtensor(eight_bit.encode(own, name), like)

    split = {
        index: {
            name: part(name, value, parameters[index]) if torch.is_tensor(value) and value.dim() else value
            for name, value in values.items()
        }
        for index, values in state["state"].items()
    }
    return {**state, "state": split}
