"""Where a mixture of experts has its experts, and how many of its parameters a token uses.

transformers stacks the experts of a layer in parameters of three dimensions, [experts, ...], which bitsandbytes and
PEFT replace or wrap; code of models on the Hub may have a list of modules. A token uses `num_experts_per_tok` of them
and everything else: attention, norms, embeddings, routers, shared experts, layers without experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from finetune.runtime.types import JsonObject, Model

# Names by which configurations have the number of experts per token; of HunYuan it is a list, an entry per layer.
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
# The same for the number of routed experts of a layer.
NUMBERS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_BIASES_OF_CHOICE = (".e_score_correction_bias", ".expert_bias")


def per_token(config: Any, path: str) -> int | None:
    """The experts that a token is routed to.

    Args:
        config: of the language model.
        path: of a module in the layer.

    Returns:
        None if the configuration does not have the number.
    """
    for name in _PER_TOKEN:
        value = getattr(config, name, None)
        if isinstance(value, list) and (layer := re.search(r"\.(\d+)\.", path)) and int(layer[1]) < len(value):
            value = value[int(layer[1])]
        if isinstance(value, int) and value > 0:
            return value
    return None


def freeze_biases_of_choice(model: Any) -> None:
    """Freeze what only the choice of experts depends on, and has no gradient (Ernie 4.5, AFMoE): their classes freeze
    it, but transformers makes everything trainable that it loads."""
    for name, parameter in model.named_parameters():
        if name.endswith(_BIASES_OF_CHOICE):
            parameter.requires_grad_(False)


def stacks(model: Any) -> Iterator[tuple[str, nn.Module, int]]:
    """The modules that hold the routed experts of a layer, with their names and numbers of experts."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.modules.conv._ConvNd) or "shared" in last:
            continue
        if isinstance(module, nn.ModuleList):
            number = len(module) if last == "experts" else 0
        else:
            shapes = [shape for _, shape in _own_parameters(module)]
            number = max((shape[0] for shape in shapes if len(shape) == 3), default=0)
        if number > 1:
            yield name, module, number


def summary(model: Model) -> JsonObject | None:
    """Layers with routed experts, experts of each and experts per token, the most of all layers; None if there are
    none."""
    config = model.config.get_text_config()
    names: dict[str, tuple[int, int]] = {}
    for name, _, number in stacks(model):
        layer = re.match(r".*?\.\d+\.", name)
        if (chosen := per_token(config, name)) is not None:
            names[layer[0] if layer else name] = (number, chosen)
    if not names:
        return None
    numbers, chosen_numbers = zip(*names.values(), strict=True)
    return {"layers": len(names), "per_layer": max(numbers), "per_token": max(chosen_numbers)}


def _own_parameters(module: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Size]]:
    """The parameters of one module without those below, with the shapes that they have unpacked."""
    for parameter in module.parameters(recurse=False):
        yield parameter, unpacked_shape(parameter)
    for replaced in getattr(module, "parametrizations", {}).values():  # as bitsandbytes quantizes a stack
        yield replaced.original, unpacked_shape(replaced.original, next(iter(replaced), None))


def unpacked_shape(parameter: torch.Tensor, holder: object = None) -> torch.Size:
    """The shape of a weight, of 4-bit weights unpacked. Its `holder` may have the state of the quantization."""
    state = getattr(parameter, "quant_state", None) or getattr(holder, "quant_state", None)
    return parameter.shape if state is None else torch.Size(state.shape)


def _used_shares(model: Model) -> dict[int, Fraction]:
    """By id of a parameter that belongs to routed experts: the share of it that a token uses."""
    config, found = model.config.get_text_config(), {}

    def use(parameters: Iterator[nn.Parameter], chosen: int, number: int) -> None:
        found.update({id(one): min(Fraction(chosen, number), Fraction(1)) for one in parameters})

    for name, module, number in stacks(model):
        if (chosen := per_token(config, name)) is None:
            continue
        if isinstance(module, nn.ModuleList):
            use(module.parameters(), chosen, number)
        else:
            use((one for one, shape in _own_parameters(module) if shape[:1] == (number,)), chosen, number)
    for name, module in model.named_modules():  # PEFT's adapter of a stack has r columns for each expert
        number = getattr(module, "num_experts", 1) if hasattr(module, "parameter_name") else 1
        if number > 1 and (chosen := per_token(config, name)) is not None:
            adapters = (one for kind in ("lora_A", "lora_B") for one in getattr(module, kind).parameters())
            use(adapters, chosen, number)
    return found


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of a model, an adapter's included; 4-bit weights count unpacked, FP8 weights once."""

    total: int
    active: int  # for one token; all of a dense model
    trainable: int
    active_trainable: int


def count(model: Model) -> ParameterCount:
    """Count the parameters of a model, which may be on the meta device.

    `active` is what papers and model cards call active or activated parameters: of each layer's routed experts as many
    as a token is routed to, and everything else in full (Mixtral, arXiv 2401.04088: 47 B and 13 B; Qwen3, arXiv
    2505.09388). Experts count in full if the configuration does not have the number of experts per token.
    """
    shares = _used_shares(model)
    unpacked = {
        id(one): shape.numel()
        for module in model.modules()
        if hasattr(module, "parametrizations")
        for one, shape in _own_parameters(module)
    }
    total = trainable = 0
    active = active_trainable = Fraction(0)
    for parameter in model.parameters():
        if not getattr(parameter, "counted", True):
            continue
        numbers = unpacked.get(id(parameter)) or unpacked_shape(parameter).numel()
        used = numbers * shares.get(id(parameter), 1)
        total, active = total + numbers, active + used
        if parameter.requires_grad:
            trainable, active_trainable = trainable + numbers, active_trainable + used
    return ParameterCount(
        total=total, active=round(active), trainable=trainable, active_trainable=round(active_trainable)
    )
