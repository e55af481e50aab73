"""Weights of a sharded model in the usual format: written whole by all ranks, read in parts by each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from finetune.engine import shard, tensor_files
from finetune.errors import RunError
from finetune.runtime import distributed


def save_model(model: Any, folder: Path) -> None:
    """Write the model, or its adapter, as `save_pretrained` would. Every rank calls it."""
    shard.reshard(model)
    if getattr(model, "peft_config", None) is not None:
        _save_adapter(model, folder)
    elif getattr(model, "_weight_conversions", None) or model.is_remote_code():
        _save_through_transformers(model, folder)
    else:
        tensor_files.write(folder, "model", weights(model))
        if distributed.ranks().is_main:
            _save_config(model, folder)
    distributed.barrier()


def weights(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model's files, by their names there: tied weights once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        owner = id(parameters.get(name, tensor))
        if owner not in seen and name not in (model._keys_to_ignore_on_save or ()):
            found[name] = tensor
            seen.add(owner)
    return found


def _save_config(model: Any, folder: Path) -> None:
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 makes a subclass
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _save_adapter(model: Any, folder: Path) -> None:
    """An adapter is small: rank 0 keeps it whole on its host, one gathered tensor after the other."""
    kept = {}
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:
            gathered = shard.whole(tensor.detach())
            if distributed.ranks().is_main:
                kept[name] = gathered.cpu().contiguous()
    if distributed.ranks().is_main:
        model.save_pretrained(folder, state_dict=kept, safe_serialization=True)


def _save_through_transformers(model: Any, folder: Path) -> None:
    """Models whose files have other tensors than the model: transformers converts them, whole on rank 0's host."""
    kept = {}
    for name, tensor in model.state_dict().items():
        gathered = shard.whole(tensor)
        if distributed.ranks().is_main:
            kept[name] = gathered.cpu()
    if distributed.ranks().is_main:
        model.save_pretrained(folder, state_dict=kept, safe_serialization=True)


def load_model(model: Any, checkpoint: Path) -> None:
    """Read the weights of a checkpoint, or its adapter, into a sharded model: each rank its part.

    Raises:
        RunError: a tensor is missing or has another shape.
    """
    shard.reshard(model)
    if getattr(model, "peft_config", None) is not None:
        from peft import get_peft_model_state_dict

        stored = tensor_files.TensorFiles(checkpoint, "adapter_model")
        wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    else:
        stored, wanted = tensor_files.TensorFiles(checkpoint, "model"), weights(model)
    for name, target in wanted.items():
        if name not in stored or stored.shape(name) != tuple(target.shape):
            raise RunError(
                f"{checkpoint} does not fit the sharded model: {name} is missing or has another shape. Resume with "
                "training.strategy: ddp, or start a new run."
            )
        tensor_files.copy_into(target, stored.like(name, target))
