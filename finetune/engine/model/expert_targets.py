"""Which weights of a mixture of experts an adapter is put on.

transformers keeps the experts of a layer as stacked parameters of three dimensions, such as `experts.gate_up_proj`.
PEFT puts an adapter on a parameter by `target_parameters`, and what it makes of module names depends on the model: of
one it adapts no expert, of another the router as well, with twice the rank, and no layer beside the experts. So module
names are resolved here, into the same targets for every model and backend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from difflib import get_close_matches
from types import SimpleNamespace

import torch

from finetune.config import Config
from finetune.engine import multimodal
from finetune.engine.model import router_loss
from finetune.engine.model.experts import unpacked_shape
from finetune.engine.sharding import shard
from finetune.errors import UserError
from finetune.runtime.types import JsonObject, Model
from finetune.text import counted

# Stacked weights, by the names of the layers that they hold: in transformers today, in transformers 4, in Mixtral's
# files.
_HOLDS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("w2",),),
    "gate_proj": (("w1",),),
    "up_proj": (("w3",),),
}
# Names that PEFT takes for those of experts, or of a router, in some models: it would look for no layer beside them.
EXPERT_NAMES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
INITIALIZATIONS = (True, False, "gaussian")
# Arguments of PEFT's LoraConfig that its adapter of a parameter refuses or ignores, and the value without effect.
_ARGUMENTS = {"use_dora": False, "lora_bias": False, "velora_config": None, "kasa_config": None}
_ARGUMENTS |= {"alora_invocation_tokens": None, "use_qalora": False, "use_bdlora": None, "arrow_config": None}


def stacked_weights(model: Model) -> dict[str, torch.Tensor]:
    """The stacked experts of the language model, by the full names of the parameters."""
    base = shard.base_model(model)
    decoder = base.get_decoder()
    decoder = decoder if isinstance(decoder, torch.nn.Module) else base
    inside = {id(module) for module in decoder.modules()}
    return {
        f"{path}.{name}": weight
        for path, module in base.named_modules()
        if id(module) in inside and not isinstance(module, torch.nn.modules.conv._ConvNd)
        for name, weight in module.named_parameters(recurse=False)
        if len(shape := unpacked_shape(weight)) == 3 and shape[0] > 1  # RWKV has vectors of [1, 1, width]
    }


def routers(model: Model) -> dict[int, torch.nn.Module]:
    """The modules that choose experts, by their ids: those that the model declares, and by their names, with the layers
    that some have inside."""
    found = {id(module): module for module, _ in router_loss.routers(model)}
    for path, module in model.named_modules():
        kind = type(module).__name__  # not any gate: an adapter on that of linear attention is meant
        named = kind.endswith(("Router", "TopKGating")) or "MoE" in kind and kind.endswith("Gate")
        if path.rpartition(".")[2] == "router" or named:
            found |= {id(part): part for part in module.modules()}
    return found


def adapted_names(model: Model) -> list[str]:
    """The full names of the layers and parameters that have an adapter, as PEFT matches them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = []
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            parts = [*path.split("."), getattr(module, "parameter_name", "base_layer")]
            found.append(".".join(part for part in parts if part != "base_layer"))
    return found


