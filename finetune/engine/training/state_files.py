"""A checkpoint's files of optimizer, schedule and random state: reading, and errors that name the file."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch

from finetune.engine.checkpoint import tensor_files
from finetune.engine.optimizer import eight_bit
from finetune.engine.training.schedule import move_schedule
from finetune.errors import RunError
from finetune.runtime.types import JsonObject

# Keys of an optimizer's parameter group that are state, not settings. All but the first are of schedule-free ones.
_STATE_IN_GROUPS = frozenset(("params", "k", "train_mode", "weight_sum", "lr_max", "scheduled_lr"))
# An optimizer's kernels read as many numbers of these as the weight has.
_LIKE_WEIGHTS = frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "state1", "state2"))


@contextlib.contextmanager
def explain_load_error(path: Path) -> Iterator[None]:
    """Turn an error while loading `path` into a RunError: the checksum of this file of a checkpoint is right, its
    content is not."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:  # the GPU is full; the file may be fine
        raise
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise RunError(
            f"{path} cannot be used: {lines[0][:200]}. Resume from another checkpoint, or start a new run."
        ) from error


def read_state(path: Path, *, mapped: bool = False) -> JsonObject:
    """Load a file of tensors and plain values onto the host, without running any code in it.

    Args:
        mapped: map the file into memory, for a reader that needs only parts of it.

    Raises:
        RunError: it holds something else.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise RunError(
            f"{path} is not a file of tensors ({str(error).splitlines()[0][:200]}). Resume from another checkpoint."
        ) from error


def load_optimizer_and_schedule(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    *,
    sharded: bool,
    rebuild: bool,
    step: int,
) -> None:
    """Load the state of both from a checkpoint.

    Args:
        sharded: the parameters are sharded; the files hold whole tensors, of which each rank takes its part.
        rebuild: take only the optimizer's state and the schedule's position from the checkpoint. Everything else
            (learning rates, betas, weight decay, the schedule's shape) stays as configured.
        step: optimizer steps of the checkpoint, for a schedule that does not count them.

    Raises:
        RunError: a file cannot be used.
    """
    saved_schedule = read_state(folder / "scheduler.pt")
    position = int(saved_schedule.get("last_epoch", step)) if rebuild else None
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    in_codes = eight_bit.is_used(optimizer)
    if tensor_files.has_optimizer(folder):
        with explain_load_error(folder / "optimizer.json"):
            state = tensor_files.read_optimizer(folder, parameters, in_codes=in_codes)
            _restore(optimizer, schedule, state, saved_schedule, position)
        return
    state = read_state(folder / "optimizer.pt", mapped=sharded)
    with explain_load_error(folder / "optimizer.pt"):
        if sharded:
            state = tensor_files.split_optimizer(state, parameters, in_codes=in_codes)
        _restore(optimizer, schedule, state, saved_schedule, position)


def _restore(
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    state: JsonObject,
    saved_schedule: JsonObject,
    position: int | None,
) -> None:
    """Load both states; with a `position`, the optimizer's numbers alone, and the schedule moves there."""
    configured = [
        {name: value for name, value in group.items() if name not in _STATE_IN_GROUPS}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    low_rank = any("rank" in group for group in optimizer.param_groups)  # GaLore's and APOLLO's states are smaller
    for weight, own in () if low_rank else optimizer.state.items():
        if small := [name for name in _LIKE_WEIGHTS & own.keys() if own[name].numel() < weight.numel()]:
            raise ValueError(f"{small[0]} has {own[small[0]].numel()} numbers, and its weight {weight.numel()}")
    if position is None:
        schedule.load_state_dict(saved_schedule)
        return
    for group, values in zip(optimizer.param_groups, configured, strict=True):
        group.update(values)
    move_schedule(schedule, position)
