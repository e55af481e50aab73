"""Weights of a checkpoint whose files have other tensors than the model, as those of a mixture of experts: a file has
each expert, the model a stack. transformers converts them when it loads a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from finetune.engine.checkpoint.tensor_files import TensorFiles
from finetune.errors import RunError
from finetune.runtime.bootstrap import errors_only
from finetune.runtime.types import Model


def needed(model: Model, folder: Path) -> bool:
    """Whether a checkpoint of a fully trained model has other tensors than the model."""
    try:
        stored = TensorFiles(folder, "model")
    except FileNotFoundError:  # an adapter's
        return False
    return not model.state_dict().keys() >= set(stored.keys())


def read(model: Model, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the model in a checkpoint, converted and whole, on the host.

    Raises:
        RunError: they do not fit the model.
    """
    kind: Any = next(one for one in type(model).__mro__ if not one.__name__.startswith("FSDP"))  # FSDP2's subclass
    wide = any(one.dtype == torch.float32 for one in model.parameters())
    with torch.random.fork_rng(devices=[]), errors_only():  # a model is initialized, then loaded
        loaded = kind.from_pretrained(folder, dtype=torch.float32 if wide else model.dtype, device_map="cpu")
    found = loaded.state_dict()
    own = model.state_dict()
    if bad := [name for name, one in own.items() if name not in found or found[name].shape != one.shape]:
        raise RunError(f"{folder} does not fit the model: {bad[0]} is missing or has another shape. Start a new run.")
    return found
