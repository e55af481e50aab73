"""Writes base and adapter as one model, tensor by tensor, or copies a fully trained model.

Memory holds one tensor in float32 at a time, and the tensors of the file that is written. A merged weight is computed
in float32 from the base's original weight and rounded once, as `optimizer.rounding` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from finetune.engine import multimodal
from finetune.engine.optimizer import rounding
from finetune.engine.optimizer.master_weights import saved_dtype
from finetune.engine.preflight.mergeable import quantization
from finetune.errors import UserError
from finetune.export.adapter import Adapter, Change, find_name
from finetune.export.layout import Layout, Place
from finetune.export.weights import Entry, Weights, write
from finetune.runtime import files
from finetune.runtime.types import JsonObject

SHARD_BYTES = 5_000_000_000  # as transformers' save_pretrained has it since 5.0: 5 GB files are what hubs handle well


@dataclass(frozen=True)
class TensorRecipe:
    """How a tensor of the merged model is made: from `base`, changed by the adapter at `path`.

    A tensor that is a part of a parameter, or that holds all experts, has the names of its changes in `parts`, each
    with the place of the one in the other.
    """

    entry: Entry
    base: str | None
    path: str | None = None
    part: str = "weight"
    transposed: bool = False
    parts: tuple[tuple[str, Place], ...] = ()


class Merge:
    """A model and an adapter, before anything is written.

    Args:
        base: the folder of the model: the adapter's base, or a fully trained one.
        adapter: None for a fully trained model.
        dtype: of the merged weights; None for the base's.

    Raises:
        UserError: the adapter does not fit the model, or cannot be merged.
    """

    def __init__(self, base: Path, adapter: Adapter | None, dtype: torch.dtype | None = None) -> None:
        self.weights = Weights(base, "base model" if adapter else "model")
        self.adapter, self.dtype = adapter, dtype
        self._update, self._written = 0.0, 0.0  # |update|^2, and <what was written of it, update>
        self.config = files.read_json(base / "config.json")
        _check_quantization(base, self.config)
        self.model = _skeleton(base, adapter.changes if adapter else ())
        self.layout = Layout(self.model, {name: entry.shape for name, entry in self.weights.entries.items()})
        self.untied = False
        self.steps = {
            name: TensorRecipe(self._saved_entry(entry, adapter), name) for name, entry in self.weights.entries.items()
        }
        if adapter is not None:
            adapter.name_parameters(self.model)
            shared = self._tied_names()
            for path, change in list(adapter.changes.items()):
                if change.experts:
                    self._change_parameter(path, change)
                else:
                    self._change(path, change)
            if shared is not None:
                self._untie(*shared)
        if dtype is not None:
            self.steps = {
                name: replace(one, entry=self._with_dtype(one.entry, dtype)) for name, one in self.steps.items()
            }

    def _saved_entry(self, entry: Entry, adapter: Adapter | None) -> Entry:
        """A tensor of the base. A checkpoint of full fine-tuning has float32 weights of a 16-bit model."""
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        if adapter is not None or entry.dtype != torch.float32 or named not in ("bfloat16", "float16"):
            return entry
        return self._with_dtype(entry, getattr(torch, named))

    def _with_dtype(self, entry: Entry, dtype: torch.dtype) -> Entry:
        like = torch.empty((), dtype=entry.dtype)
        return replace(entry, dtype=saved_dtype(self.model, entry.name, like, dtype))

    @property
    def bytes(self) -> int:
        """Size of the merged model's tensors."""
        return sum(step.entry.bytes for step in self.steps.values())

    @property
    def changed(self) -> int:
        """Number of tensors that the adapter changes."""
        return sum(step.path is not None for step in self.steps.values())

    @property
    def update_kept(self) -> float | None:
        """Share of the adapter's update U that the tensors made so far have after rounding: <rounded - base, U> /
        <U, U>. None if none of them was rounded."""
        return self._written / self._update if self._update else None

    def write(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        """Write the weights and config.json."""
        write(folder, [step.entry for step in self.steps.values()], self.tensor, shard_bytes)
        files.write_json(folder / "config.json", self.new_config())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the merged model, in its dtype."""
        step = self.steps[name]
        if step.path is None or self.adapter is None:
            assert step.base is not None
            return rounding.round_to(self.weights.get(step.base), step.entry.dtype, name)
        base = self.weights.get(str(step.base))
        if step.parts:
            exact = base.to(torch.float32, copy=True)
            for change, place in step.parts:
                self.adapter.add(exact, change, place)
        elif step.part == "bias":
            exact = self.adapter.bias(base, step.path)
        else:
            exact = self.adapter.weight(base, step.path, transposed=step.transposed)
        found = rounding.round_to(exact, step.entry.dtype, name)
        if found.dtype != exact.dtype and base.shape == exact.shape:
            update = exact.sub_(base).reshape(-1)
            self._update += float(torch.dot(update, update))
            self._written += float(torch.dot((found.float().sub_(base)).reshape(-1), update))
        return found

    def new_config(self) -> JsonObject:
        """config.json of the merged model."""
        found = {name: value for name, value in self.config.items() if name != "_name_or_path"}
        found.pop("quantization_config", None)
        text = found.get("text_config")
        rows = self._vocabulary()
        for section in (found, text) if isinstance(text, dict) else (found,):
            if self.dtype is not None:
                section.pop("torch_dtype", None)
                section["dtype"] = str(self.dtype).removeprefix("torch.")
            if self.untied and (section is found or "tie_word_embeddings" in section):
                section["tie_word_embeddings"] = False
            if rows is not None and "vocab_size" in section:
                section["vocab_size"] = rows
        return found

    def _vocabulary(self) -> int | None:
        """Rows of the merged embedding, if they are others than the base's."""
        name = self._embedding_names()[0]
        if name is None:
            return None
        rows = self.steps[name].entry.shape[0]
        return rows if rows != self.weights.entries[name].shape[0] else None

    # --- the adapter's changes --------------------------------------------------------------------------------------

    def _change(self, path: str, change: Change) -> None:
        assert self.adapter is not None
        transposed = self._is_transposed(path)
        for part, touched in (("weight", True), ("bias", change.bias or change.b_bias)):
            only_bias = part == "weight" and not (change.weight or change.a or change.rows)
            if not touched or only_bias:
                continue
            replacement = change.weight if part == "weight" else change.bias
            if part == "weight" and self._is_in_parts(path, change):
                continue
            base = self._tensor_of(path, part)
            name = base
            shared = self._tied_names()
            if base is None and shared and f"{path}.weight" == shared[1]:  # files hold it under the embedding's name
                base, name = self._embedding_names()[0], f"{path}.{part}"
            if base is None or name is None:
                raise self._mismatch(f"the base has no tensor `{path}.{part}`")
            old = self.weights.entries[base]
            shape = old.shape if replacement is None else self.adapter.shape(replacement)
            if shape[1:] != old.shape[1:]:
                raise self._mismatch(f"`{path}.{part}` is {list(old.shape)} in the base and {list(shape)} here")
            entry = Entry(name, old.dtype, shape)
            if part == "weight" and change.a and change.b:
                self._check_factors(path, change, entry.shape, transposed=transposed)
            self.steps[entry.name] = TensorRecipe(entry, base, path, part, transposed)

    def _tensor_of(self, path: str, part: str) -> str | None:
        """The one tensor of the base that is a module's weight or bias."""
        known = self.layout.tensors(f"{path}.{part}")
        return known[0] if len(known) == 1 else find_name(path, part, self.weights.entries)

    def _is_in_parts(self, path: str, change: Change) -> bool:
        """Plan a weight that is several tensors in the files. False if it is a tensor."""
        assert self.adapter is not None
        name = f"{path}.weight"
        if len(self.layout.tensors(name)) > 1 or name in self.layout.unknown:
            if change.magnitude or change.rows or self._is_transposed(path):
                raise self._unmergeable(f"{name} is several tensors in the base's files, and it is trained by DoRA")
            self.adapter.changes[name] = change
            change.experts = 1
            self._change_parameter(name, change)
            return True
        return False

    def _change_parameter(self, name: str, change: Change) -> None:
        """Plan the tensors of one parameter: experts in one tensor or one by one."""
        assert self.adapter is not None
        if kind := self.layout.unknown.get(name):
            raise self._unmergeable(f"transformers makes `{name}` of the base's files by {kind}")
        tensors = self.layout.tensors(name)
        known = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}.get(name)
        if known is None or not tensors:
            raise self._mismatch(f"the base has no tensor of `{name}`")
        shape = tuple(known.shape)
        if change.weight is not None and self.adapter.shape(change.weight) != shape:
            wanted = self.adapter.shape(change.weight)
            raise self._mismatch(f"`{name}` is {list(shape)} in the base and {list(wanted)} here")
        if change.a and change.b:
            outputs, inputs = reversed(shape[-2:]) if change.transposed else shape[-2:]
            a, b = self.adapter.shape(change.a), self.adapter.shape(change.b)
            if (a[1:], b[:1], b[1:]) != ((inputs,), (outputs,), a[:1]) or a[0] % change.experts:
                raise self._mismatch(f"`{name}` is {list(shape)} in the base, and A and B are {list(a)} and {list(b)}")
        for tensor in tensors:
            step = self.steps[tensor]
            self.steps[tensor] = replace(step, path=name, parts=((name, self.layout.places[tensor]),))

    def _check_factors(self, path: str, change: Change, shape: tuple[int, ...], *, transposed: bool) -> None:
        assert self.adapter is not None
        a, b = self.adapter.shape(str(change.a)), self.adapter.shape(str(change.b))
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise self._mismatch(f"A and B of `{path}` are {list(a)} and {list(b)}")
        wanted = (a[1], b[0]) if transposed else (b[0], a[1])
        if shape != wanted:
            raise self._mismatch(f"`{path}` is {list(shape)} in the base, and the adapter is for {list(wanted)}")

    def _is_transposed(self, path: str) -> bool:
        """Whether a module keeps its weight as (in, out)."""
        from transformers.pytorch_utils import Conv1D

        assert self.adapter is not None
        try:
            return isinstance(self.model.get_submodule(path), Conv1D | torch.nn.Embedding)
        except AttributeError:  # no model could be built, or its modules have other names
            embedding = (self.adapter.changes[path].a or "").endswith("lora_embedding_A")
            return embedding or bool(self.adapter.config.get("fan_in_fan_out"))

    # --- tied embeddings --------------------------------------------------------------------------------------------

    def _embedding_names(self) -> tuple[str | None, str | None]:
        """Names of the input and the output embedding's weights; the latter also if the files lack it."""
        found: list[str | None] = []
        for get in ("get_input_embeddings", "get_output_embeddings"):
            try:
                module = getattr(self.model, get)()
            except (AttributeError, NotImplementedError):
                module = None
            path = next((name for name, one in self.model.named_modules() if one is module), None)
            name = None if path is None else find_name(path, "weight", self.weights.entries)
            found.append(name or (f"{path}.weight" if path and get == "get_output_embeddings" else None))
        return found[0], found[1]

    def _tied_names(self) -> tuple[str, str] | None:
        """Names of the embedding and the head if they are one tensor."""
        embedding, head = self._embedding_names()
        text = self.config.get("text_config") or self.config
        tied = self.config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
        if tied is None:
            tied = getattr(self.model.config, "tie_word_embeddings", False)
        return (embedding, head) if tied and embedding and head and embedding != head else None

    def _untie(self, embedding: str, head: str) -> None:
        """Give embedding and head tensors of their own if the adapter makes them differ, and else write one."""
        assert self.adapter is not None
        changes = self.adapter.changes
        one, two = (changes.get(name.removesuffix(".weight")) for name in (embedding, head))
        if not (one and one.unties) and not (two and two.unties):
            self.steps.pop(head, None)
            if two is not None and (one is None or one.weight is None):  # a resized head, which is the embedding too
                entry = Entry(embedding, self.weights.entries[embedding].dtype, self.adapter.shape(str(two.weight)))
                self.steps[embedding] = TensorRecipe(entry, embedding, head.removesuffix(".weight"))
            return
        if one and two and one.copied and two.copied and not one.a and not two.a:
            if torch.equal(self.adapter.get(str(one.weight)), self.adapter.get(str(two.weight))):
                self.steps.pop(head, None)
                return
        self.untied = True
        shared = one.weight if one is not None and not one.copied else None  # of both, before the adapter adds to it
        if two is None:
            old, path = self.weights.entries[embedding], head.removesuffix(".weight")
            shape = old.shape if shared is None else self.adapter.shape(shared)
            changes[path] = Change(weight=shared)
            self.steps[head] = TensorRecipe(Entry(head, old.dtype, shape), embedding, path if shared else None)
        elif two.weight is None:
            two.weight = shared

    def _unmergeable(self, why: str) -> UserError:
        folder = self.adapter.folder if self.adapter else self.weights.folder
        return UserError(f"The adapter in {folder} cannot be merged: {why}. Use --to adapter.")

    def _mismatch(self, why: str) -> UserError:
        folder = self.adapter.folder if self.adapter else self.weights.folder
        return UserError(
            f"The adapter in {folder} does not fit the base model in {self.weights.folder}: {why}. Give the model that "
            "it was trained on with --base."
        )


def _skeleton(folder: Path, adapted: Collection[str]) -> Any:
    """The model's modules without weights, as an adapter names them; an empty module if transformers has no class for
    it."""
    from transformers import AutoConfig

    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(folder)
            if hasattr(config, "quantization_config"):
                delattr(config, "quantization_config")
            return multimodal.auto_class(config, adapted).from_config(config)
    except (ValueError, KeyError, ImportError, OSError, AttributeError, TypeError):
        return torch.nn.Module()


def _check_quantization(folder: Path, config: Mapping[str, object]) -> None:
    """Refuse formats of weights other than 16 or 32 bits and bitsandbytes' 4 bits."""
    if (method := quantization(config)) is None:
        return
    raise UserError(
        f"The weights in {folder} are quantized ({method}), which cannot be merged. Give the original 16-bit model "
        "with --base, or use --to adapter."
    )
