"""A checkpoint's files of optimizer, schedule and random state: reading, and errors that name the file."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from finetune.engine.checkpoint import tensor_files
from finetune.engine.optimizer import eight_bit
from finetune.engine.training.schedule import move_schedule
from finetune.errors import RunError
from finetune.runtime.command import print_line
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
    with explain_load_error(path):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


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
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    in_codes, whole = eight_bit.is_used(optimizer), not (folder / tensor_files.OPTIMIZER_FILE).is_file()
    path = folder / ("optimizer.pt" if whole else tensor_files.OPTIMIZER_FILE)
    configured = [
        {name: value for name, value in group.items() if name not in _STATE_IN_GROUPS}
        for group in optimizer.param_groups
    ]
    state = read_state(path, mapped=sharded) if whole else {}
    with explain_load_error(path):
        if not whole:
            state = tensor_files.read_optimizer(folder, parameters, in_codes=in_codes)
        elif sharded:
            state = tensor_files.split_optimizer(state, parameters, in_codes=in_codes)
        optimizer.load_state_dict(state)
        for group, values in zip(optimizer.param_groups, configured, strict=True):
            group.update(values if rebuild else {})
            _check_values(group, values)
        if without := _count_without_state(optimizer):
            missing = f"{path} has no state of {without} of {len(parameters)} weights"
            print_line(f"warning: {missing}. That is right if they had no gradient so far.", style="yellow")
    with explain_load_error(folder / "scheduler.pt"):
        if rebuild:
            move_schedule(schedule, int(saved_schedule.get("last_epoch", step)))
            return
        made = schedule.state_dict()
        schedule.load_state_dict(saved_schedule)
        _check_values(schedule.state_dict(), made)


def _check_values(found: JsonObject, made: JsonObject) -> None:
    """Raise ValueError if a setting or a number from a file is not of the kind that this run has made itself."""

    def fits(value: object, like: object) -> bool:
        if isinstance(like, list | tuple):
            return isinstance(value, list | tuple) and len(value) == len(like) and all(map(fits, value, like))
        if isinstance(like, float | int | torch.Tensor) and not isinstance(like, bool):
            return isinstance(value, float | int | torch.Tensor) and not math.isnan(value)
        return like is None or value is None or type(value) is type(like)

    for name, like in made.items():
        if not fits(found.get(name), like):
            raise ValueError(f"its {name} is {found.get(name)!r}, and this run's {like!r}")


def _count_without_state(optimizer: torch.optim.Optimizer) -> int:
    """Of the trained weights, how many have no state, with an optimizer (Adam's kind) that keeps one for each. Raises
    ValueError if a state is of another shape than its weight, or has a NaN."""
    without, low_rank = 0, any("rank" in group for group in optimizer.param_groups)  # GaLore's states are smaller
    for group in optimizer.param_groups:
        for weight in group["params"]:
            own = optimizer.state.get(weight) or {}
            without += not own and "betas" in group
            for name, value in own.items():
                if name in _LIKE_WEIGHTS and value.shape != weight.shape and not low_rank:
                    raise ValueError(f"{name} has shape {list(value.shape)}, and its weight {list(weight.shape)}")
                local = value.to_local() if isinstance(value, DTensor) else value
                if type(local) is torch.Tensor and local.is_floating_point() and local.numel() and local.amin().isnan():
                    raise ValueError(f"{name} has a NaN")
    return without
