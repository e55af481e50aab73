"""How to start the advised run: the environment and the launch line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.redact import redact_arguments
from finetune.runtime import launch_lines
from finetune.runtime.machine import nccl
from finetune.runtime.machine.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How to start the run."""

    environment: dict[str, str]
    line: str


def plan(
    world: int, machine: Hardware, arguments: Sequence[str], target: Sequence[str] = ("-m", "finetune.train")
) -> LaunchPlan:
    """The environment and the launch line of `world` ranks on this machine.

    Secrets among the arguments are masked, because the line is printed and written to files.
    """
    chosen = nccl.recommend_settings(machine) if world > 1 else ()
    environment = {one.name: one.value for one in chosen}
    words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    how = launch_lines.user_command(world, on_cpu=machine.device == "cpu")
    command = shlex.join([*how, *target, *redact_arguments(arguments)])
    return LaunchPlan(environment=environment, line=" ".join([*words, command]))
