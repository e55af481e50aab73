"""A LoRA adapter as changes of single tensors, merged in float32.

    W' = W + s B A              s = alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)
    W' = m V / |V|              V = W + s B A, with the norm of each output's weights (DoRA, arXiv 2402.09353)

Layers that keep their weight transposed (Conv1D, embeddings) get (B A)^T. Everything that this does not compute is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finetune.errors import UserError
from finetune.runtime.types import JsonObject

FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Ways to initialize an adapter that leave the base weights as they are.
_INITIAL = (True, False, "gaussian", "eva", "orthogonal")
# Fields of PEFT's LoraConfig that the merge applies, and those that do not change a finished adapter's function.
_APPLIED = frozenset(
    "r lora_alpha rank_pattern alpha_pattern use_rslora use_dora lora_bias fan_in_fan_out modules_to_save bias"
    " trainable_token_indices init_lora_weights ensure_weight_tying peft_type".split()
)
_NEUTRAL = frozenset(
    "auto_mapping base_model_name_or_path revision task_type inference_mode peft_version"
    " lora_dropout target_modules exclude_modules layers_to_transform layers_pattern megatron_config megatron_core"
    " eva_config runtime_config qalora_group_size unsloth_version unsloth_fixed".split()
)


@dataclass
class Change:
    """What happens to one module of the base model. `weight` and `bias` replace the base's; then A and B are added."""

    scaling: float = 1.0
    weight: str | None = None
    bias: str | None = None
    copied: bool = False  # `weight` is a copy of a module that is trained in full (modules_to_save)
    a: str | None = None
    b: str | None = None
    b_bias: str | None = None
    magnitude: str | None = None
    rows: str | None = None  # new rows of an embedding, at `indices`
    indices: tuple[int, ...] = ()

    @property
    def unties(self) -> bool:
        """Whether merging unties this weight from one it shared."""
        return self.copied or self.a is not None


@dataclass
class Adapter:
    """The tensors of an adapter's file, by the path of the module that they change."""

    folder: Path
    config: JsonObject
    changes: dict[str, Change] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_config(self.folder, self.config)
        try:
            self._file: Any = safe_open(self.folder / FILE, framework="pt")
        except Exception as error:  # safetensors has an exception class of its own for each kind of damage
            raise UserError(
                f"The adapter's {self.folder / FILE} cannot be read: {error}. Export a checkpoint."
            ) from None
        for key in self._file.keys():
            self._add(key)
        for path, change in self.changes.items():
            if change.a is not None and change.b is not None:
                change.scaling = self._scaling(path, change.a)
            elif change.a or change.b or change.magnitude or change.b_bias:
                raise UserError(
                    f"The adapter in {self.folder} is incomplete: {path} lacks A or B. Export a checkpoint."
                )

    def get(self, key: str) -> torch.Tensor:
        """A tensor of the file in float32."""
        return self._file.get_tensor(key).float()

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a tensor of the file."""
        return tuple(self._file.get_slice(key).get_shape())

    def weight(self, base: torch.Tensor, path: str, *, transposed: bool) -> torch.Tensor:
        """The merged weight of a module in float32.

        Args:
            base: its weight, (out, in), or (in, out) if `transposed`.
        """
        change = self.changes[path]
        weight = (base if change.weight is None else self.get(change.weight)).float()
        if change.rows is not None:
            weight = weight.index_copy(0, torch.tensor(change.indices), self.get(change.rows))
        if change.a is None or change.b is None:
            return weight
        delta = self.get(change.b) @ self.get(change.a) * change.scaling
        weight = weight + (delta.t() if transposed else delta)
        if change.magnitude is not None:
            inputs, outputs = (0, (1, -1)) if transposed else (1, (-1, 1))
            norm = torch.linalg.vector_norm(weight, dim=inputs)
            weight = weight * (self.get(change.magnitude) / norm).view(outputs)
        return weight

    def bias(self, base: torch.Tensor, path: str) -> torch.Tensor:
        """The merged bias of a module in float32."""
        change = self.changes[path]
        bias = (base if change.bias is None else self.get(change.bias)).float()
        return bias if change.b_bias is None else bias + change.scaling * self.get(change.b_bias)

    def _scaling(self, path: str, a: str) -> float:
        from peft.utils.other import get_pattern_key

        alphas = self.config.get("alpha_pattern") or {}
        alpha = alphas.get(get_pattern_key(list(alphas), path), self.config["lora_alpha"])
        rank = self.shape(a)[0]
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def _add(self, key: str) -> None:
        name = key.removeprefix(_PREFIX)
        for ending, field_name in _ENDINGS.items():
            if name.endswith(ending):
                path = name.removesuffix(ending)
                change = self.changes.setdefault(path, Change())
                setattr(change, field_name, key)
                if field_name == "rows":
                    change.indices = self._indices(path)
                return
        path, _, last = name.rpartition(".")
        if "lora_" in name or last not in ("weight", "bias"):
            raise UserError(f"The adapter in {self.folder} has `{key}`, which cannot be merged. Use --to adapter.")
        inner = (
            path.removesuffix(".base_layer").removesuffix(".modules_to_save.default").removesuffix(".modules_to_save")
        )
        change = self.changes.setdefault(inner, Change())
        setattr(change, last, key)
        saved = self.config.get("modules_to_save") or []
        change.copied = any(inner == one or inner.endswith(f".{one}") for one in saved)

    def _indices(self, path: str) -> tuple[int, ...]:
        given = self.config.get("trainable_token_indices") or []
        if isinstance(given, Mapping):
            given = next((one for name, one in given.items() if path == name or path.endswith(f".{name}")), [])
        return tuple(given)


_ENDINGS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "b_bias",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".token_adapter.trainable_tokens_delta": "rows",
}


def _check_config(folder: Path, config: Mapping[str, object]) -> None:
    """Refuse what the merge does not compute."""

    def refuse(what: str) -> UserError:
        return UserError(f"The adapter in {folder} cannot be merged: {what}. Use --to adapter.")

    if config.get("peft_type") != "LORA":
        raise refuse(f"it is of type {config.get('peft_type')}, not LORA")
    initial = config.get("init_lora_weights", True)
    if initial not in _INITIAL:
        raise refuse(f"init_lora_weights: {initial} changed the base weights before training")
    if config.get("ensure_weight_tying"):
        raise refuse("ensure_weight_tying is set")
    for name, value in config.items():
        if value and name not in _APPLIED and name not in _NEUTRAL:
            raise refuse(f"{name} is {value}")


def find_name(path: str, part: str, names: Iterable[str]) -> str | None:
    """The tensor of the base model for a module's path and `weight` or `bias`: the same name, or the only one that ends
    like it from its layer's number on (a checkpoint may lack, or have, a prefix that the module's path has)."""
    name, known = f"{path}.{part}", list(names)
    if name in known:
        return name
    parts = name.split(".")
    first_number = next((place for place, one in enumerate(parts) if one.isdigit()), len(parts) - 1)
    for start in range(1, first_number):
        tail = ".".join(parts[start:])
        found = [one for one in known if one == tail or one.endswith(f".{tail}")]
        if found:
            return found[0] if len(found) == 1 else None
    return None
