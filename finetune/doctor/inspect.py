"""What this machine and its software are.

torch and Unsloth are examined in subprocesses: a driver or library that crashes loses only its own answer, what
libraries print stays out of the report, and selecting one device does not hide the others.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from finetune import __version__
from finetune.config import Config
from finetune.doctor import copies
from finetune.errors import UserError, describe
from finetune.redact import MASK, is_secret_name
from finetune.runtime import files, subprocesses
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject

ANSWER_SECONDS = 300  # a driver may hang

SHOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_HOME", "FINETUNE_CACHE")
SHOWN_PREFIXES = ("NCCL_", "UNSLOTH_", "TORCH_")

Findings = JsonObject  # what `examine` returns
NO_DEVICES: Findings = {  # if the subprocess that examines them dies
    "devices": [],
    "driver_gpus": None,
    "topology": [],
    "topology_line": None,
    "differences": [],
    "copies": [],
}


def examine(config: Config, launcher: JsonObject) -> Findings:
    """Everything the report contains, ready for JSON. What is unknown is None, with the reason under `unknown`."""
    from finetune.runtime import bootstrap

    hardware, stack = _ask(("devices",), ("stack", config.model.backend))
    versions = {"finetune": __version__, **bootstrap.versions(), **hardware.get("versions", {})}
    unknown = {"devices": hardware["error"]} if "error" in hardware else hardware["unknown"]
    return {
        **{name: hardware.get(name, nothing) for name, nothing in NO_DEVICES.items()},
        "versions": versions | {"system": platform.platform()},
        "machine": _machine(),
        "stack": stack,
        "launcher": launcher,
        "folders": _folders(config),
        "environment": environment(),
        "configuration": config.config_file,
        "unknown": unknown,
    }


def _ask(*questions: tuple[str, ...]) -> list[JsonObject]:
    """The answers of subprocesses, one per question, or `error`: why there is no answer.

    They run concurrently: importing torch and Unsloth takes most of the time of a report.
    """
    asked = [_start(*question) for question in questions]
    try:
        return [_answer(process) for process in asked]
    finally:
        for process in asked:  # on a signal, they end with this one
            process.kill()


def _start(question: str, *arguments: str) -> subprocess.Popen[str]:
    code = "import sys; from finetune import doctor; doctor.answer(*sys.argv[1:])"
    # Whether the launcher asked for the CPU is read from the parent's command line, which subprocesses do not have.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if question == "stack" and wants_cpu() else {}
    return subprocesses.start(
        [sys.executable, "-c", code, question, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        errors="replace",
        env=os.environ | hidden,
    )


def _answer(process: subprocess.Popen[str]) -> JsonObject:
    try:
        out, errors = process.communicate(timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {ANSWER_SECONDS} s"}
    answers = [line for line in out.splitlines() if line.startswith(_MARK)]
    if answers:
        return json.loads(answers[-1].removeprefix(_MARK))
    ended = signal.Signals(-process.returncode).name if process.returncode < 0 else f"exit code {process.returncode}"
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "it printed nothing")
    return {"error": f"the subprocess died with {ended}: {last.strip()[:300]}"}


_MARK = "finetune-doctor-answer "


def answer(question: str, *arguments: str) -> None:
    """Run in a subprocess by `_ask`: print the answer on a separate line, after whatever the libraries have printed."""
    try:
        found = {"devices": inspect_devices, "stack": start_stack}[question](*arguments)
    except Exception as error:  # whatever a broken installation raises belongs in the report
        found = {"error": describe(error)}
    sys.stdout.write(f"\n{_MARK}{json.dumps(found, default=str)}\n")
    sys.stdout.flush()


def start_stack(backend: str) -> JsonObject:
    """Start as a run does, probes and patches included: which backend, and why."""
    import patches
    from finetune.engine.kernels import liger
    from finetune.runtime import bootstrap
    from finetune.runtime.machine import flash, hardware

    stack = bootstrap.start(backend, optimizers=patches.OPTIMIZERS).with_masks()
    return {
        "backend": stack.backend,
        "reason": stack.reason,
        "device": stack.device,
        "flash_4": flash.why_unusable(),
        "liger": liger.why_unavailable(stack.device),
        "patches": [verdict.to_dict() for verdict in stack.patches],
        "hardware": hardware.probe().to_dict(),
    }


def inspect_devices() -> JsonObject:
    """GPUs and the links between them, whether each computes, and whether copies between them arrive."""
    import torch

    from finetune.runtime.machine import hardware

    machine = hardware.survey()
    unknown = dict(machine.unknown)
    versions = {
        "torch": torch.__version__,  # with the build, such as +cu130
        "cuda": torch.version.cuda,
        "nccl": machine.nccl_version,
        "driver": machine.driver_version,
    }
    if torch.version.cuda is None:
        unknown["cuda"] = unknown["devices"]
    devices = []
    for gpu in machine.gpus or ():  # afterwards: it takes memory on each
        known = asdict(gpu) | {"computes": False}
        try:
            known["computes"] = computes_on(gpu.index)
            if gpu.free_gib is None:
                known["free_gib"] = torch.cuda.mem_get_info(gpu.index)[0] / 2**30
        except Exception as error:  # whatever a card, its driver or its kernels raise is the answer
            unknown[f"computing on GPU {gpu.index}"] = describe(error)
        devices.append(known)
    working = [f"cuda:{device['index']}" for device in devices if device["computes"]]
    return {
        "versions": versions,
        "devices": devices,
        "driver_gpus": machine.driver_gpus,
        "topology": [asdict(link) for link in machine.links or ()],
        "topology_line": hardware.topology_line(machine),
        "differences": list(machine.differences),
        "copies": [asdict(one) for one in copies.compare(working)],
        "unknown": unknown,
    }


def computes_on(index: int) -> bool:
    """Run a kernel: a card that this torch has no code for, or that is broken, fails here and not in a run."""
    import torch

    return float(torch.ones(8, device=f"cuda:{index}").sum()) == 8.0


def launcher() -> JsonObject:
    try:
        return asdict(distributed.ranks())
    except UserError as error:
        return {"error": str(error)}


def wants_cpu() -> bool:
    try:
        return distributed.wants_cpu()
    except Exception:  # a broken profile: accelerate itself reports it
        return False


def _machine() -> JsonObject:
    import psutil

    memory = psutil.virtual_memory()
    shared = Path("/dev/shm")
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": memory.total / 2**30,
        "free_gib": memory.available / 2**30,
        "shared_memory_gib": shutil.disk_usage(shared).total / 2**30 if shared.is_dir() else None,
    }


def _folders(config: Config) -> list[JsonObject]:
    from huggingface_hub import constants

    from finetune.runtime import bootstrap

    cache, given = bootstrap.cache_folder(), os.environ.get
    named = {
        "output": config.training.output_dir,
        "data cache": config.data.cache_dir or cache / "data",
        "Unsloth's classes": given("UNSLOTH_COMPILE_LOCATION", cache / "unsloth_compiled"),
        "Hugging Face Hub": constants.HF_HUB_CACHE,
        "Hugging Face datasets": given("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"),
        "Triton cache": given("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"),
    }
    return [{"name": name, **folder(Path(path))} for name, path in named.items()]


def folder(path: Path) -> JsonObject:
    """A folder's size and its disk: if it does not exist yet, that of its nearest existing parent."""
    path = path.expanduser().absolute()
    there = files.nearest_existing(path)
    return {
        "path": str(path),
        "disk_free_gib": shutil.disk_usage(there).free / 2**30,
        "file_system": _file_system(there),
        "writable": there.is_dir() and os.access(there, os.W_OK),
    }


def _file_system(path: Path) -> str | None:
    """The kind of file system, such as ext4 or nfs4, of the deepest mount above a path that exists."""
    import psutil

    try:
        mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    except OSError:
        return None
    real = path.resolve()
    return next((mounts[parent] for parent in (real, *real.parents) if parent in mounts), None)


def environment() -> dict[str, str]:
    """The variables of the allow list that are set; no others are read."""
    shown = {name: value for name, value in os.environ.items() if name in SHOWN or name.startswith(SHOWN_PREFIXES)}
    return {name: MASK if is_secret_name(name) else value for name, value in sorted(shown.items())}
