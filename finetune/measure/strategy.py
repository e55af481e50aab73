"""`training.strategy`: on how many devices to train. Decided before anything heavy is imported, as deciding may mean to
start this program again on several of them.

Ranks that a launcher has started cannot be sent away: there, `auto` only says what it would have done.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.config import Config, resolve_batch
from finetune.errors import UserError
from finetune.measure import rules
from finetune.redact import redact_arguments
from finetune.runtime import distributed
from finetune.runtime.command import print_line


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How many ranks, why, and the environment that their communication wants."""

    world_size: int
    reason: str
    environment: Mapping[str, str]


def apply(config: Config) -> None:
    """Go on with this launch, or replace this process by a launcher of several ranks.

    Raises:
        UserError: `single` on several ranks.
    """
    strategy, world = config.training.strategy, distributed.ranks().world_size
    if strategy == "single" and world > 1:
        raise UserError(
            f"training.strategy is single and {world} processes were launched. Start one with `python -m "
            "finetune.train ...`, or set training.strategy to ddp, or to null to train on what is launched."
        )
    if strategy in (None, "single"):
        return
    if world > 1:
        if strategy == "auto":
            check_launch(world, decide(config, visible_gpus()))
        return
    decision = decide(config, visible_gpus()) if strategy == "auto" else everything(config, visible_gpus())
    say = f"training.strategy {strategy}: {devices(decision.world_size)}, because {decision.reason}"
    print_line(say)
    if decision.world_size > 1:
        relaunch(decision)


def check_launch(world: int, decision: Decision) -> None:
    """Say where `auto` would have started another number of ranks than were launched."""
    if decision.world_size != world:
        print_line(
            f"warning: training.strategy auto would take {devices(decision.world_size)}, because {decision.reason}. "
            f"{world} ranks were launched, and go on; `python -m finetune.train ...` lets it choose.",
            style="yellow",
        )


def decide(config: Config, gpus: int) -> Decision:
    """By what `finetune advise` found for this configuration on this machine; else by the rules of the study."""
    advice = find_advice(config, gpus)
    if advice is not None:
        return Decision(
            world_size=advice["world_size"],
            reason=f"{advice['reason']} (`finetune advise`, {advice['when']})",
            environment=advice["environment"],
        )
    measure = "`finetune advise` would measure"
    if gpus < 2:
        return Decision(world_size=1, reason=f"{_too_few(gpus)}; {measure}", environment={})
    batch = resolve_batch(config.training, 1, config.data).global_batch_size
    count = parameter_count(str(config.model.model_name_or_path), config.model.revision) if not config.demo else None
    ruling = rules.study2025(count, batch, gpus=gpus)
    if not ruling.several:
        verdict = "to be measured first" if ruling.verdict in ("measure", "evaluate") else ruling.verdict
        return Decision(
            world_size=1, reason=f"rule set study2025: {verdict}: {ruling.reason}; {measure}", environment={}
        )
    world = largest_world(config, gpus)
    reason = f"rule set study2025: {ruling.reason}; {measure}"
    if world == 1:
        reason = f"no number of GPUs from 2 to {gpus} holds the global batch of {batch} exactly"
    return Decision(world_size=world, reason=reason, environment={})


def everything(config: Config, gpus: int) -> Decision:
    """All GPUs that are visible, or the most that hold the global batch; one device where there are not several."""
    world = largest_world(config, gpus)
    if world > 1:
        return Decision(world_size=world, reason=f"it is asked for and {gpus} GPUs are visible", environment={})
    reason = _too_few(gpus) if gpus < 2 else f"no number of GPUs from 2 to {gpus} holds the global batch exactly"
    return Decision(world_size=1, reason=f"{reason}: it falls back to one", environment={})


def largest_world(config: Config, gpus: int) -> int:
    """The most ranks, up to the number of GPUs, that hold the global batch."""
    for world in range(gpus, 1, -1):
        try:
            resolve_batch(config.training, world, config.data)
        except UserError:
            continue
        return world
    return 1


def devices(count: int) -> str:
    """In words."""
    return "one device" if count == 1 else f"{count} ranks"


def _too_few(gpus: int) -> str:
    return "one GPU is visible" if gpus else "no GPU is visible"


# --- starting again -------------------------------------------------------------------------------------------------


def relaunch(decision: Decision) -> None:
    """Replace this process by torch's launcher of several ranks with the same arguments. Does not return.

    Variables that the user has set keep their value.
    """
    target, arguments = given_command()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc_per_node", str(decision.world_size), *target, *arguments),
    ]
    print_line(f"  {shlex.join(redact_arguments(command))}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**decision.environment, **os.environ})


def given_command() -> tuple[list[str], list[str]]:
    """What a launcher has to start to run this command again: the module or script, and its arguments."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name, program, arguments = (spec.name if spec else ""), sys.argv[0], sys.argv[1:]
    own = name.split(".")[0] == "finetune" or Path(program).name in ("finetune", "finetune.exe")
    if not own and program.endswith(".py"):  # a training script of its own
        return [program], arguments
    return ["-m", "finetune.train"], arguments[1:] if arguments[:1] == ["train"] else arguments


# --- this machine, this configuration -------------------------------------------------------------------------------


def visible_gpus() -> int:
    """GPUs that a launch from here would see. Asks the driver: CUDA is not started in this process."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([one for one in chosen.split(",") if one.strip() not in ("", "-1")])
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # no driver, or no pynvml: what torch sees is all there is
        import torch

        return torch.cuda.device_count()


def advice_file(config: Config, gpus: int) -> Path:
    """Where the advice for a configuration on this machine is kept. Lengths of the run, folders and logging are not
    part of the key."""
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
        "names": _gpu_names(),
    }
    key = hashlib.blake2b(json.dumps(decides, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()
    return cache_folder() / "measurements" / f"advice-{key}.json"


def find_advice(config: Config, gpus: int) -> dict[str, Any] | None:
    """What `finetune advise` kept, where it still can be launched here."""
    try:
        advice = json.loads(advice_file(config, gpus).read_text(encoding="utf-8"))
        world, environment = int(advice["world_size"]), dict(advice["environment"])
        resolve_batch(config.training, world, config.data)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
    return advice | {"world_size": world, "environment": environment} if gpus == 0 or world <= gpus else None


def _gpu_names() -> list[str]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except Exception:  # no driver
        return []


def parameter_count(name: str, revision: str | None = None) -> int | None:
    """Parameters of a model in safetensors files, from their headers alone; None where they are not at hand.

    Weights that are stored in 4 bits come as bytes of two (bitsandbytes).
    """
    import math

    from safetensors import safe_open

    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except Exception:  # not downloaded yet, or no name of the hub at all: loading it says which
            return None
    count = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for key in tensors.keys():  # noqa: SIM118  # it is no mapping
                part = tensors.get_slice(key)
                count += math.prod(part.get_shape()) * (2 if part.get_dtype() == "U8" else 1)
    return count or None
