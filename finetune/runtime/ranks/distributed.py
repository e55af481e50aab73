"""Ranks, and collectives on the host. No other module reads RANK, LOCAL_RANK or WORLD_SIZE.

Importing this module does not import torch: the configuration is checked before anything heavy is loaded.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.runtime.ranks import launcher, rank_status
from finetune.runtime.types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's rank, and the number of ranks."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def is_main(self) -> bool:
        """The one process of a run that writes files and prints to the terminal."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """The one process of each machine that prepares the data there."""
        return self.local_rank == 0

    @property
    def first_local(self) -> int:
        """The first rank of this machine; launchers number the ranks of a machine one after the other."""
        return self.rank - self.local_rank

    @property
    def on_several_machines(self) -> bool:
        """Whether the run has ranks on other machines."""
        return self.local_world_size < self.world_size

    def is_local(self, rank: int) -> bool:
        """Whether a rank is on this machine."""
        return self.first_local <= rank < self.first_local + self.local_world_size


@functools.cache
def ranks() -> Ranks:
    """The ranks in the launcher's environment; a single rank without a launcher.

    Raises:
        UserError: the variables are inconsistent, or the launcher started fewer processes than it was asked for.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    given = {name: os.environ.get(name) for name in names}
    if given["WORLD_SIZE"] is None:
        asked = launcher_profile().get("num_processes", 1)
        if asked > 1:
            raise UserError(
                f"accelerate launch was asked for {asked} processes but started one, as it does with "
                "`distributed_type: MULTI_CPU`. Launch with `torchrun --standalone --nproc_per_node "
                f"{asked}`, or set `distributed_type: MULTI_GPU` with `use_cpu: true`."
            )
        return Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1)
    try:
        rank, local_rank, world_size = (int(given[name] or "missing") for name in names)
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError:
        raise UserError(
            f"The launcher's variables are incomplete: {given}. All three must be integers; start the run with "
            "`accelerate launch -m finetune.train` or `torchrun -m finetune.train`."
        ) from None
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise UserError(
            f"The launcher's variables are inconsistent: {given}, LOCAL_WORLD_SIZE={local_world_size}. Start the run "
            "with `accelerate launch -m finetune.train` or `torchrun -m finetune.train`."
        )
    if "LOCAL_WORLD_SIZE" not in os.environ and rank != local_rank:
        raise UserError(
            f"RANK={rank} and LOCAL_RANK={local_rank} are of a run on several machines, but LOCAL_WORLD_SIZE is not "
            "set. Set it on every machine to the number of its ranks, or start the run with torchrun "
            "(docs/two-machines.md)."
        )
    profile = launcher_profile()
    asked, machines_asked = profile.get("num_processes", 1), profile.get("num_machines", 1)
    if machines_asked != 1 and asked > 1 and asked != world_size:
        raise UserError(
            f"accelerate launch was asked for {asked} processes on {machines_asked} machines and started {world_size}: "
            "it starts the same number on each. Set num_processes to a multiple of num_machines; for machines with "
            "different numbers of GPUs use torchrun, with its own --nproc_per_node on each (docs/two-machines.md)."
        )
    return Ranks(rank=rank, local_rank=local_rank, world_size=world_size, local_world_size=local_world_size)


@functools.cache
def launcher_profile() -> JsonObject:
    """The settings of the `accelerate launch` that started this process; empty for other launchers.

    accelerate does not pass on the requested number of processes, nor, in a distributed launch, the choice of the CPU.
    Both are read from the parent's command line and the profile it names.
    """
    argv = launcher.accelerate_arguments()
    if argv is None:
        return {}
    import yaml

    own = argv[: argv.index("-m")] if "-m" in argv else argv  # arguments after -m belong to the script
    options = dict(zip(own, own[1:], strict=False))
    options |= dict(arg.split("=", 1) for arg in own if arg.startswith("--") and "=" in arg)
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    file = Path(options.get("--config_file", home / "accelerate" / "default_config.yaml"))
    try:
        profile = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.is_file() else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"accelerate's profile {file} is not valid YAML: {why}. Fix it or use another.") from None
    if not isinstance(profile, dict):
        raise UserError(f"accelerate's profile {file} must be a mapping of settings. Fix it or use another.")
    asked = options.get("--num_processes", profile.get("num_processes"))
    if asked in (None, -1):  # accelerate's placeholders for "see the command line"
        asked = 1
    if not str(asked).isdecimal() or int(asked) < 1:
        raise UserError(f"accelerate's num_processes must be at least 1: {asked}. Give the number of ranks to start.")
    profile["num_processes"] = int(asked)
    on = str(options.get("--num_machines", profile.get("num_machines") or 1))
    profile["num_machines"] = int(on) if on.isdecimal() else 1
    if "--cpu" in own or "--use_cpu" in own:
        profile["use_cpu"] = True
    if "--num_cpu_threads_per_process" in options:
        profile["num_cpu_threads_per_process"] = options["--num_cpu_threads_per_process"]
    return profile


