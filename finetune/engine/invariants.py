"""What must hold on all ranks before the first step. A failed check stops every rank with what is wrong and its name.

The facts of all ranks are gathered first, so that every rank reaches the same verdict and none waits for another.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.errors import RunError, UserError
from finetune.runtime.ranks import distributed, machines, process_group
from finetune.runtime.types import JsonObject, Model
from finetune.text import counted

if TYPE_CHECKING:  # importing it imports torch
    import torch

    from finetune.engine.sharding.shard import Sharding


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the checks need to know about one rank."""

    rank: int
    host: str
    machine: str  # unlike any other machine's or container's, even of the same host name
    local_rank: int
    parameter_devices: list[str]
    current_device: str
    trainer_classes: list[str]  # the trainer's MRO, module-qualified: determines which code computes the loss
    processes: int  # accelerate's world size
    timeout_seconds: float | None  # of the default process group; None for one rank
    finds_unused: bool
    reentrant: bool
    patches: list[str]  # names of the applied patches
    writes: bool  # whether it writes checkpoints and the final model
    divisor: str  # what divides the loss by the supervised tokens of the global batch: "the model" or "this program"
    averages_tokens: bool
    batch: tuple[int, int]  # rows (or packs) per device and forward pass, and passes per optimizer step
    context_parallel: int  # ranks that share each row; 1 if one stands in for them
    global_batch_size: int  # rows (or packs) per step of the plan, over all ranks
    sharding: Sharding | None  # what is sharded; None if nothing was asked to be
    changed_weights: tuple[str, ...]  # frozen weights whose bytes change when a sharded model gathers them


def own_facts(trainer: Any) -> Facts:
    """The facts of this rank."""
    import torch

    from finetune.engine.sharding import digests, shard

    me, sharded = distributed.ranks(), trainer.reduces_once is not None
    model = trainer.model
    cuda = trainer.stack.device == "cuda"
    return Facts(
        rank=me.rank,
        host=socket.gethostname(),
        machine=machines.machine_id(),
        local_rank=me.local_rank,
        parameter_devices=sorted({str(parameter.device) for parameter in model.parameters()}),
        current_device=f"cuda:{torch.cuda.current_device()}" if cuda else "cpu",
        trainer_classes=[f"{one.__module__}.{one.__qualname__}" for one in type(trainer).__mro__],
        processes=trainer.accelerator.num_processes,
        timeout_seconds=process_group.group_timeout_seconds(),
        finds_unused=bool(trainer.args.ddp_find_unused_parameters),
        reentrant=is_checkpointing_reentrant(trainer),
        patches=[verdict.name for verdict in trainer.stack.patches if verdict.applied],
        writes=trainer.args.should_save,
        divisor=loss_normalizer(trainer),
        averages_tokens=trainer.args.average_tokens_across_devices,
        batch=(trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps),
        context_parallel=trainer.context.processes,
        global_batch_size=trainer.plan.global_batch_size,
        sharding=shard.inspect(trainer.model) if sharded else None,
        changed_weights=digests.changed_weights(trainer.model) if sharded else (),
    )


def loss_normalizer(trainer: Any) -> str:
    """What divides the loss by the supervised tokens of the global batch; see SFTTrainer.compute_loss."""
    return "the model" if trainer.model_accepts_loss_kwargs else "this program"


def is_checkpointing_reentrant(trainer: Any) -> bool:
    """Whether gradient checkpointing is reentrant, as Unsloth's own always is."""
    if not trainer.recomputation.kind:
        return False
    if trainer.stack.backend == "unsloth" and trainer.stack.device == "cuda":
        return True
    return bool(trainer.recomputation.options.get("use_reentrant", False))


# In the order in which they are reported.
CHECKS = (
    *("as_many_processes_as_launched", "one_device_per_rank", "same_trainer_on_all_ranks", "same_patches_on_all_ranks"),
    *("timeout_as_configured", "no_search_for_unused_parameters_under_reentrant_checkpointing", "one_writer"),
    *("loss_normalized_globally", "ranks_hold_the_global_batch", "every_matrix_is_sharded"),
    *("sharded_gradients_are_reduced_in_float32", "gathered_weights_keep_their_bytes"),
)


