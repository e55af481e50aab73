"""Command lines that start ranks, for this project to run and for users to copy."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def ranks(world_size: int) -> list[str]:
    """This interpreter, with torch's launcher if there are several ranks; to be followed by a module or script."""
    return [sys.executable, *(_torchrun(world_size) if world_size > 1 else ())]


def torchrun(world_size: int) -> list[str]:
    """This interpreter with torch's launcher, even for one rank."""
    return [sys.executable, *_torchrun(world_size)]


def _torchrun(world_size: int) -> Sequence[str]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size))


def shown(world_size: int, *, on_cpu: bool) -> list[str]:
    """The launcher to print in a command for the user. accelerate has no flags for several ranks on a CPU."""
    if on_cpu and world_size > 1:
        return ["torchrun", "--standalone", "--nproc_per_node", str(world_size)]
    flags = [*(["--multi_gpu"] if world_size > 1 else []), *(["--cpu"] if on_cpu else [])]
    return ["accelerate", "launch", *flags, "--num_processes", str(world_size)]
