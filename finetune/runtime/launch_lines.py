"""Command lines that start ranks, for this project to run and for users to copy."""

from __future__ import annotations

import sys


def launch_command(world_size: int) -> list[str]:
    """This interpreter, with torch's launcher if there are several ranks; to be followed by a module or script."""
    several = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size))
    return [sys.executable, *(several if world_size > 1 else ())]


def user_command(world_size: int, *, on_cpu: bool) -> list[str]:
    """What to print before a module or script in a command for the user.

    One process needs no launcher. `accelerate-launch` is `accelerate launch` without importing accelerate's other
    commands, one of which imports transformers; it has no flags for several ranks on a CPU.
    """
    if world_size == 1:
        return ["python"]
    if on_cpu:
        return ["torchrun", "--standalone", "--nproc_per_node", str(world_size)]
    return ["accelerate-launch", "--multi_gpu", "--num_processes", str(world_size)]
