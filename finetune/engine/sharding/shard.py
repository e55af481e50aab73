"""A model sharded over all ranks with torch's FSDP2 (`training.strategy: shard`).

Each decoder layer is a unit: its parameters are gathered for its forward and backward pass and freed afterwards, and
its gradients are reduced into each rank's part. Every parameter is split along its first dimension. The rest of the
model (final norm, output head, tied embeddings) is the root unit.

`fully_shard` is called here, not by accelerate, which drops FSDP without a word on CPU ranks (accelerate/state.py
lists the distributed types that may have it) and takes its policies from the launcher's profile. accelerate then gets
a model that is already sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from finetune.config import Config
from finetune.engine import multimodal
from finetune.engine.sharding import digests, memory_per_rank
from finetune.errors import UserError
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject, Model


def is_requested(config: Config) -> bool:
    """Whether this run shards its model. On one rank there is nothing to share."""
    return config.training.strategy == "shard" and distributed.ranks().world_size > 1


def is_sharded(model: Model) -> bool:
    """Whether `apply` has sharded this model."""
    return isinstance(base_model(model), FSDPModule)


def base_model(model: Model) -> Any:
    """The causal language model, inside an adapter's wrapper if there is one: generation calls it directly."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# --- sharding ---------------------------------------------------------------------------------------------------------


def policy(dtype: torch.dtype, *, root: bool) -> MixedPrecisionPolicy:
    """Parameters are gathered in `dtype`; gradients are reduced, and the model's outputs returned, in float32."""
    return MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32 if root else None,
    )


def units(model: Model) -> list[tuple[str, nn.Module]]:
    """Name and module of each unit below the root, in the order of the model.

    Raises:
        UserError: the model names no layer class, or has no layer of it.
    """
    base = base_model(model)
    classes = set(getattr(base, "_no_split_modules", None) or ())
    beside = multimodal.towers(model)
    found: list[tuple[str, nn.Module]] = []
    for name, module in base.named_modules():
        if any(name == tower or name.startswith(f"{tower}.") for tower in beside):
            continue
        if type(module).__name__ in classes and not any(name.startswith(f"{outer}.") for outer, _ in found):
            found.append((name, module))
    if not found:
        named = f"names {', '.join(sorted(classes))}, of which it has none" if classes else "names none"
        raise UserError(
            f"training.strategy is shard, which shards a model layer by layer, and {type(base).__name__} {named} as "
            "its layer class (`_no_split_modules`). Use training.strategy: ddp, or another model."
        )
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:  # tied weights must be in one unit: the root
        found = [(name, module) for name, module in base.named_modules() if module is embedding] + found
    return [*beside.items(), *found]  # a tower is a unit that nothing gathers


def check(device: str, dtype: torch.dtype) -> None:
    """Check what only this device decides.

    Raises:
        UserError: the type of `model.dtype: auto` cannot be trained sharded.
    """
    if dtype == torch.float16:
        raise UserError(
            f"training.strategy is shard, and model.dtype: auto is float16 on this {device} device, whose loss scale "
            "all shards would have to share. Set model.dtype to float32 or bfloat16 (emulated), or use newer GPUs."
        )


def mesh(device: str) -> DeviceMesh:
    """All ranks, in one dimension. Every rank calls it."""
    return init_device_mesh(device, (distributed.ranks().world_size,))


def separate_compile_caches() -> None:
    """Give each rank its own entries in torch's cache of compiled code, which a sharded optimizer may use.

    Without this, ranks share them although their parts have different sizes and devices: the second start of a run
    fails (pytorch#188390).
    """
    me, config = distributed.ranks(), cast(Any, torch.compiler).config
    own = f"rank {me.rank} of {me.world_size}"
    if own not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {own}".strip()


def apply(model: Model, mesh: DeviceMesh, dtype: torch.dtype, fill: Callable[[nn.Module], None] | None = None) -> None:
    """Shard `model` over the ranks of `mesh`, in place. Every rank calls it with the same model; it waits for no other.

    Args:
        dtype: in which the parameters compute.
        fill: called with each unit before it is sharded, to load weights that are not there yet. The root comes last:
            by then only what belongs to no other unit is missing.
    """
    for _, module in units(model):
        if fill is not None:
            fill(module)
        digests.record_digests(module, policy(dtype, root=False).param_dtype)
        module.gathered_by = own = policy(dtype, root=False)  # type: ignore[assignment]  # FSDP2 has no public way to read it
        fully_shard(module, mesh=mesh, mp_policy=own, reshard_after_forward=True)
    if fill is not None:
        fill(base_model(model))
    digests.record_digests(base_model(model), policy(dtype, root=True).param_dtype)
    base_model(model).gathered_by = own = policy(dtype, root=True)
    fully_shard(base_model(model), mesh=mesh, mp_policy=own)


