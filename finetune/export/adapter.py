"""A LoRA adapter as changes of single tensors, merged in float32.

    W' = W + s B A              s = alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)
    W' = m V / |V|              V = W + s B A, with the norm of each output's weights (DoRA, arXiv 2402.09353)

Layers that keep their weight transposed (Conv1D, embeddings) get (B A)^T. Of a parameter that holds the weights of all
experts, expert e has the rows e r to (e + 1) r of A and the columns e, e + E, e + 2 E, ... of B (PEFT's
`target_parameters`). Everything that this does not compute is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finetune.engine.model.expert_targets import EXPERT_NAMES
from finetune.engine.model.experts import NUMBERS_OF_EXPERTS
from finetune.engine.preflight.mergeable import why_unmergeable
from finetune.errors import UserError
from finetune.export.layout import Place
from finetune.runtime.types import JsonObject

FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass
class Change:
    """What happens to one module of the base model. `weight` and `bias` replace the base's; then A and B are added.

    A change of a parameter with another name (`experts` is not 0) has its new value in `weight`.
    """

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
    experts: int = 0  # that A and B are of, for a change of one parameter; 0 for that of a module
    transposed: bool = False  # whether that parameter has the inputs of an expert before its outputs

    @property
    def unties(self) -> bool:
        """Whether merging unties this weight from one it shared."""
        return self.copied or self.a is not None


@dataclass
class Adapter:
    """The tensors of an adapter's file, by the path of the module, or the name of the parameter, that they change."""

    folder: Path
    config: JsonObject
    changes: dict[str, Change] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if why := why_unmergeable(self.config):
            raise self._unmergeable(why)
        try:
            self._file: Any = safe_open(self.folder / FILE, framework="pt")
        except Exception as error:  # safetensors has an exception class of its own for each kind of damage
            raise UserError(
                f"The adapter's {self.folder / FILE} cannot be read: {error}. Export a checkpoint."
            ) from None
        self._kept: dict[str, torch.Tensor] = {}
        for key in self._file.keys():
            self._add(key)
        for path, change in self.changes.items():
            if change.a is not None and change.b is not None:
                change.scaling = self._scaling(path, self.shape(change.a)[0])
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

    def add(self, weight: torch.Tensor, name: str, place: Place) -> None:
        """Add the part of a parameter's change to a tensor of a file, in place.

        Args:
            weight: float32.
            name: of the change.
            place: of the tensor in the parameter.
        """
        change = self.changes[name]
        if change.weight is not None:
            weight.copy_(place.of(self._keep(change.weight)))
        if change.a is None or change.b is None:
            return
        a, b = self._keep(change.a), self._keep(change.b)
        rank = a.shape[0] // change.experts
        own = weight if place.swapped is None else weight.transpose(*place.swapped)
        *stacked, rows, columns = place.region
        chosen = stacked[0] if stacked else 0
        numbers = [chosen] if isinstance(chosen, int) else list(range(*chosen))
        for part, number in zip([own] if isinstance(chosen, int) else own, numbers, strict=True):
            left, right = b[:, number :: change.experts], a[number * rank : (number + 1) * rank]
            if change.transposed:
                left, right = right.t(), left.t()
            part.add_(left[_range(rows)] @ right[:, _range(columns)] * change.scaling)

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Give the changes of `target_parameters` the names of their parameters.

        The file has them by the module's path, with one `.base_layer` more for each further parameter of the module:
        PEFT wraps the module once for each, in the module's order, so the first is the innermost.

        Args:
            model: the base's modules, without weights.

        Raises:
            UserError: the adapter's tensors are not those of these parameters.
        """
        targets = [str(one) for one in self.config.get("target_parameters") or ()]
        named = False
        for path, module in model.named_modules() if targets else ():
            own = dict(module.named_parameters(recurse=False))
            names = [name for name in own if any(f".{path}.{name}".endswith(f".{one}") for one in targets)]
            found = {
                name: self.changes.pop(path + ".base_layer" * depth, Change())
                for depth, name in enumerate(reversed(names))
            }
            for name, change in found.items():
                if change.a is None:
                    raise self._unmergeable(f"it has no A and B for the target_parameters `{path}.{name}`")
                change.experts = own[name].shape[0] if own[name].ndim == 3 else 1
                change.transposed = own[name].ndim == 3 and bool(getattr(module, "is_transposed", False))
                change.scaling = self._scaling(f"{path}.{name}", self.shape(change.a)[0] // change.experts)
                change.weight = self.changes.get(f"{path}.{name}", change).weight
                self.changes[f"{path}.{name}"] = change
                named = True
        if targets and not named:
            raise self._unmergeable(f"transformers' class of the model has none of target_parameters {targets}")
        if wrapped := [path for path in self.changes if path.endswith(".base_layer")]:
            raise self._unmergeable(f"`{wrapped[0]}` belongs to no parameter of the model's class in transformers")

    def bias(self, base: torch.Tensor, path: str) -> torch.Tensor:
        """The merged bias of a module in float32."""
        change = self.changes[path]
        bias = (base if change.bias is None else self.get(change.bias)).float()
        return bias if change.b_bias is None else bias + change.scaling * self.get(change.b_bias)

    def _keep(self, key: str) -> torch.Tensor:
        """A tensor in float32, kept for the next experts: a layer's are A and B of two parameters."""
        if key not in self._kept:
            if len(self._kept) == 4:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = self.get(key)
        return self._kept[key]

    def _scaling(self, path: str, rank: int) -> float:
        from peft.utils.other import get_pattern_key

        alphas = self.config.get("alpha_pattern") or {}
        alpha = alphas.get(get_pattern_key(list(alphas), path), self.config["lora_alpha"])
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
        if "lora_" in name:
            raise UserError(f"The adapter in {self.folder} has `{key}`, which cannot be merged. Use --to adapter.")
        inner = path.removesuffix(".modules_to_save.default").removesuffix(".modules_to_save")
        while inner.endswith(".base_layer"):
            inner = inner.removesuffix(".base_layer")
        if last in ("weight", "bias"):
            change = self.changes.setdefault(inner, Change())
            setattr(change, last, key)
        else:
            change = self.changes[f"{inner}.{last}"] = Change(weight=key, experts=1)
        saved = self.config.get("modules_to_save") or []
        change.copied = any(inner == one or inner.endswith(f".{one}") for one in saved)

    def _unmergeable(self, why: str) -> UserError:
        return UserError(f"The adapter in {self.folder} cannot be merged: {why}. Use --to adapter.")

    def _indices(self, path: str) -> tuple[int, ...]:
        given = self.config.get("trainable_token_indices") or []
        if isinstance(given, Mapping):
            given = next((one for name, one in given.items() if path == name or path.endswith(f".{name}")), [])
        return tuple(given)