def problems(one: Facts, facts: list[Facts], timeout: int) -> dict[str, str]:
    """What is wrong on a rank, by the names of `CHECKS`.

    Args:
        facts: of all ranks.
        timeout: `training.ddp_timeout`.
    """
    found: dict[str, str] = {}
    first, rank, device, sharded = facts[0], f"rank {one.rank}", one.current_device, one.sharding
    # Otherwise gradients are silently not averaged.
    if one.processes != len(facts):
        found["as_many_processes_as_launched"] = (
            f"accelerate sees a world size of {one.processes} on {rank}, and {len(facts)} were launched"
        )
    # Each rank's weights on its own GPU, and no GPU shared by two ranks of a machine (unsloth issue 3459).
    alike = [other for other in facts[: one.rank] if (other.machine, other.current_device) == (one.machine, device)]
    if device != "cpu" and one.parameter_devices != [device]:
        found["one_device_per_rank"] = (
            f"{rank} computes on {device} and has weights on {', '.join(one.parameter_devices)}; load the model on one "
            "device per rank"
        )
    elif device != "cpu" and alike:
        found["one_device_per_rank"] = (
            f"ranks {alike[0].rank} and {one.rank} share {device} of {one.host}; make one GPU per process visible, "
            "with the same CUDA_VISIBLE_DEVICES on all ranks"
        )
    # A rank on which Unsloth cannot generate its trainer silently falls back to a different loss.
    if one.trainer_classes != first.trainer_classes:
        found["same_trainer_on_all_ranks"] = (
            f"{rank} trains with {one.trainer_classes[1]} and rank 0 with {first.trainer_classes[1]}; delete the "
            "folder that UNSLOTH_COMPILE_LOCATION names and start again"
        )
    if one.patches != first.patches:
        found["same_patches_on_all_ranks"] = (
            f"{rank} applied {one.patches} and rank 0 {first.patches}; use one installation for all"
        )
    # A group that was created earlier keeps its own timeout.
    if one.timeout_seconds is not None and one.timeout_seconds != timeout:
        found["timeout_as_configured"] = (
            f"the process group of {rank} has a timeout of {one.timeout_seconds:.0f} s and training.ddp_timeout is "
            f"{timeout} s: other code created the group first"
        )
    # Together they make DDP fail with "marked as ready twice" (unsloth issue 3713).
    if len(facts) > 1 and one.finds_unused and one.reentrant:
        found["no_search_for_unused_parameters_under_reentrant_checkpointing"] = (
            "training.ddp_find_unused_parameters is on and gradient checkpointing is reentrant; turn off the first "
            "or set training.gradient_checkpointing: false"
        )
    # Several writers of checkpoints and the final model would damage each other's files.
    if len(writers := [other.rank for other in facts if other.writes]) != 1:
        found["one_writer"] = f"ranks {writers} would write the same files; only rank 0 may"
    # The mean of the ranks' means is a different loss (unsloth issue 1952, transformers pull request 39395).
    if one.divisor != first.divisor:
        found["loss_normalized_globally"] = (
            f"on {rank} {one.divisor} divides the loss, on rank 0 {first.divisor}; use the same installation on all "
            "machines"
        )
    elif not one.averages_tokens:
        found["loss_normalized_globally"] = f"average_tokens_across_devices is off on {rank}; leave it on"
    # Ranks with different rows x rows per device x accumulation is the plan's global batch, at every world size.
    rows, passes = one.batch
    if len(facts) * rows * passes != one.global_batch_size * one.context_parallel:
        shared = "" if one.context_parallel == 1 else f" / {one.context_parallel} that share each row"
        found["ranks_hold_the_global_batch"] = (
            f"{counted(len(facts), 'rank')}{shared} x {counted(rows, 'row')} x {passes} accumulated is not the "
            f"global batch of {one.global_batch_size}: the trainer's arguments were changed after they were created"
        )
    # Also frozen ones: one that is whole takes its full memory on each rank. Without any, gradients are not averaged.
    if sharded is not None and (sharded.units == 0 or sharded.whole_matrices):
        held = f"holds {len(sharded.whole_matrices)} matrices whole ({', '.join(sharded.whole_matrices[:3])})"
        found["every_matrix_is_sharded"] = f"training.strategy is shard and {rank} " + (
            f"{held}; was the model changed after it was sharded?"
            if sharded.units
            else "has sharded no module; nothing would be averaged"
        )
    # And the outputs, of which the loss is computed, are float32. accelerate's policy for bf16 has both in bf16.
    if sharded is not None and (sharded.reduce_dtypes, sharded.output_dtype) != (("float32",), "float32"):
        found["sharded_gradients_are_reduced_in_float32"] = (
            f"{rank} reduces gradients in {', '.join(sharded.reduce_dtypes)} and returns outputs in "
            f"{sharded.output_dtype}; expected float32 for both"
        )
    # Packed ones above all: the same bytes before they are sharded and when their units gather them.
    if changed := one.changed_weights:
        found["gathered_weights_keep_their_bytes"] = (
            f"{rank} gathers {counted(len(changed), 'frozen weight')} whose bytes differ from those loaded "
            f"({', '.join(changed[:3])}); this torch or its NCCL copies them wrongly"
        )
    return found


