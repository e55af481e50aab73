"""Checkpoints for images or sound beside text, of which rows of text train the text model alone.

Which modules are towers follows from the structure of a model: all that is neither the text decoder, its embeddings and
its output layer, nor inside of one or around it.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from finetune.runtime import files
from finetune.runtime.types import Model


def auto_class(shape: Any, adapted: Collection[str] = ()) -> Any:
    """transformers' auto class that loads all of a model. Of some multimodal checkpoints (Qwen3.5, Llama 4),
    `AutoModelForCausalLM` loads the text model alone.

    Args:
        shape: the model's configuration.
        adapted: names in an adapter for the model, which may be of the text model alone, as in version 0.1.0.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForMultimodalLM

    whole: Any = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(shape), None)
    text: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(shape), None)
    if whole is None or shape.is_encoder_decoder or whole.forward is nn.Module.forward:  # the last: of several models
        return AutoModelForCausalLM
    of_text = getattr(text, "__name__", "") in (getattr(shape, "architectures", None) or ())
    of_text |= text not in (None, whole) and bool(adapted) and not any("language_model." in name for name in adapted)
    return AutoModelForCausalLM if of_text else AutoModelForMultimodalLM


def from_pretrained(name: str, *, adapter: str | Path | None = None, **arguments: Any) -> Any:
    """The model of a folder or a name on the Hub, in the class that `auto_class` chooses.

    Args:
        adapter: the folder of one for this model.
        arguments: of transformers' `from_pretrained`.
    """
    from transformers import AutoConfig

    known = {key: arguments[key] for key in ("revision", "trust_remote_code") if key in arguments}
    file = None if adapter is None else Path(adapter, "adapter_model.safetensors")
    adapted = files.tensor_sizes(file) if file is not None and file.is_file() else ()
    shape = AutoConfig.from_pretrained(name, **known)
    return auto_class(shape, adapted).from_pretrained(name, **arguments)


@contextlib.contextmanager
def in_unsloths_loader(adapter: object) -> Iterator[None]:
    """Context in which Unsloth's loader for CPUs loads all of a model, too: it takes `AutoModelForCausalLM` for any."""
    import transformers

    kept: Any = transformers.AutoModelForCausalLM
    own = SimpleNamespace(from_pretrained=functools.partial(from_pretrained, adapter=str(adapter)))
    transformers.AutoModelForCausalLM = own  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        transformers.AutoModelForCausalLM = kept  # type: ignore[misc]


def towers(model: Model) -> dict[str, nn.Module]:
    """The outermost modules with weights that rows of text never reach, by their names in the model without an adapter;
    none in a model of text."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    shape = getattr(base, "config", None)
    if shape is None or shape.get_text_config() is shape:
        return {}
    used = [decoder := base.get_decoder()]
    for one in base.modules():
        if hasattr(one, "get_output_embeddings") and any(part is decoder for part in one.modules()):
            used += [one.get_input_embeddings(), one.get_output_embeddings()]
    reached = {id(part) for one in used if one is not None for part in one.modules()}
    return dict(_beside(base, "", reached))


def _beside(module: nn.Module, path: str, reached: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if id(child) in reached:
            continue
        if any(id(part) in reached for part in child.modules()):
            yield from _beside(child, f"{path}{name}.", reached)
        elif next(child.parameters(), None) is not None:
            yield f"{path}{name}", child


def outside_towers(model: Model) -> dict[str, nn.Module]:
    """The modules inside a model that rows of text may reach, by name."""
    beside = tuple(f"{name}." for name in towers(model))
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {name: one for name, one in base.named_modules() if name and not f"{name}.".startswith(beside)}


def prepare(model: Model) -> None:
    """Freeze the towers: their gradients would be missing, for which DDP would wait. And turn the text model's cache
    off, as transformers does in the outer configuration alone: with it, no mask keeps the documents of a pack apart."""
    model.config.get_text_config().use_cache = False
    for tower in towers(model).values():
        tower.requires_grad_(False)


def excluding_towers(
    model: Model, given: Collection[str] | str | None, further: Sequence[str] = ()
) -> Collection[str] | str | None:
    """PEFT's `exclude_modules`, with the towers and `further` modules, which may be in every layer.

    Args:
        given: what the user excludes: endings of names, or a regular expression for full names.
    """
    layers = (re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name)) for name in further)
    names = "|".join(dict.fromkeys([*map(re.escape, towers(model)), *layers]))
    if not names:
        return given
    theirs = given if isinstance(given, str) or not given else rf"(.+\.)?({'|'.join(map(re.escape, given))})"
    return rf"({names})(\..+)?" + (f"|({theirs})" if theirs else "")


def summary(model: Model) -> str | None:
    """What a run says about the towers; None if there are none."""
    if not (beside := towers(model)):
        return None
    weights = [one for tower in beside.values() for one in tower.parameters()]
    size = sum(one.numel() * one.element_size() for one in weights) / 2**30
    return f"Rows of text never reach {', '.join(beside)}: frozen ({size:.3g} GiB)"