def fsdp_modules(model: Model) -> Iterator[FSDPModule]:
    """The units, and the root."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: Model) -> None:
    """Free what the root has gathered. After a pass without a backward pass it would keep it, and its parameters would
    not be DTensors."""
    for module in fsdp_modules(model):
        module.reshard()


def set_reduction(model: Model, reduces: bool) -> None:
    """Whether the next backward pass reduces the gradients. If not, each rank keeps its own, unsharded, in float32."""
    base_model(model).set_requires_gradient_sync(reduces)


def reduces_once(config: Config) -> bool | None:
    """Whether the gradients of a step are reduced in its last backward pass only; None if the model is not sharded."""
    return would_reduce_once(config) if is_requested(config) else None


def would_reduce_once(config: Config) -> bool:
    """The same for a run on several ranks."""
    chosen = config.training.shard_reduce
    return not config.model.full_finetuning if chosen == "auto" else chosen == "once"


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor gathered on every rank; other tensors as they are. A collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


_PIECE = 2**24  # numbers squared at a time: 64 MiB


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Norm of all tensors together, a float32 scalar on their device. A collective if they are sharded.

    torch's own has the tensors' type, which rounds by up to 0.4 % in bfloat16; on a CPU it adds a tensor's squares one
    after the other, which is off by 7e-4 for 16 M numbers, and less for parts of them. A sum is pairwise.
    """
    squares: list[torch.Tensor] = []
    split = False
    for tensor in tensors:
        split |= isinstance(tensor, DTensor)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        squares += [piece.float().square().sum() for piece in local.flatten().split(_PIECE)]
    total = torch.stack(squares).sum()
    if split:
        torch.distributed.all_reduce(total)
    return total.sqrt()


# --- what is sharded --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What this rank holds of the model, for the invariants and run.json.

    units:             modules with parameters of their own that are gathered and freed together, the root included
    sharded_fraction:  elements of parameters that are split over the ranks / elements of all parameters
    local_elements:    elements on this rank
    whole_matrices:    names of parameters with two or more dimensions that are not split
    param_dtypes:      in which parameters are gathered; "stored" if that is their own type
    reduce_dtypes:     in which gradients are reduced
    output_dtype:      of the model's outputs
    """

    units: int
    sharded_fraction: float
    local_elements: int
    whole_matrices: tuple[str, ...]
    param_dtypes: tuple[str, ...]
    reduce_dtypes: tuple[str, ...]
    output_dtype: str


def inspect(model: Model) -> Sharding:
    """Count what is sharded, on this rank."""
    modules = list(fsdp_modules(model))
    named = list(model.named_parameters())
    split = [one for _, one in named if isinstance(one, DTensor)]
    unknown = MixedPrecisionPolicy()  # of what other code has sharded: no type is float32, which the invariants refuse
    policies = [getattr(module, "gathered_by", unknown) for module in modules]
    total = sum(one.numel() for _, one in named)
    return Sharding(
        units=len(modules),
        sharded_fraction=sum(one.numel() for one in split) / max(total, 1),
        local_elements=sum((one.to_local() if isinstance(one, DTensor) else one).numel() for _, one in named),
        whole_matrices=tuple(name for name, one in named if one.dim() > 1 and not isinstance(one, DTensor)),
        param_dtypes=_names(one.param_dtype or "stored" for one in policies),
        reduce_dtypes=_names(one.reduce_dtype for one in policies),
        output_dtype=next(iter(_names(one.output_dtype for one in policies[:1])), "none"),
    )


def sharding_record(model: Model, optimizer: str, weights: str) -> JsonObject:
    """What run.json has about the sharding of a model; `local_elements` and `parameter_bytes` per rank. Every rank
    calls it before training.

    Args:
        optimizer, weights: as `training.optim` and `training.master_weights`.
    """
    found = inspect(model)
    own = found.local_elements, memory_per_rank.allocated_bytes(model).parameters
    elements, held = zip(*distributed.gather_objects(own), strict=True)
    predicted = asdict(memory_per_rank.predicted_bytes(model, distributed.ranks().world_size, optimizer, weights))
    return asdict(found) | {
        "local_elements": list(elements),
        "parameter_bytes": list(held),
        "predicted_bytes_per_rank": predicted,
    }


def _names(found: Iterable[object]) -> tuple[str, ...]:
    return tuple(sorted({str(one).removeprefix("torch.") for one in found}))
