"""How to start the advised run: accelerate's profile, the environment, the launch line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.redact import redact_arguments
from finetune.runtime import files, launch_lines
from finetune.runtime.machine import nccl
from finetune.runtime.machine.hardware import Hardware
from finetune.text import counted

PROFILE = "profile.yaml"


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How to start the run."""

    profile: str  # accelerate's YAML
    environment: dict[str, str]
    reasons: dict[str, str]  # for each variable
    target: str  # module or script and its arguments
    line: str


def plan(
    world: int,
    machine: Hardware,
    arguments: Sequence[str],
    out: Path | None,
    target: Sequence[str] = ("-m", "finetune.train"),
) -> LaunchPlan:
    """The accelerate profile, the environment and the launch line of `world` ranks on this machine.

    Secrets among the arguments are masked, because the line is printed and written to files.
    """
    chosen = nccl.recommend_settings(machine) if world > 1 else ()
    on_cpu = machine.device == "cpu"
    profile = (
        f"# {counted(world, 'rank')} of one machine, as advised.\n"
        "compute_environment: LOCAL_MACHINE\n"
        # With MULTI_CPU accelerate starts one process, regardless of num_processes.
        f"distributed_type: {'MULTI_GPU' if world > 1 else chr(34) + 'NO' + chr(34)}\n"
        "num_machines: 1\n"
        f"num_processes: {world}\n"
        "machine_rank: 0\n"
        "gpu_ids: all\n"
        "main_training_function: main\n"
        'mixed_precision: "no"   # set by model.dtype instead\n'
        "rdzv_backend: static\n"
        "same_network: true\n"
        f"use_cpu: {str(on_cpu).lower()}\n"
        "debug: false\n"
    )
    how = launch_lines.user_command(world, on_cpu=on_cpu)
    if out is not None:
        how = ["accelerate-launch", "--config_file", str(out / PROFILE)]
    environment = {one.name: one.value for one in chosen}
    words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    command = shlex.join([*target, *redact_arguments(arguments)])
    return LaunchPlan(
        profile=profile,
        environment=environment,
        reasons={one.name: one.reason for one in chosen},
        target=command,
        line=" ".join([*words, shlex.join(how), command]),
    )


def write(out: Path, plan: LaunchPlan, reason: str) -> None:
    """Write profile.yaml, environment.sh and launch.sh to a folder."""
    out.mkdir(parents=True, exist_ok=True)
    files.write_text(out / PROFILE, plan.profile)
    lines = ["# NCCL settings for this machine, each with its reason."]
    if not plan.environment:
        lines.append("# None: NCCL's defaults are used.")
    for name, value in plan.environment.items():
        lines += [f"# {plan.reasons[name]}", f"export {name}={shlex.quote(value)}"]
    files.write_text(out / "environment.sh", "\n".join(lines) + "\n")
    script = [
        "#!/bin/sh",
        f"# {reason}",
        'here=$(cd "$(dirname "$0")" && pwd)',
        '. "$here/environment.sh"',
        f'exec accelerate-launch --config_file "$here/{PROFILE}" {plan.target}',
    ]
    files.write_text(out / "launch.sh", "\n".join(script) + "\n")
    (out / "launch.sh").chmod(0o755)
