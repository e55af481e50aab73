"""Which weights of a model an adapter trains, and which of a quantized model stay in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from finetune.engine.model import adapter_targets, expert_targets
from finetune.engine.model.experts import unpacked_shape
from finetune.runtime.types import JsonObject, Model
from finetune.text import counted

MIN_SHARE = 0.9  # share of the linear weights, below which a run warns


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Stacked experts of one name that have an adapter, or are trained in full."""

    experts: int  # of a layer
    layers: int
    parameters: int  # of all of them, without the adapter's own
    rank: int  # of the adapter of each expert, the highest of all layers; 0 if they are trained in full

    @property
    def summary(self) -> str:
        how = f"rank {self.rank}" if self.rank else "in full"
        return f"{counted(self.experts, 'expert')} in {counted(self.layers, 'layer')} ({how})"


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of the linear layers an adapter trains, the output embedding and routers aside.

    share:      of their weights, from 0 to 1
    experts:    the stacked experts that are trained, by their names inside a layer
    layers:     the last two parts of the names of linear layers without an adapter that may have one, the largest first
    parameters: the same of weights that PEFT does not find by their names in `target_modules`: stacked experts, layers
                named as their parts
    unmatched:  the names of `target_parameters` that match no parameter, which PEFT ignores
    """

    share: float
    experts: dict[str, Experts]
    layers: tuple[str, ...]
    parameters: tuple[str, ...]
    unmatched: tuple[str, ...]

    @property
    def summary(self) -> str:
        """What is trained, in one line."""
        experts = ", ".join(f"{name} of {one.summary}" for name, one in self.experts.items())
        return f"Adapter on {self.share:.0%} of the linear weights" + (f", with {experts}" if experts else "")

    @property
    def warning(self) -> str | None:
        """What has no adapter and how to give it one; None if that is little and nothing was asked for in vain."""
        if self.unmatched:
            return f"target_parameters has names that match no parameter: {', '.join(self.unmatched)}. Correct them."
        bare = [*self.layers, *self.parameters]
        if self.share >= MIN_SHARE or not bare:
            return None
        shown = ", ".join(bare[:8]) + (f" and {len(bare) - 8} more" if len(bare) > 8 else "")
        script = ["target_modules='all-linear'"] if self.layers else []
        script += [f"target_parameters={list(self.parameters)}"] if self.parameters else []
        return (
            f"{1 - self.share:.0%} of the linear weights have no adapter: {shown}. To train them, set "
            f"lora.target_modules: all-linear (in a script, in LoraConfig: {', '.join(script)})."
        )

    def to_dict(self) -> JsonObject:
        return {"share": self.share, "experts": {name: dict(vars(one)) for name, one in self.experts.items()}}


@dataclass(frozen=True)
class _Weight:
    """A weight that the language model multiplies by."""

    path: str  # without the parts that adapters add
    owner: torch.nn.Module
    name: str  # in its owner
    size: int  # unpacked
    shape: tuple[int, ...] = ()  # of stacked experts

    @property
    def short(self) -> str:
        return ".".join(self.path.split(".")[-2:])

    @property
    def trains(self) -> bool:
        return getattr(self.owner, self.name).requires_grad


def coverage(model: Model) -> Coverage | None:
    """Which linear weights of the language model have an adapter or are trained; None without an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not getattr(model, "peft_config", None):
        return None
    adapters: dict[tuple[int, str], Any] = {
        (id(module.get_base_layer()), getattr(module, "parameter_name", "weight")): module
        for module in model.modules()
        if isinstance(module, BaseTunerLayer)
    }
    weights = list(_weights(base := model.get_base_model()))
    unreachable = {id(base.get_submodule(name)) for name in adapter_targets.read_past_adapters(base)}
    experts: dict[str, Experts] = {}
    bare: dict[str, int] = {}
    stacked = {one.short for one in weights if one.shape}
    reached = 0
    for one in weights:
        adapter = adapters.get((id(one.owner), one.name))
        if adapter is not None or one.trains:
            reached += one.size
            if one.shape:
                name = expert_targets.short_name(one.path)
                rank = 0 if adapter is None else next(iter(adapter.r.values()))
                old = experts.get(name, Experts(experts=one.shape[0], layers=0, parameters=0, rank=rank))
                parameters = old.parameters + one.size
                experts[name] = replace(old, layers=old.layers + 1, parameters=parameters, rank=max(old.rank, rank))
            continue
        if id(one.owner) in unreachable:
            continue
        as_parameter = stacked and not one.shape and one.path.rpartition(".")[2] in expert_targets.EXPERT_NAMES
        name = f"{one.short}.weight" if as_parameter else one.short
        bare[name] = bare.get(name, 0) + one.size
    largest = sorted(bare, key=lambda name: -bare[name])
    bare_parameters = tuple(name for name in largest if name in stacked or name.endswith(".weight"))
    return Coverage(
        share=reached / (sum(one.size for one in weights) or 1),
        experts=experts,
        layers=tuple(name for name in largest if name not in bare_parameters),
        parameters=bare_parameters,
        unmatched=tuple(_unmatched(model)),
    )


def _unmatched(model: Model) -> Iterator[str]:
    """The names of `target_parameters` that no adapter of a parameter is for."""
    names = expert_targets.adapted_names(model)
    for config in getattr(model, "peft_config", {}).values():
        for target in getattr(config, "target_parameters", None) or ():
            if not any(map(expert_targets.matches([target]), names)):
                yield target


def unquantized_experts(model: Model) -> str | None:
    """A sentence about stacked experts that a quantized model keeps in 16 bits, or more; None if there are none."""
    stacked = expert_targets.stacked_weights(model)
    kept = {path: one for path, one in stacked.items() if type(one).__name__ != "Params4bit"}
    if not kept:
        return None
    size = sum(one.numel() * one.element_size() for one in kept.values())
    names = ", ".join(dict.fromkeys(map(expert_targets.short_name, kept)))
    dtype = str(next(iter(kept.values())).dtype).removeprefix("torch.")
    return f"{size / 2**30:.3g} GiB of stacked experts ({names}) stay in {dtype}"


def _weights(base: Any) -> Iterator[_Weight]:
    """Each weight that the language model multiplies by, routers aside."""
    from transformers.pytorch_utils import Conv1D

    decoder, head = base.get_decoder(), base.get_output_embeddings()
    routers = expert_targets.routers(base)
    for path, module in (decoder if isinstance(decoder, torch.nn.Module) else base).named_modules():
        parts = [part for part in path.split(".") if part not in ("base_layer", "modules_to_save", "default")]
        beside = "original_module" in parts or any(part.startswith("lora_") for part in parts)
        if module is head or id(module) in routers or beside:
            continue
        if isinstance(module, torch.nn.Linear):  # the weights of bitsandbytes' are packed
            yield _Weight(".".join(parts), module, "weight", module.in_features * module.out_features)
        elif isinstance(module, Conv1D):
            yield _Weight(".".join(parts), module, "weight", module.weight.numel())
        elif not isinstance(module, torch.nn.modules.conv._ConvNd):
            for name, weight in module.named_parameters(recurse=False):
                shape = unpacked_shape(weight)
                if len(shape) == 3:  # the experts of one layer
                    yield _Weight(".".join([*parts, name]), module, name, prod(shape), shape)
