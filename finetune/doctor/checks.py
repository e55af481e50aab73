"""What would stop a run, or deserves a warning."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from finetune.config import Config, resolve_batch
from finetune.doctor import copies, known_pairs, tested_sets
from finetune.doctor.inspect import Findings, wants_cpu
from finetune.engine.checkpoint import output_folder
from finetune.engine.session import opening
from finetune.errors import UserError
from finetune.runtime.bootstrap import installed_version
from finetune.text import counted

DISTRIBUTION = "finetune-multigpu"  # `finetune` on PyPI is another project
BUSY_SHARE = 0.9  # a GPU with less of its memory free is in use by something else
SHARED_MEMORY_GIB = 1.0  # NCCL's troubleshooting guide asks for `docker run --shm-size=1g`; Docker's default is 64 MB
NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "ceph", "gpfs", "beegfs", "cifs", "smb", "glusterfs", "wekafs", "9p", "fuse.")

# State ("ok", "warning", "stop" or "unknown") and reason; None: the check does not apply.
Verdict = tuple[str, str] | None


def judge(config: Config, found: Findings) -> list[dict[str, str]]:
    """Run every check. The state "stop" means that a run would end there."""
    verdicts = {name: check(config, found) for name, check in CHECKS.items()}
    known = ((name, *one) for name, one in verdicts.items() if one is not None)
    return [{"name": name, "state": state, "reason": " ".join(reason.split())} for name, state, reason in known]


def _ranks(config: Config, found: Findings) -> Verdict:
    launcher, gpus = found["launcher"], len(found["devices"])
    if "error" in launcher:
        return "stop", launcher["error"]
    ranks = launcher["local_world_size"]
    if gpus == 0 or wants_cpu():
        return "ok", f"on the CPU; {ranks} on this machine"
    if ranks > gpus:
        return "stop", f"{ranks} processes were launched on this machine and {gpus} GPUs are visible; launch {gpus}"
    return "ok", f"{ranks} launched here, {gpus} possible"


def _allowed_versions(config: Config, found: Findings) -> Verdict:
    """Whether the installed versions are in the allowed ranges. Extras that are not installed are ignored."""
    from packaging.requirements import Requirement

    texts = requirements()
    if texts is None:
        return "unknown", "finetune is not installed as a package: the versions that it needs are not known"
    missing, outside = [], []
    for requirement in map(Requirement, texts):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "unsloth"}):
            continue
        if (installed := installed_version(requirement.name)) is not None:
            if not requirement.specifier.contains(installed, prereleases=True):
                outside.append(f"{requirement.name} {installed} is not {requirement.specifier}")
        elif requirement.name == "nvidia-ml-py":  # needed only for details of this report
            outside.append("nvidia-ml-py is not installed")
        elif "extra" not in str(requirement.marker):
            missing.append(requirement.name)
    if missing:
        return "stop", f"not installed: {', '.join(missing)}; install this project with pip, which installs them"
    if outside:
        return "warning", f"outside the allowed range: {'; '.join(outside)}"
    return "ok", "all in the allowed ranges"


def requirements() -> list[str] | None:
    """What pyproject.toml requires, from the installed package or from the source folder that is run."""
    try:
        return requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        file = Path(__file__).parent.parent.parent / "pyproject.toml"
    if not file.is_file():
        return None
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    extra = (f'{text}; extra == "unsloth"' for text in project["optional-dependencies"]["unsloth"])
    return [*project["dependencies"], *extra]


def _tested_versions(config: Config, found: Findings) -> Verdict:
    """Whether the installed libraries are one of the sets that were tested on this kind of device."""
    device = _kind(found)
    near = {
        name: (tested_sets.differences(one["versions"], found["versions"]), tested_sets.about(one))
        for name, one in tested_sets.read().items()
        if one["device"] == device
    }
    name, (differences, about) = min(near.items(), key=lambda one: len(one[1][0]))
    if differences:
        return "warning", f"not a tested set; the nearest, {name} ({about}), differs: {', '.join(differences)}"
    return "ok", f"those of {name} ({about})"


def _known_pairs(config: Config, found: Findings) -> Verdict:
    """Versions that are known not to work together."""
    pairs = known_pairs.present(installed_version, _kind(found))
    harmful = [str(pair) for pair in pairs if not pair.handled]
    if harmful:
        return "warning", "; ".join(harmful)
    return "ok", "; ".join(["none", *(f"handled: {pair}" for pair in pairs)])


def _kind(found: Findings) -> str:
    return "cuda" if found["devices"] else "cpu"


def _stack(config: Config, found: Findings) -> Verdict:
    stack = found["stack"]
    if "error" in stack:
        return "stop", stack["error"]
    applied = [patch["name"] for patch in stack["patches"] if patch["applied"]]
    return (
        "ok",
        f"{stack['backend']}; {len(stack['patches'])} patches checked, applied: {', '.join(applied) or 'none'}",
    )


def _attention(config: Config, found: Findings) -> Verdict:
    """The kernels that a run on packs chooses from."""
    stack = found["stack"]
    if "error" in stack or stack["device"] == "cpu":
        return None
    if stack["flash_4"] is None:
        return "ok", "a run times FlashAttention-4 against torch's FlashAttention-2 and uses the faster one"
    return "ok", f"torch's FlashAttention-2; FlashAttention-4: {stack['flash_4']}"


def _layers(config: Config, found: Findings) -> Verdict:
    """The kernels of the layers other than attention."""
    stack = found["stack"]
    if "error" in stack or stack["device"] == "cpu":
        return None
    if stack["backend"] == "unsloth":
        return "ok", "Unsloth's own kernels"
    if stack["liger"] is None:
        return "ok", "Liger is installed; a run uses it where model.layer_kernels allows, and says so"
    return "ok", f"transformers' own; Liger: {stack['liger']}"


def _devices(config: Config, found: Findings) -> Verdict:
    devices, unknown = found["devices"], found["unknown"]
    broken = [f"computing on GPU {device['index']}" for device in devices if not device["computes"]]
    if broken:
        return "stop", "; ".join(f"{name} fails: {unknown.get(name, 'a wrong result')}" for name in broken)
    if devices:
        return "ok", f"{len(devices)} x {devices[0]['name']}; each ran a kernel"
    why = unknown.get("devices", "torch sees none")
    if found["driver_gpus"]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        gpus = f"the driver has {found['driver_gpus']} GPUs and torch none (CUDA_VISIBLE_DEVICES: {visible or 'empty'})"
        return "warning", f"{gpus}: {why}; a run would use the CPU"
    return "ok", f"no GPU: {why}; a run would use the CPU"


def _gpu_memory(config: Config, found: Findings) -> Verdict:
    known = [device for device in found["devices"] if device["free_gib"] is not None]
    busy = [device for device in known if device["free_gib"] < BUSY_SHARE * device["memory_gib"]]
    said = [f"GPU {one['index']} has {one['free_gib']:.1f} of {one['memory_gib']:.1f} GiB free" for one in busy]
    used = [one for one in found["devices"] if one.get("other_processes") and one not in busy]
    said += [f"GPU {one['index']} has {len(one['other_processes'])} other process(es)" for one in used]
    if said:
        return "warning", f"{'; '.join(said)}: something else uses it"
    return ("ok", "free") if known else None


def _like_gpus(config: Config, found: Findings) -> Verdict:
    if len(found["devices"]) < 2:
        return None
    if found["differences"]:
        return "warning", f"they differ, and a step takes as long as the slowest ({'; '.join(found['differences'])})"
    return "ok", "all alike"


def _copies(config: Config, found: Findings) -> Verdict:
    """Whether what one GPU sends to another arrives."""
    made = found["copies"]
    if not made:
        return None
    wrong = [
        f"of {one['sent']:,} bytes from {one['source']} to {one['target']}, {one['wrong']:,} arrive changed"
        for one in made
        if one["wrong"]
    ]
    failed = [f"{one['source']} to {one['target']}: {one['error']}" for one in made if one["error"]]
    if wrong:
        unused = os.environ.get("NCCL_P2P_DISABLE") == "1"
        remedy = "NCCL_P2P_DISABLE=1 keeps NCCL from such copies" if unused else "set NCCL_P2P_DISABLE=1"
        cause = f"and see PCI Access Control Services in {copies.REMEDY}"
        return "warning" if unused else "stop", f"{'; '.join(wrong)}; {remedy}, {cause}"
    if failed:
        return "unknown", "; ".join(failed)
    return "ok", f"{counted(len(made), 'copy', 'copies')} of {copies.BYTES >> 20} MiB, every byte arrived"


def _output(config: Config, found: Findings) -> Verdict:
    training, path = config.training, Path(config.training.output_dir)
    try:
        if config.given:  # without a configuration, an earlier run in the default folder does not matter
            resuming = bool(training.resume_from_checkpoint)
            output_folder.check_output(path, resuming=resuming, overwrite=training.overwrite_output_dir)
        else:
            output_folder.check_space(path, output_folder.SPARE_BYTES, "the run's records")
    except UserError as error:
        return "stop", str(error)
    return "ok", "can be written, with room for a run's records"


def _data_cache(config: Config, found: Findings) -> Verdict:
    cache = next(one for one in found["folders"] if one["name"] == "data cache")
    if not cache["writable"]:
        return "stop", f"{cache['path']} cannot be written; set data.cache_dir, or the variable FINETUNE_CACHE"
    return "ok", f"{cache['disk_free_gib']:.1f} GiB free"


def _shared_memory(config: Config, found: Findings) -> Verdict:
    shared = found["machine"]["shared_memory_gib"]
    if len(found["devices"]) < 2 or shared is None or shared >= SHARED_MEMORY_GIB:
        return None
    return "warning", f"/dev/shm has {shared:.2f} GiB, too little for NCCL; start the container with --shm-size=1g"


def _triton_cache(config: Config, found: Findings) -> Verdict:
    kind = next(one["file_system"] for one in found["folders"] if one["name"] == "Triton cache")
    if not found["devices"] or kind is None or not kind.startswith(NETWORK_FILE_SYSTEMS):
        return None
    return "warning", (
        f"it is on {kind}, where ranks that compile at the same time can fail with FileNotFoundError or EBUSY (triton "
        "issue 11512); set TRITON_CACHE_DIR to a folder of a local disk"
    )


def _files(config: Config, found: Findings) -> Verdict:
    if config.model.model_name_or_path is None:
        return None
    try:
        opening.check_present(config)
    except UserError as error:
        return "stop", str(error)
    return "ok", "all that must be on this machine is present"


def _batch(config: Config, found: Findings) -> Verdict:
    """Whether the global batch can be divided among the launched ranks, or among some number of the GPUs here."""
    if config.model.model_name_or_path is None:
        return None
    launched, most = found["launcher"].get("world_size", 1), max(len(found["devices"]), 1)
    possible = [launched] if launched > 1 else list(range(1, most + 1))
    refused = {}
    for world in possible:
        try:
            resolve_batch(config.training, world, config.data)
        except UserError as error:
            refused[world] = str(error)
    if len(refused) == len(possible):
        return "stop", refused[possible[-1]]
    if possible[-1] in refused:
        fit = ", ".join(str(world) for world in possible if world not in refused)
        return "warning", f"not all {most} GPUs here can be used, but {fit}: {refused[most]}"
    return "ok", f"exact on {counted(possible[-1], 'rank')}"


def _4bit(config: Config, found: Findings) -> Verdict:
    if not config.model.load_in_4bit:
        return None
    installed = found["versions"]["bitsandbytes"]
    if installed is None:
        return "stop", "model.load_in_4bit needs bitsandbytes, which is not installed: pip install bitsandbytes"
    return "ok", f"bitsandbytes {installed}"


CHECKS: dict[str, Callable[[Config, Findings], Verdict]] = {
    "one device per rank": _ranks,
    "versions": _allowed_versions,
    "tested versions": _tested_versions,
    "known bad pairs": _known_pairs,
    "backend and patches": _stack,
    "attention": _attention,
    "layers": _layers,
    "devices": _devices,
    "GPU memory": _gpu_memory,
    "like GPUs": _like_gpus,
    "GPU copies": _copies,
    "output folder": _output,
    "data cache": _data_cache,
    "shared memory": _shared_memory,
    "Triton cache": _triton_cache,
    "model and data files": _files,
    "batch": _batch,
    "4-bit weights": _4bit,
}