def check(trainer: Any) -> list[str]:
    """Run all checks and return their names, for run.json.

    Raises:
        UserError: on every rank, with the name of the first check that fails and what to do.
    """
    facts = distributed.gather_objects(own_facts(trainer))
    everyone = [problems(one, facts, trainer.args.ddp_timeout) for one in facts]
    for name in CHECKS:
        if wrong := next((found[name] for found in everyone if name in found), None):
            raise UserError(f"{wrong}. Nothing was trained. (Start check: {name.replace('_', ' ')}.)")
    return list(CHECKS)


def same_data_and_versions_on_all_ranks(own: JsonObject) -> None:
    """Check that all ranks hold the same values; called after the data is prepared, before the model is loaded.

    Raises:
        UserError: on every rank, naming the first one that differs from rank 0.
    """
    everyone = distributed.gather_objects(own)
    for rank, other in enumerate(everyone):
        for what, value in other.items():
            if value != everyone[0][what]:
                raise UserError(
                    f"rank {rank} differs from rank 0 in {what}: {value!r} on rank {rank}, {everyone[0][what]!r} on "
                    "rank 0. Give all machines the same files and packages. Nothing was trained."
                )


def check_loss(loss: torch.Tensor) -> None:
    """Check that the loss of a sharded model is float32. Looks at its type only, without a host-device sync.

    Raises:
        RunError: it is not.
    """
    import torch

    if loss.dtype != torch.float32:
        raise RunError(
            f"the loss of a sharded model must be float32, and is {str(loss.dtype).removeprefix('torch.')}. A "
            "function of the model casts its outputs; use training.strategy: ddp."
        )


def check_memory(model: Model, optimizer: torch.optim.Optimizer, name: str, weights: str = "float32") -> None:
    """Check after the first optimizer step that no rank holds more of a sharded model than predicted.

    Args:
        name, weights: as `training.optim` and `training.master_weights`.

    Raises:
        UserError: on every rank, naming the first that does.
    """
    from finetune.engine.sharding import memory_per_rank

    expected = memory_per_rank.predicted_bytes(model, distributed.ranks().world_size, name, weights)
    everyone = distributed.gather_objects(
        memory_per_rank.excess(memory_per_rank.allocated_bytes(model, optimizer), expected)
    )
    for rank, wrong in enumerate(everyone):
        if wrong is not None:
            raise UserError(
                f"rank {rank} holds more memory than predicted ({wrong}): part of the model is not sharded. Shard it "
                "after the last change to it, or use training.strategy: ddp."
            )


def check_gradients(model: Model) -> None:
    """Check after the first backward that every trainable weight has a gradient, on every rank.

    Raises:
        UserError: names the first weights without one.
    """
    from finetune.engine import multimodal

    missing = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    inside = "The text decoder has layers for images or sound, which rows of text do not reach. Use another model."
    drop = "Remove them from lora.target_modules and lora.modules_to_save, or use data that reaches them."
    everyone = distributed.gather_objects(missing[:5])
    for rank, names in enumerate(everyone):
        if names:
            raise UserError(
                f"trainable weights without a gradient after the first step, on rank {rank}: {', '.join(names)}. "
                + (inside if multimodal.towers(model) else drop)
            )
