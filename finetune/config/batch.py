"""How a global batch is divided over ranks, and the learning rate that goes with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from finetune.config.schema import DataConfig, TrainingConfig
from finetune.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One optimizer step: `global_batch_size == per_device * accumulation * data_ranks`, in rows or packs."""

    per_device: int
    accumulation: int
    global_batch_size: int

    def divided(self, per_device: int) -> Batch:
        """The same step in micro-batches of another size."""
        return replace(self, per_device=per_device, accumulation=self.per_device * self.accumulation // per_device)


DEFAULT_GLOBAL_BATCH = 16
LARGEST_GLOBAL_BATCH = 2**20
LARGEST_DEFAULT_PER_DEVICE = 8  # also what transformers takes for per_device_train_batch_size
LARGEST_DEFAULT_TOKENS = 16_384  # of packs: 8 rows of the default max_length


def data_ranks(training: TrainingConfig, world_size: int) -> int:
    """How many of `world_size` ranks hold different rows: `training.context_parallel` ranks share each row.

    Raises:
        UserError: that number does not divide the world size. Lists those that do.
    """
    size = training.context_parallel
    if world_size % size:
        allowed = [str(number) for number in range(1, world_size + 1) if world_size % number == 0]
        raise UserError(
            f"training.context_parallel {size} does not divide {world_size} (processes), and each row is shared by "
            f"{size} of them. Set it to {' or '.join(allowed)}, or start a multiple of {size} processes "
            f"(`torchrun --nproc_per_node {size} ...`)."
        )
    return world_size // size


def ranks_to_share_longer_rows(shared: int, gpus: int) -> int | None:
    """The next larger `training.context_parallel` on so many GPUs; None if there is none."""
    return next((ranks for ranks in range(2 * shared, gpus + 1, shared) if gpus % ranks == 0), None)


def resolve_batch(training: TrainingConfig, world_size: int, data: DataConfig | None = None) -> Batch:
    """Divide the global batch exactly over the `data_ranks` of `world_size` ranks.

    The user sets `global_batch_size`. Without it, it is per device x accumulation x data ranks, as in TRL, if one of
    the two factors is given, and 16 if none is. Whatever is left open follows: the per-device size is the largest
    divisor of a rank's rows that is at most 8, or with `data.packing` at most as many packs as hold 16,384 tokens.

    Raises:
        UserError: the settings do not multiply to the global batch on this world size. Lists the world sizes up to 64
            that fit, and the nearest batch sizes.
    """
    ranks = data_ranks(training, world_size)
    per_device, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    global_batch_size = training.global_batch_size
    most = LARGEST_DEFAULT_PER_DEVICE
    if data is not None and data.packing and data.row_length is not None:
        most = min(most, max(LARGEST_DEFAULT_TOKENS // data.row_length, 1))
    if grows_with_world_size(training):
        per_device = per_device or most
        global_batch_size = per_device * (accumulation or 1) * ranks
    global_batch_size = global_batch_size or DEFAULT_GLOBAL_BATCH
    if global_batch_size > LARGEST_GLOBAL_BATCH:
        raise UserError(
            f"The global batch has {global_batch_size:,} rows, and at most {LARGEST_GLOBAL_BATCH:,} are planned per "
            "step. Lower training.global_batch_size, or training.per_device_train_batch_size and "
            "training.gradient_accumulation_steps."
        )

    unit = (per_device or 1) * (accumulation or 1)  # rows per rank that the user's numbers fix
    all_fixed = per_device is not None and accumulation is not None

    def fits(ranks: int, size: int) -> bool:
        return size == unit * ranks if all_fixed else size % (unit * ranks) == 0

    if not fits(ranks, global_batch_size):
        raise UserError(_no_fit(training, ranks, global_batch_size, unit, all_fixed, fits))
    per_rank = global_batch_size // ranks
    if per_device is None:
        divisors = (size for size in range(1, most + 1) if per_rank % size == 0)
        per_device = per_rank // accumulation if accumulation else max(divisors)
    return Batch(per_device=per_device, accumulation=per_rank // per_device, global_batch_size=global_batch_size)


def grows_with_world_size(training: TrainingConfig) -> bool:
    """Whether the global batch is a product of the number of ranks: one of its factors is given, and it is not."""
    given = training.per_device_train_batch_size, training.gradient_accumulation_steps
    return training.global_batch_size is None and given != (None, None)


def with_fixed_batch(training: TrainingConfig, world_size: int, data: DataConfig | None = None) -> TrainingConfig:
    """The settings with the global batch that a launch of `world_size` ranks has, so that it is the same on others."""
    if not grows_with_world_size(training):
        return training
    size = resolve_batch(training, world_size, data).global_batch_size
    return replace(training, global_batch_size=size, gradient_accumulation_steps=None)


def fixed_batch_arguments(training: TrainingConfig, world_size: int, data: DataConfig | None = None) -> list[str]:
    """What `fixed` changes, as arguments of a command."""
    if not grows_with_world_size(training):
        return []
    size = with_fixed_batch(training, world_size, data).global_batch_size
    return ["--training.global_batch_size", str(size), "--training.gradient_accumulation_steps", "null"]


def _no_fit(
    training: TrainingConfig,
    ranks: int,
    global_batch_size: int,
    fixed: int,
    all_fixed: bool,
    fits: Callable[[int, int], bool],
) -> str:
    unit, shared = fixed * ranks, training.context_parallel
    below, above = global_batch_size // unit * unit, math.ceil(global_batch_size / unit) * unit
    sizes = [unit] if all_fixed else [size for size in (below, above) if size > 0]
    world_sizes = [str(world) for world in range(shared, 65, shared) if fits(world // shared, global_batch_size)]
    numbers = {
        "training.per_device_train_batch_size": training.per_device_train_batch_size,
        "training.gradient_accumulation_steps": training.gradient_accumulation_steps,
    }
    product = "".join(f" x {value} ({name})" for name, value in numbers.items() if value is not None)
    origin = "" if training.global_batch_size is not None else " (the default)"
    relation = "is not" if all_fixed else "is not a multiple of"
    processes = "processes" if shared == 1 else f"{ranks * shared} processes in groups of {shared} that share rows"
    remove = ", or remove the other settings" if product else ""
    product += f" = {unit}" if product else ""
    fitting = f"Use one of these numbers of processes, which fit {global_batch_size}: {', '.join(world_sizes)}. Or"
    return (
        f"training.global_batch_size {global_batch_size}{origin} {relation} {ranks} ({processes}){product}."
        f" {fitting if world_sizes else f'No number of processes up to 64 fits {global_batch_size}. You can'}"
        f" set training.global_batch_size to {' or '.join(map(str, sizes))}{remove}."
    )
