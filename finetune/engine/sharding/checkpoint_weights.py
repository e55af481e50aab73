"""Weights of a sharded model in the usual format: written whole by all ranks, read in parts by each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from finetune.engine.checkpoint import tensor_files
from finetune.engine.optimizer import rounding
from finetune.engine.optimizer.master_weights import saved_dtype
from finetune.engine.sharding import shard, unit_loading
from finetune.errors import RunError
from finetune.runtime.bootstrap import errors_only
from finetune.runtime.ranks import distributed
from finetune.runtime.types import Model


def save_model(model: Model, folder: Path, dtype: torch.dtype | None = None, in_checkpoint: bool = False) -> None:
    """Write the model, or its adapter, as `save_pretrained` would. Every rank calls it.

    Args:
        dtype: of the saved model, not of an adapter; None for that of the weights. The weights of a checkpoint stay as
            they are.
    """
    shard.reshard(model)
    if getattr(model, "peft_config", None) is not None:
        _save_adapter(model, folder)
    elif getattr(model, "_weight_conversions", None) or model.is_remote_code():
        _save_through_transformers(model, folder, None if in_checkpoint else dtype)
        if dtype is not None and distributed.ranks().is_main:
            _save_config(model, folder, dtype)
    else:
        found, dtypes = weights(model), None
        if dtype is not None and not in_checkpoint:
            dtypes = {name: saved_dtype(model, name, one, dtype) for name, one in found.items()}
        tensor_files.write(folder, "model", found, dtypes=dtypes)
        if distributed.ranks().is_main:
            _save_config(model, folder, dtype or model.dtype)
    distributed.barrier()


def weights(model: Model) -> dict[str, torch.Tensor]:
    """The tensors of a model's files, by their names there: tied weights once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        owner = id(parameters.get(name, tensor))
        if owner not in seen and name not in (getattr(model, "_keys_to_ignore_on_save", None) or ()):
            found[name] = tensor
            seen.add(owner)
    return found


def _save_config(model: Model, folder: Path, dtype: torch.dtype) -> None:
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 makes a subclass
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _save_adapter(model: Model, folder: Path) -> None:
    """An adapter is small: rank 0 keeps it whole on its host, one gathered tensor after the other."""
    kept: dict[str, torch.Tensor] = {}
    own: list[int] = []  # nonzero elements in this rank's part of each tensor
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:
            own.append(int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).count_nonzero()))
            gathered = shard.gather_full(tensor.detach())
            if distributed.ranks().is_main:
                kept[name] = gathered.cpu().contiguous()
    held = distributed.sum_over_ranks(own)
    stored = 0
    if distributed.ranks().is_main:
        model.save_pretrained(folder, state_dict=kept, safe_serialization=True)
        with safe_open(folder / "adapter_model.safetensors", "pt") as written:
            stored = sum(int(written.get_tensor(key).count_nonzero()) for key in written.keys())  # noqa: SIM118
    check_adapter(int(sum(held)), distributed.gather_objects(stored)[0])


def check_adapter(held: int, stored: int) -> None:
    """Check that an adapter was saved whole. A rank that writes its own part as if it were the adapter leaves the rest
    at zero, in `lora_B` without any error when it is loaded (axolotl issue 3772).

    Args:
        held: nonzero elements, over all ranks.
        stored: nonzero elements in the file.

    Raises:
        RunError: on every rank.
    """
    if held != stored:
        raise RunError(
            f"the saved adapter is incomplete: the ranks hold {held:,} nonzero elements, the file {stored:,}. The last "
            "complete checkpoint is not affected; resume from it with training.strategy: ddp."
        )


def _save_through_transformers(model: Model, folder: Path, dtype: torch.dtype | None) -> None:
    """Models whose files have other tensors than the model: transformers converts them, whole on rank 0's host."""
    kept = {}
    for name, tensor in weights(model).items():
        gathered = shard.gather_full(tensor)
        if distributed.ranks().is_main:
            if dtype is not None:
                gathered = rounding.round_to(gathered.cpu(), saved_dtype(model, name, gathered, dtype), name)
            kept[name] = gathered.cpu()
    if distributed.ranks().is_main:
        model.save_pretrained(folder, state_dict=kept, safe_serialization=True)


def load_model(model: Model, checkpoint: Path) -> None:
    """Read the weights of a checkpoint, or its adapter: each rank its part of a sharded model.

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
        if not model.state_dict().keys() >= set(stored.keys()):
            _load_converted(model, checkpoint)
            return
    for name, target in wanted.items():
        if name not in stored or stored.shape(name) != tuple(target.shape):
            raise _unfit(checkpoint, name)
        tensor_files.copy_into(target, stored.read_like(name, target))


def _load_converted(model: Model, checkpoint: Path) -> None:
    """From files with other tensors than the model, as those of a mixture of experts: a file has each expert, the model
    a stack. transformers converts them when it loads a model: each rank of a machine in turn loads it whole on its
    host, and keeps its part."""
    kind: Any = next(one for one in type(model).__mro__ if not one.__name__.startswith("FSDP"))  # FSDP2's subclass
    wide = any(one.dtype == torch.float32 for one in model.parameters())
    me = distributed.ranks()
    turns = max(distributed.gather_objects(me.local_world_size))
    with unit_loading.one_rank_at_a_time(me.local_rank, turns):
        with torch.random.fork_rng(devices=[]), errors_only():  # a model is initialized, then loaded
            dtype = torch.float32 if wide else model.dtype
            loaded, report = kind.from_pretrained(checkpoint, dtype=dtype, device_map="cpu", output_loading_info=True)
        found = loaded.state_dict()
        for name, target in weights(model).items():
            if name in report["missing_keys"] or name not in found or found[name].shape != target.shape:
                raise _unfit(checkpoint, name)
            span = tensor_files.local_rows(target)
            tensor_files.copy_into(target, found[name] if span is None else found[name][span[0] : span[1]])
        del loaded, found


def _unfit(checkpoint: Path, name: str) -> RunError:
    return RunError(
        f"{checkpoint} does not fit the model: {name} is missing or has another shape. Resume from another checkpoint, "
        "or start a new run."
    )