def loadable_config(config: JsonObject, base: Mapping[str, object]) -> JsonObject:
    """adapter_config.json as PEFT itself loads it: 0.21 takes the name of a layer beside a mixture's experts, such as
    `shared_experts.up_proj`, for the experts (patches/peft_moe_layer_targets.py). As the name of a parameter it means
    the same layer, with the same tensors.

    Args:
        base: config.json of the base model.
    """
    targets = config.get("target_modules")
    text = base.get("text_config")
    shapes = (base, text) if isinstance(text, dict) else (base,)
    if not isinstance(targets, list) or not any(name in one for one in shapes for name in NUMBERS_OF_EXPERTS):
        return config
    layers = [one for one in targets if "." in one and one.rpartition(".")[2] in EXPERT_NAMES]
    if not layers or config.get("lora_dropout"):  # which PEFT has for modules only
        return config
    found = config | {
        "target_modules": [one for one in targets if one not in layers],
        "target_parameters": [*(config.get("target_parameters") or ()), *(f"{one}.weight" for one in layers)],
    }
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        found[name] = patterns | {rf"{key}\.weight": value for key, value in patterns.items()}
    return found


def _range(bounds: int | tuple[int, int]) -> slice:
    return slice(*bounds) if isinstance(bounds, tuple) else slice(bounds, bounds + 1)


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
