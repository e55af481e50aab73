"""`training.strategy`: on how many devices to train. Decided before any heavy import, because this process may be
replaced by a launcher of several ranks.

If a launcher has already started several ranks, `auto` keeps them and prints what it would have chosen.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from finetune.config import Config, resolve_batch
from finetune.errors import UserError
from finetune.redact import redact_arguments
from finetune.runtime import files, launch_lines, scripts
from finetune.runtime.command import print_line
from finetune.runtime.machine import nvml
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject
from finetune.text import counted


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The number of ranks, the reason, and the environment variables for their communication."""

    world_size: int
    reason: str
    environment: Mapping[str, str]


def apply(config: Config) -> None:
    """Keep this launch, or replace this process by a launcher of several ranks.

    Raises:
        UserError: `single` on several ranks.
    """
    strategy, world = config.training.strategy, distributed.ranks().world_size
    if strategy == "single" and world > 1:
        raise UserError(
            f"training.strategy is single, but {world} processes were launched. Start one with `python -m "
            "finetune.train ...`, or set training.strategy to ddp, or to null to train on all launched processes."
        )
    if strategy in (None, "single"):
        return
    if world > 1:
        if strategy == "auto" and (decision := decide(config, visible_gpus())).world_size != world:
            ranks = describe_ranks(decision.world_size)
            print_line(
                f"warning: training.strategy auto would take {ranks}, because {decision.reason}. "
                f"The {world} launched ranks continue; start `python -m finetune.train ...` to let it choose.",
                style="yellow",
            )
        return
    gpus = visible_gpus()
    decision = decide(config, gpus) if strategy == "auto" else all_gpus(config, gpus)
    print_line(f"training.strategy {strategy}: {describe_ranks(decision.world_size)}, because {decision.reason}")
    if decision.world_size > 1:
        relaunch(decision)


def decide(config: Config, gpus: int) -> Decision:
    """Follow the advice of `finetune advise` for this configuration on this machine; without one, take one GPU."""
    advice = find_advice(config, gpus)
    if advice is not None:
        return Decision(
            world_size=advice["world_size"],
            reason=f"`finetune advise` has measured the job ({advice['when']}): {advice['reason']}",
            environment=advice["environment"],
        )
    if gpus < 2:
        return Decision(world_size=1, reason=_why_one_device(gpus), environment={})
    reason = (
        f"this job was not measured on these {gpus} GPUs. `finetune advise` with the same arguments measures whether "
        "several are worth it, and the next run follows its advice"
    )
    return Decision(world_size=1, reason=reason, environment={})


def all_gpus(config: Config, gpus: int) -> Decision:
    """All visible GPUs, or the most over which the global batch divides exactly; one device if there is only one."""
    world = largest_world(config, gpus)
    if world > 1:
        reason = f"{gpus} GPUs are visible and the global batch divides exactly over {world}"
        return Decision(world_size=world, reason=reason, environment={})
    reason = f"the global batch does not divide exactly over any number of GPUs from 2 to {gpus}"
    if gpus < 2:
        reason = _why_one_device(gpus)
    return Decision(world_size=1, reason=f"{reason}: falling back to one", environment={})


def largest_world(config: Config, gpus: int) -> int:
    """The largest number of ranks, up to the number of GPUs, over which the global batch divides exactly."""
    for world in range(gpus, 1, -1):
        try:
            resolve_batch(config.training, world, config.data)
        except UserError:
            continue
        return world
    return 1


def describe_ranks(count: int) -> str:
    """The number of ranks in words."""
    return "one device" if count == 1 else counted(count, "rank")


def _why_one_device(gpus: int) -> str:
    return "one GPU is visible" if gpus else "no GPU is visible"


# --- relaunch -------------------------------------------------------------------------------------------------------


def relaunch(decision: Decision) -> None:
    """Replace this process by torchrun with several ranks and the same arguments. Does not return.

    Environment variables that the user has set keep their values.
    """
    target, arguments = training_command()
    command = [*launch_lines.launch_command(decision.world_size), *target, *arguments]
    print_line(f"  {shlex.join(redact_arguments(command))}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**decision.environment, **os.environ})


def training_command() -> tuple[list[str], list[str]]:
    """What a launcher must start to train as this command was asked: the module or script, and its arguments."""
    if (script := scripts.running_script()) is not None:
        return script[:1], script[1:]
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name, program, arguments = (spec.name if spec else ""), sys.argv[0], sys.argv[1:]
    own = name.split(".")[0] == "finetune" or Path(program).name in ("finetune", "finetune.exe")
    if not own and program.endswith(".py"):  # the user's training script
        return [program], arguments
    return ["-m", "finetune.train"], arguments[1:] if arguments[:1] in (["train"], ["dryrun"]) else arguments


# --- this machine, this configuration -------------------------------------------------------------------------------


def visible_gpus() -> int:
    """The number of GPUs visible to a launch. Asks the driver, so CUDA is not initialized in this process."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([one for one in chosen.split(",") if one.strip() not in ("", "-1")])
    if (names := nvml.gpu_names()) is not None:
        return len(names)
    import torch

    return torch.cuda.device_count()


def advice_file(config: Config, gpus: int) -> Path:
    """The cache file of the advice for a configuration on this machine. The length of the run, folders and logging are
    not part of the key."""
    from finetune.runtime.bootstrap import cache_folder

    training = config.training
    decides = {
        "model": asdict(config.model),
        "lora": asdict(config.lora),
        "data": {key: value for key, value in asdict(config.data).items() if key not in ("num_proc", "cache_dir")},
        "training": {
            "global_batch_size": training.global_batch_size,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "gradient_checkpointing": training.gradient_checkpointing,
            "per_device_train_batch_size": training.per_device_train_batch_size,
            "optim": training.optim,
            "extra": training.extra,
        },
        "gpus": gpus,
        "names": nvml.gpu_names() or [],
    }
    return cache_folder() / "measurements" / f"advice-{files.checksum_of_json(decides)}.json"


def find_advice(config: Config, gpus: int) -> JsonObject | None:
    """The cached advice of `finetune advise`; None if there is none, or if it can no longer be launched here."""
    try:
        advice = json.loads(advice_file(config, gpus).read_text(encoding="utf-8"))
        world, environment = int(advice["world_size"]), dict(advice["environment"])
        resolve_batch(config.training, world, config.data)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
    return advice | {"world_size": world, "environment": environment} if gpus == 0 or world <= gpus else None