def short_name(path: str) -> str:
    """The name of a parameter inside its layer: `mlp.experts.gate_up_proj`."""
    parts = [part for part in path.split(".") if part != "base_layer"]
    number = next((at for at, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[number + 1 :])


def resolve(model: Model, config: Config, targets: Sequence[str] | str | None) -> JsonObject:
    """`target_modules` and `target_parameters` of the adapter, for a model that has none yet.

    Args:
        targets: as PEFT's target_modules.

    Raises:
        UserError: a name of `lora.target_parameters` is that of no stacked weight, names are of a part of one, or
            PEFT's adapter of stacked experts does not have an option that is set.
    """
    lora = config.lora
    stacked = stacked_weights(model)
    given = None if lora.target_parameters is None else _given_parameters(model, stacked, config)
    if not stacked or targets is None or "target_modules" in lora.adapter_kwargs:  # the last: PEFT's meaning of them
        found = {"target_modules": targets}
        return found if given is None else found | {"target_parameters": given}
    modules = multimodal.outside_towers(model)
    choosing = routers(model)
    names = _selected_modules(model, modules, targets, choosing)
    parameters = given
    if parameters is None:
        excluded = lora.adapter_kwargs.get("exclude_modules") or ()
        chosen = [
            path
            for path in stacked
            if _is_selected(path, targets, "lora.target_modules")
            and not _is_selected(path, excluded, "exclude_modules of lora.adapter_kwargs")
        ]
        if targets != "all-linear":
            named = [path for path, module in modules.items() if id(module) in choosing and matches(targets)(path)]
            inside = [path for path in modules if any(f"{path}.".startswith(f"{one}.") for one in named)]
            chosen += [f"{path}.weight" for path in inside if path not in names and _has_matrix(modules[path])]
        chosen = [path for path in chosen if not _is_left_out((path, path.rpartition(".")[0]), config)]
        parameters = _endings(chosen, (name for name, _ in model.named_parameters()), least=3)
    if parameters:
        _check_options(config, parameters)
    by_place = [path for path in names if path.rpartition(".")[2] in EXPERT_NAMES]
    by_name = [path for path in names if path not in set(by_place)]
    by_place = [path for path in by_place if not _is_left_out((path,), config)]
    found = _endings(by_name, modules, least=1) + _endings(by_place, modules, least=2)
    return {"target_modules": found, "target_parameters": parameters}


def _has_matrix(module: torch.nn.Module) -> bool:
    return isinstance(weight := getattr(module, "weight", None), torch.Tensor) and weight.ndim == 2


def names_stacked(path: str, targets: Sequence[str] | str) -> bool:
    """Whether names, or a regular expression, are of a stacked weight or of a part of it."""
    leaf = path.rpartition(".")[2]
    names = {leaf}.union(*_HOLDS.get(leaf, ()))
    return any(_is_named(path, name, targets) for name in names)


def matches(targets: Collection[str] | str) -> Callable[[str], bool]:
    """Whether a name is selected as PEFT selects modules: by a list of endings, or a regular expression."""
    if isinstance(targets, str):
        pattern = re.compile(targets)
        return lambda name: pattern.fullmatch(name) is not None
    return lambda name: any(name == target or name.endswith(f".{target}") for target in targets)


def _is_named(path: str, name: str, targets: Sequence[str] | str) -> bool:
    """Whether a name in the place of a stacked weight is selected. A regular expression may name each expert, as
    transformers 4 does."""
    is_selected, place = matches(targets), path.rpartition(".")[0]
    return is_selected(f"{place}.{name}") or isinstance(targets, str) and is_selected(f"{place}.0.{name}")


def _is_selected(path: str, targets: Sequence[str] | str, key: str) -> bool:
    """Whether all that a stacked weight holds is selected.

    Args:
        key: the setting that has these targets.

    Raises:
        UserError: a part of it is.
    """
    leaf = path.rpartition(".")[2]
    if targets == "all-linear" or _is_named(path, leaf, targets):
        return True
    for names in _HOLDS.get(leaf, ()):
        found = [name for name in names if _is_named(path, name, targets)]
        if len(found) == len(names):
            return True
        if found:
            lacks = ", ".join(name for name in names if name not in found)
            raise UserError(
                f"{key} names {', '.join(found)} without {lacks}, but the experts of this model hold "
                f"them in one weight, {short_name(path)}. Name both, or give the experts' weights in "
                "lora.target_parameters ([] for none)."
            )
    return False


def _is_left_out(names: Sequence[str], config: Config) -> bool:
    """Whether PEFT would leave out a layer of one of these names: by `exclude_modules`, `layers_to_transform`, or
    because it is trained in full. Parameters it does not leave out."""
    from peft.tuners.tuners_utils import check_target_module_exists

    kept = ("exclude_modules", "layers_to_transform", "layers_pattern")
    rules = SimpleNamespace(
        modules_to_save=config.lora.modules_to_save, **{one: config.lora.adapter_kwargs.get(one) for one in kept}
    )
    for name in names:
        rules.target_modules = [name.rpartition(".")[2]]
        if not check_target_module_exists(rules, name):
            return True
    return False


def _selected_modules(
    model: Model, modules: dict[str, torch.nn.Module], targets: Sequence[str] | str, choosing: Container[int]
) -> list[str]:
    """The full names of the layers that have names for themselves: of all-linear, no router or output embedding."""
    from transformers.pytorch_utils import Conv1D

    linear, head = (torch.nn.Linear, Conv1D), model.get_output_embeddings()
    if targets == "all-linear":
        return [
            path
            for path, module in modules.items()
            if isinstance(module, linear) and module is not head and id(module) not in choosing
        ]
    kinds = (*linear, torch.nn.Embedding, torch.nn.MultiheadAttention, torch.nn.modules.conv._ConvNd)
    is_selected = matches(targets)
    return [path for path, module in modules.items() if path and is_selected(path) and isinstance(module, kinds)]


def _endings(chosen: list[str], all_names: Iterable[str], *, least: int) -> list[str]:
    """The shortest endings, of `least` parts or more, that select these names and no other."""
    others = [name for name in all_names if name not in set(chosen)]
    selects_more: dict[str, bool] = {}
    found: dict[str, None] = {}
    for path in chosen:
        parts = path.split(".")
        tails = [".".join(parts[-count:]) for count in range(min(least, len(parts)), len(parts) + 1)]
        for tail in tails:
            if tail not in selects_more:
                selects_more[tail] = any(map(matches([tail]), others))
        found[next((tail for tail in tails if not selects_more[tail]), path)] = None
    return list(found)


def _given_parameters(model: Model, stacked: Iterable[str], config: Config) -> list[str]:
    """The names of `lora.target_parameters`, each of which is that of stacked experts, or of a router's weight. Longer
    ones if they match parameters of layers that are left out."""
    stacked, names = list(stacked), config.lora.target_parameters or []
    chosen: list[str] = []
    parameters = dict(model.named_parameters())
    choosing = {id(module.weight) for module in routers(model).values() if hasattr(module, "weight")}
    for name in names:
        found = {path: one for path, one in parameters.items() if matches([name])(path)}
        if not found:
            known = list(dict.fromkeys(map(short_name, stacked)))
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            nearest = f" Nearest is {near[0]}." if near else ""
            has = f"This model's stacked experts are {', '.join(known)}." if known else "This model has none."
            raise UserError(
                f"lora.target_parameters has `{name}`, which is the name of no parameter of the model.{nearest} {has}"
            )
        for path, one in found.items():
            if path not in stacked and id(one) not in choosing:
                layer, _, kind = path.rpartition(".")
                is_layer = kind == "weight" and one.ndim == 2
                raise UserError(
                    f"lora.target_parameters has `{name}`, which matches {path}, "
                    + (
                        f"the weight of a layer. Name the layer in lora.target_modules: {layer.rpartition('.')[2]}."
                        if is_layer
                        else f"of {counted(one.ndim, 'dimension')}: an adapter goes on stacked experts, which have 3. "
                        "Remove it."
                    )
                )
        chosen += (path for path in found if path not in chosen)
    kept = [path for path in chosen if not _is_left_out((path, path.rpartition(".")[0]), config)]
    if chosen and not kept:
        why = "lora.adapter_kwargs or lora.modules_to_save leaves out all of lora.target_parameters"
        raise UserError(f"{why}: {', '.join(names)}. Remove one of them.")
    return list(names) if len(kept) == len(chosen) else _endings(kept, parameters, least=3)


def _check_options(config: Config, parameters: list[str]) -> None:
    """Check that PEFT's adapter of a parameter has the options that are set."""
    lora, shown = config.lora, ", ".join(parameters)
    wrong = [f"lora.lora_dropout: {lora.lora_dropout:g}"] if lora.lora_dropout else []
    given = lora.adapter_kwargs
    wrong += [
        f"lora.adapter_kwargs: {{{name}: {given[name]}}}"
        for name, harmless in _ARGUMENTS.items()
        if name in given and given[name] != harmless
    ]
    initial = given.get("init_lora_weights", True)
    wrong += [] if initial in INITIALIZATIONS else [f"lora.adapter_kwargs: {{init_lora_weights: {initial}}}"]
    if wrong:
        raise UserError(
            f"PEFT's adapter of stacked experts ({shown}) does not support {' or '.join(wrong)}. Remove "
            f"{'it' if len(wrong) == 1 else 'them'}, or leave out the experts with lora.target_parameters: []."
        )