def ended_ranks() -> str | None:
    """Which local ranks of this launch have ended, for messages: those that are missing among the launcher's children.
    None if there are none, or this cannot be told."""
    import psutil

    try:
        children = psutil.Process(os.getppid()).children()
        alive = {one.environ().get("LOCAL_RANK") for one in children if one.status() != psutil.STATUS_ZOMBIE}
    except psutil.Error:
        return None
    me = ranks()
    ended = ", ".join(str(rank) for rank in range(me.local_world_size) if str(rank) not in alive)
    if not ended or str(me.local_rank) not in alive:
        return None
    return f"the end of local rank {ended}, which was killed if it left no error, perhaps for memory (see dmesg)"


def wants_cpu() -> bool:
    """Whether the launcher asked for CPU training (`use_cpu: true` in the accelerate profile)."""
    return bool(launcher_profile().get("use_cpu"))


# --- collectives; with one rank each of them just returns its argument -----------------------------------------------

_host_group: Any = None  # gloo: for objects and flags, so that neither touches the GPU


def use_host_group(group: Any) -> None:
    """Run the host's collectives in this process group; None when it has ended."""
    global _host_group
    _host_group = group


def host_group() -> Any:
    """That process group; None if the ranks cannot communicate."""
    return _host_group


def connected() -> bool:
    """Whether the ranks can communicate; false with one rank."""
    return _host_group is not None


def barrier() -> None:
    """Wait until every rank has called this."""
    if _host_group is not None:
        import torch.distributed as dist

        with rank_status.waiting("barrier"):
            dist.barrier(group=_host_group)


def drain_nccl_work() -> None:
    """Block until NCCL's watchdog has retired all outstanding collectives, so that the next one releases their tensors.

    The watchdog polls ten times a second. For collectives whose work object nobody waits on, such as DDP's, it queues
    the tensors, and the next collective releases them (torch's ProcessGroupNCCL.cpp, `shelvesToUnstash_`). Does nothing
    on other backends.
    """
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_backend() == "nccl":
        group = dist.distributed_c10d._get_default_group()
        if hasattr(group, "_wait_for_pending_works"):  # private: without it, a run only needs more memory
            group._wait_for_pending_works()


def gather_objects(value: object) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank. Runs on the host, without a GPU synchronization."""
    if _host_group is None:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * ranks().world_size
    with rank_status.waiting("all_gather_object"):
        dist.all_gather_object(values, value, group=_host_group)
    return values


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Element-wise sum of float64 `values` over all ranks, on the host."""
    if _host_group is None:
        return list(values)
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64)
    with rank_status.waiting("all_reduce"):
        dist.all_reduce(tensor, group=_host_group)
    return tensor.tolist()


def gather_floats(values: Sequence[float]) -> list[list[float]]:
    """Every rank's float64 `values`, in rank order, on every rank; of the same length on all. On the host."""
    if _host_group is None:
        return [list(values)]
    import torch
    import torch.distributed as dist

    own = torch.tensor(values, dtype=torch.float64)
    parts = [torch.empty_like(own) for _ in range(ranks().world_size)]
    dist.all_gather(parts, own, group=_host_group)
    return [part.tolist() for part in parts]


class DelayedFlag:
    """Whether any rank has raised its flag, checked every step and known one step later, so that no step waits.

    All ranks get the same answer at the same step: `ask(flag)` starts a reduction of this step's flags on the host and
    returns the result of the previous one.
    """

    def __init__(self) -> None:
        self._pending: tuple[Any, Any] | None = None

    def ask(self, flag: bool) -> bool:
        """True on all ranks at the step after one in which any rank's `flag` was true."""
        if _host_group is None:
            return flag
        import torch
        import torch.distributed as dist

        answer = self.settle()
        tensor = torch.tensor([int(flag)])
        self._pending = (dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=_host_group, async_op=True), tensor)
        return answer

    def settle(self) -> bool:
        """Wait for the pending reduction, if any, and return its result."""
        if self._pending is None:
            return False
        work, tensor = self._pending
        with rank_status.waiting("all_reduce of the stop flags"):
            work.wait()
        self._pending = None
        return bool(tensor.item())
