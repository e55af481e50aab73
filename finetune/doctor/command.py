"""`finetune doctor`: what this machine and its software are, and what would stop a run; text for a bug report.

Questions to torch and Unsloth are put in processes of their own. A driver or a library that dies takes only its own
answer with it, what libraries print stays out of the report, and choosing one device does not hide the others.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from finetune import __version__
from finetune.config import Config, resolve_batch
from finetune.engine import checkpoints, session
from finetune.errors import UserError, describe
from finetune.redact import redact
from finetune.runtime import distributed, subprocesses
from finetune.runtime.command import DONE, FAILED, run_command
from finetune.runtime.files import write_json

PURPOSE = (
    "Report on this machine, its software and what would stop a run: paste it into a bug report. Exit code 0: a run"
    " could start, 1: something would stop it, 2: bad input."
)
WORLD_SIZES = (1, 2, 4, 8)
ANSWER_SECONDS = 300  # a driver that hangs is an answer, too
MOST_FILES = 20_000  # a folder with more is not measured: its size would take longer than it is worth
BUSY_SHARE = 0.9  # a GPU with less of its memory free is in use by something else
SHARED_MEMORY_GIB = 1.0  # NCCL's troubleshooting guide asks for `docker run --shm-size=1g`; Docker's default is 64 MB
NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "ceph", "gpfs", "beegfs", "cifs", "smb", "glusterfs", "wekafs", "9p", "fuse.")

SHOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_HOME", "FINETUNE_CACHE")
SHOWN_PREFIXES = ("NCCL_", "UNSLOTH_", "TORCH_")
PROFILE_KEYS = ("distributed_type", "num_processes", "num_machines", "gpu_ids", "use_cpu", "mixed_precision")

Found = dict[str, Any]  # what `examine` returns
NO_DEVICES: Found = {  # what is known of them where the process that asks dies
    **{"devices": [], "topology": [], "topology_line": None, "differences": []},
    **{"driver_gpus": None, "versions": {}, "unknown": {}},
}


def main(argv: list[str] | None = None) -> int:
    """Report on this machine. Returns 0 when a run could start, 1 when something would stop it, 2 for bad input."""
    return run_command("doctor", argv, run, PURPOSE)


def run(config: Config) -> int:
    """Look, judge, show. Under a launcher one process of each machine does; the others end at once."""
    launcher = _launcher()
    if launcher.get("local_rank"):
        return DONE
    found = examine(config, launcher)
    checks = judge(config, found)
    verdict = "stop" if any(one["state"] == "stop" for one in checks) else "ready"
    found = without_secrets({"verdict": verdict, "checks": checks, **found})
    show(found)
    if config.json:
        write_json(config.json, found)
    return FAILED if verdict == "stop" else DONE


# --- what there is --------------------------------------------------------------------------------------------------


def examine(config: Config, launcher: dict[str, Any]) -> Found:
    """Everything that is looked at, as JSON has it. What is not known is None, with the reason under `unknown`."""
    from finetune.runtime import bootstrap

    devices, stack = _ask(("devices",), ("stack", config.model.backend))
    hardware = NO_DEVICES | devices
    unknown = dict(hardware["unknown"])
    if "error" in hardware:
        unknown["devices"] = hardware["error"]
    versions = {"finetune": __version__, **bootstrap.versions(), **hardware["versions"]}
    return {
        "versions": versions | {"system": platform.platform()},
        "devices": hardware["devices"],
        "driver_gpus": hardware["driver_gpus"],
        "topology": hardware["topology"],
        "topology_line": hardware["topology_line"],
        "differences": hardware["differences"],
        "machine": _machine(),
        "stack": stack,
        "launcher": launcher,
        "accelerate_profile": _default_profile(),
        "folders": _folders(config),
        "environment": environment(),
        "configuration": config.config_file,
        "batch": [] if config.demo else [cut_batch(config, world) for world in WORLD_SIZES],  # the demo fits any
        "unknown": unknown,
    }


def _ask(*questions: tuple[str, ...]) -> list[dict[str, Any]]:
    """The answers of other processes, each of them or `error`: why there is none.

    They work side by side: each imports torch for itself, which with Unsloth is most of what a report takes.
    """
    asked = [_start(*question) for question in questions]
    try:
        return [_answer(process) for process in asked]
    finally:
        for process in asked:  # on a signal, they end with this one
            process.kill()


def _start(question: str, *arguments: str) -> subprocess.Popen[str]:
    code = "import sys; from finetune import doctor; doctor.answer(*sys.argv[1:])"
    # The launcher's wish is read from the command line of a process's parent; this one's children have another.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if question == "stack" and _wants_cpu() else {}
    return subprocesses.start(
        [sys.executable, "-c", code, question, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        errors="replace",
        env=os.environ | hidden,
    )


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        said, complained = process.communicate(timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {ANSWER_SECONDS} s"}
    answers = [line for line in said.splitlines() if line.startswith(_MARK)]
    if answers:
        return json.loads(answers[-1].removeprefix(_MARK))
    ended = signal.Signals(-process.returncode).name if process.returncode < 0 else f"exit code {process.returncode}"
    last = next((line for line in reversed(complained.splitlines()) if line.strip()), "it said nothing")
    return {"error": f"the process that asked died with {ended}: {last.strip()[:300]}"}


_MARK = "finetune-doctor-answer "


def answer(question: str, *arguments: str) -> None:
    """The other end of `_ask`: answer on a line of its own, after whatever the libraries have printed."""
    try:
        found = {"devices": look_at_devices, "stack": start_stack}[question](*arguments)
    except Exception as error:  # anything that a broken installation may raise is what the report is about
        found = {"error": describe(error)}
    sys.stdout.write(f"\n{_MARK}{json.dumps(found, default=str)}\n")
    sys.stdout.flush()


def start_stack(backend: str) -> dict[str, Any]:
    """Start as a run does, probes and patches included: which backend, and why."""
    from finetune.runtime import bootstrap, hardware

    stack = bootstrap.start(backend)
    return {
        "backend": stack.backend,
        "reason": stack.reason,
        "device": stack.device,
        "patches": [verdict.to_dict() for verdict in stack.patches],
        "hardware": hardware.probe().to_dict(),
    }


def look_at_devices() -> dict[str, Any]:
    """GPUs and the links between them, and whether each computes."""
    import torch

    from finetune.runtime import hardware

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
        known = gpu.to_dict() | {"computes": False}
        try:
            known["computes"] = _computes(gpu.index)
            if gpu.free_gib is None:
                known["free_gib"] = torch.cuda.mem_get_info(gpu.index)[0] / 2**30
        except Exception as error:  # whatever a card, its driver or its kernels raise is the answer
            unknown[f"computing on GPU {gpu.index}"] = describe(error)
        devices.append(known)
    return {
        "versions": versions,
        "devices": devices,
        "driver_gpus": machine.driver_gpus,
        "topology": [link.to_dict() for link in machine.links or ()],
        "topology_line": hardware.topology_line(machine),
        "differences": list(machine.differences),
        "unknown": unknown,
    }


def _computes(index: int) -> bool:
    """Run a kernel: a card that this torch has no code for, or that is broken, fails here and not in a run."""
    import torch

    return float(torch.ones(8, device=f"cuda:{index}").sum()) == 8.0


def _launcher() -> dict[str, Any]:
    try:
        return asdict(distributed.ranks())
    except UserError as error:
        return {"error": str(error)}


def _wants_cpu() -> bool:
    try:
        return distributed.wants_cpu()
    except Exception:  # a broken profile: accelerate itself says so
        return False


def _machine() -> dict[str, Any]:
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


def _default_profile() -> dict[str, Any] | None:
    """What `accelerate launch` does without --config_file, where the user has run `accelerate config`."""
    import yaml
    from huggingface_hub import constants

    folder = Path(constants.HF_HOME) / "accelerate"
    files = [folder / name for name in ("default_config.yaml", "default_config.json") if (folder / name).is_file()]
    if not files:
        return None
    file = files[0]
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return {"path": str(file), "error": describe(error)}
    if not isinstance(content, dict):
        return {"path": str(file), "error": "it holds no settings"}
    return {"path": str(file)} | {key: content[key] for key in PROFILE_KEYS if key in content}


def _folders(config: Config) -> list[dict[str, Any]]:
    from huggingface_hub import constants

    from finetune.runtime import bootstrap

    own, given = bootstrap.cache_folder(), os.environ.get
    named = {
        "output": config.training.output_dir,
        "data cache": config.data.cache_dir or own / "data",
        "Unsloth's classes": given("UNSLOTH_COMPILE_LOCATION", own / "unsloth_compiled"),
        "Hugging Face hub": constants.HF_HUB_CACHE,
        "Hugging Face datasets": given("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"),
        "Triton cache": given("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"),
    }
    return [{"name": name, **folder(Path(path))} for name, path in named.items()]


def folder(path: Path) -> dict[str, Any]:
    """A folder's size and its disk. One that does not exist yet has that of the folder it will be made in."""
    path = path.expanduser().absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    size, why = _size(path) if path.is_dir() else (None, "it does not exist yet" if there != path else "it is a file")
    return {
        "path": str(path),
        "size_gib": None if size is None else size / 2**30,
        "size_unknown": why,
        "disk_free_gib": shutil.disk_usage(there).free / 2**30,
        "file_system": _file_system(there),
        "writable": there.is_dir() and os.access(there, os.W_OK),
    }


def _size(path: Path) -> tuple[int | None, str | None]:
    """Bytes of the files below `path`, or why they are not counted. The hub's links to its own files count once."""
    count = total = 0
    waiting = [path]
    try:
        while waiting:
            for entry in os.scandir(waiting.pop()):
                count += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                else:
                    total += entry.stat(follow_symlinks=False).st_size
            if count > MOST_FILES:
                return None, f"it has more than {MOST_FILES:,} files"
    except OSError as error:  # another user's, or gone since
        return None, describe(error)
    return total, None


def _file_system(path: Path) -> str | None:
    """The kind of file system, such as ext4 or nfs4, of the deepest mount above a path that exists."""
    import psutil

    try:
        mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    except OSError:
        return None
    real = path.resolve()
    return next((mounts[parent] for parent in (real, *real.parents) if parent in mounts), None)


def cut_batch(config: Config, world: int) -> dict[str, Any]:
    """How an optimizer step is cut at a world size, or `refused`: why it cannot be."""
    try:
        return {"world_size": world} | asdict(resolve_batch(config.training, world, config.data))
    except UserError as error:
        return {"world_size": world, "refused": str(error)}


# --- what would stop a run ------------------------------------------------------------------------------------------

Verdict = tuple[str, str] | None  # state ("ok", "warning", "stop" or "unknown") and reason; None does not concern


def judge(config: Config, found: Found) -> list[dict[str, str]]:
    """Every condition that can be looked at alone. Of the state "stop" are those that a run would end at."""
    verdicts = {name: look(config, found) for name, look in CHECKS.items()}
    known = ((name, *one) for name, one in verdicts.items() if one is not None)
    return [{"name": name, "state": state, "reason": " ".join(reason.split())} for name, state, reason in known]


def _ranks(config: Config, found: Found) -> Verdict:
    launcher, gpus = found["launcher"], len(found["devices"])
    if "error" in launcher:
        return "stop", launcher["error"]
    ranks = launcher["local_world_size"]
    if gpus == 0 or _wants_cpu():
        return "ok", f"on the CPU; {ranks} on this machine"
    if ranks > gpus:
        return "stop", f"{ranks} processes were launched on this machine and {gpus} GPUs are visible; launch {gpus}"
    return "ok", f"{ranks} launched here, {gpus} possible"


def _allowed_versions(config: Config, found: Found) -> Verdict:
    """The versions that this project allows, against those installed. An extra that is not installed is no matter."""
    from packaging.requirements import Requirement

    texts = _requirements()
    if texts is None:
        return "unknown", "finetune is not installed as a package: the versions that it needs are not known"
    missing, outside = [], []
    for requirement in map(Requirement, texts):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "unsloth"}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            if requirement.name == "nvidia-ml-py":  # it only lets this report say more
                outside.append("nvidia-ml-py is not installed")
            elif "extra" not in str(requirement.marker):
                missing.append(requirement.name)
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            outside.append(f"{requirement.name} {installed} is not {requirement.specifier}")
    if missing:
        return "stop", f"not installed: {', '.join(missing)}; install this project with pip, which brings them"
    return ("warning", f"not what is tested: {'; '.join(outside)}") if outside else ("ok", "all as this project needs")


def _requirements() -> list[str] | None:
    """What pyproject.toml requires, from the installed package or from the source folder that is run."""
    try:
        return requires("finetune") or []
    except PackageNotFoundError:
        file = Path(__file__).parent.parent / "pyproject.toml"
    if not file.is_file():
        return None
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    extra = (f'{text}; extra == "unsloth"' for text in project["optional-dependencies"]["unsloth"])
    return [*project["dependencies"], *extra]


def _stack(config: Config, found: Found) -> Verdict:
    stack = found["stack"]
    if "error" in stack:
        return "stop", stack["error"]
    applied = [patch["name"] for patch in stack["patches"] if patch["applied"]]
    return (
        "ok",
        f"{stack['backend']}; {len(stack['patches'])} patches looked at, needed: {', '.join(applied) or 'none'}",
    )


def _devices(config: Config, found: Found) -> Verdict:
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


def _gpu_memory(config: Config, found: Found) -> Verdict:
    known = [device for device in found["devices"] if device["free_gib"] is not None]
    busy = [device for device in known if device["free_gib"] < BUSY_SHARE * device["memory_gib"]]
    said = [f"GPU {one['index']} has {one['free_gib']:.1f} of {one['memory_gib']:.1f} GiB free" for one in busy]
    used = [one for one in found["devices"] if one.get("other_processes") and one not in busy]
    said += [f"GPU {one['index']} has {len(one['other_processes'])} other process(es)" for one in used]
    if said:
        return "warning", f"{'; '.join(said)}: something else uses it"
    return ("ok", "free") if known else None


def _like_gpus(config: Config, found: Found) -> Verdict:
    if len(found["devices"]) < 2:
        return None
    if found["differences"]:
        return "warning", f"they differ, and a step takes as long as the slowest ({'; '.join(found['differences'])})"
    return "ok", "all alike"


def _profile(config: Config, found: Found) -> Verdict:
    """Whether a plain `accelerate launch` would get past its own default profile. Other launch lines still would."""
    profile, gpus = found["accelerate_profile"], len(found["devices"])
    if profile is None:
        return None
    advice = "give --config_file accelerate_configs/..."
    if "error" in profile:
        return "warning", f"cannot be read ({profile['error']}); {advice}"
    total, machines = profile.get("num_processes") or 1, profile.get("num_machines") or 1
    if profile.get("distributed_type") == "MULTI_CPU" and total > 1:
        return "warning", f"distributed_type MULTI_CPU starts one process and not {total}; {advice}"
    if gpus and not profile.get("use_cpu") and total // machines > gpus:
        return "warning", f"it starts {total // machines} processes here and {gpus} GPUs are visible; {advice}"
    return "ok", f"{total} processes on {machines} machine(s)"


def _output(config: Config, found: Found) -> Verdict:
    training, path = config.training, Path(config.training.output_dir)
    try:
        if config.given:  # an earlier run in the default folder is no matter before the user has named one
            resuming = bool(training.resume_from_checkpoint)
            checkpoints.check_output(path, resuming=resuming, overwrite=training.overwrite_output_dir)
        else:
            checkpoints.check_space(path, checkpoints.SPARE_BYTES, "the run's records")
    except UserError as error:
        return "stop", str(error)
    return "ok", "can be written, with room for a run's records"


def _data_cache(config: Config, found: Found) -> Verdict:
    cache = next(one for one in found["folders"] if one["name"] == "data cache")
    if not cache["writable"]:
        return "stop", f"{cache['path']} cannot be written; set data.cache_dir, or the variable FINETUNE_CACHE"
    return "ok", f"{cache['disk_free_gib']:.1f} GiB free"


def _shared_memory(config: Config, found: Found) -> Verdict:
    shared = found["machine"]["shared_memory_gib"]
    if len(found["devices"]) < 2 or shared is None or shared >= SHARED_MEMORY_GIB:
        return None
    return "warning", f"/dev/shm has {shared:.2f} GiB, too little for NCCL; start the container with --shm-size=1g"


def _triton_cache(config: Config, found: Found) -> Verdict:
    kind = next(one["file_system"] for one in found["folders"] if one["name"] == "Triton cache")
    if not found["devices"] or kind is None or not kind.startswith(NETWORK_FILE_SYSTEMS):
        return None
    return "warning", (
        f"it is on {kind}, where ranks that compile at the same time can fail with FileNotFoundError or EBUSY (triton "
        "issue 11512); set TRITON_CACHE_DIR to a folder of a local disk"
    )


def _files(config: Config, found: Found) -> Verdict:
    if config.demo:
        return None
    try:
        session.check_present(config)
    except UserError as error:
        return "stop", str(error)
    return "ok", "what is to be on this machine is there"


def _batch(config: Config, found: Found) -> Verdict:
    """Whether the global batch can be cut over the ranks that were launched, or over some number of the GPUs here."""
    if config.demo:
        return None
    launched, most = found["launcher"].get("world_size", 1), max(len(found["devices"]), 1)
    possible = [launched] if launched > 1 else list(range(1, most + 1))
    refused = {world: cut["refused"] for world in possible if "refused" in (cut := cut_batch(config, world))}
    if len(refused) == len(possible):
        return "stop", refused[possible[-1]]
    if possible[-1] in refused:
        fit = ", ".join(str(world) for world in possible if world not in refused)
        return "warning", f"not all {most} GPUs here can be used, but {fit}: {refused[most]}"
    return "ok", f"exact on {possible[-1]} rank(s)"


def _4bit(config: Config, found: Found) -> Verdict:
    if not config.model.load_in_4bit:
        return None
    installed = found["versions"]["bitsandbytes"]
    if installed is None:
        return "stop", "model.load_in_4bit needs bitsandbytes, which is not installed: pip install bitsandbytes"
    return "ok", f"bitsandbytes {installed}"


CHECKS: dict[str, Callable[[Config, Found], Verdict]] = {
    "one device per rank": _ranks,
    "versions": _allowed_versions,
    "backend and patches": _stack,
    "devices": _devices,
    "GPU memory": _gpu_memory,
    "like GPUs": _like_gpus,
    "accelerate's default profile": _profile,
    "output folder": _output,
    "data cache": _data_cache,
    "shared memory": _shared_memory,
    "Triton cache": _triton_cache,
    "model and data files": _files,
    "batch": _batch,
    "4-bit weights": _4bit,
}


# --- no secrets -----------------------------------------------------------------------------------------------------

MASK = "***"
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSW|CREDENTIAL)(?!IZER)", re.IGNORECASE)
_SECRETS = (  # what the first group holds is kept
    re.compile(r"()\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|AKIA)[A-Za-z0-9_-]{6,}"),
    re.compile(r"(://)[^/\s@]+(?=@)"),  # the user and password of an address
    re.compile(r"((?:key|token|secret|password)s?['\"]?\s*[=:]\s*['\"]?)(?:[0-9a-f]{16,}|[\w-]{24,})", re.IGNORECASE),
)
_SHORTEST_SECRET = 8  # characters; a shorter value of a secret name is as likely a word that the report needs
_END = r"(?=[/\s'\":;,)\]}]|$)"  # of a folder's name inside a text


def environment() -> dict[str, str]:
    """The variables of the allow list that are set; no other is looked at."""
    shown = {name: value for name, value in os.environ.items() if name in SHOWN or name.startswith(SHOWN_PREFIXES)}
    return {name: MASK if _SECRET_NAME.search(name) else value for name, value in sorted(shown.items())}


def without_secrets(found: Any) -> Any:
    """The same with every text in it masked: tokens, values of variables with a secret's name, home folders."""
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    secrets = [value for value in secrets if len(value) >= _SHORTEST_SECRET]
    own = [re.escape(str(Path.home()))] if len(Path.home().parts) > 1 else []
    home = re.compile(r"(?<![\w.~-])(?:" + "|".join([*own, r"/(?:home|Users)/[^/\s'\":]+", "/root"]) + ")" + _END)

    def mask(text: str) -> str:
        for secret in sorted(secrets, key=len, reverse=True):  # one may be part of another
            text = text.replace(secret, MASK)
        for pattern in _SECRETS:
            text = pattern.sub(rf"\1{MASK}", text)
        return home.sub("~", redact(text))

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return mask(value)
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    return walk(found)


# --- the report -----------------------------------------------------------------------------------------------------

Rows = list[tuple[str, str]]


def show(found: Found) -> None:
    """The verdict first; in colour on a terminal, plain lines elsewhere."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        sys.stdout.write(plain(found))
        return
    colours = {"stop": "red", "warning": "yellow", "unknown": "yellow"}
    for state, line in headline(found):
        console.print(Text(line, style=colours.get(state, "green")))
    for title, rows in sections(found):
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(Text(label), Text(value, style=colours.get(value.partition(":")[0], "")))
        console.print(Text(f"\n{title}", style="bold"))
        console.print(table)


def plain(found: Found) -> str:
    """The report as lines of text, to paste as they are."""
    lines = [line for _, line in headline(found)]
    for title, rows in sections(found):
        width = max(len(label) for label, _ in rows)
        lines += ["", title, *(f"  {label:{width}}  {value}" for label, value in rows)]
    return "\n".join(lines) + "\n"


def headline(found: Found) -> list[tuple[str, str]]:
    """(state, line): whether a run could start, what stops it, what is worth knowing."""
    of_state = {state: [one for one in found["checks"] if one["state"] == state] for state in ("stop", "warning")}
    state, verdict = ("stop", "would not") if of_state["stop"] else ("ok", "could")
    lines = [(state, f"finetune doctor: a run {verdict} start here.")]
    for state, checks in of_state.items():
        lines += [(state, f"  {state}: {one['name']}: {one['reason']}") for one in checks]
    return lines


def sections(found: Found) -> Iterable[tuple[str, Rows]]:
    """Title and (label, value) rows of each part."""
    unknown, stack, machine, launcher = (found[name] for name in ("unknown", "stack", "machine", "launcher"))
    yield "Checks", [(one["name"], f"{one['state']}: {one['reason']}") for one in found["checks"]]
    absent = {name: f"unknown: {unknown[name]}" if name in unknown else "not installed" for name in found["versions"]}
    yield "Versions", [(name, value or absent[name]) for name, value in found["versions"].items()]
    yield "Devices", _device_rows(found)
    if found["topology"]:
        yield "Topology", _topology_rows(found)
    shared = machine["shared_memory_gib"]
    rows = [("processor", f"{machine['processor']}, {machine['cores']} cores for this process")]
    rows += [("memory", f"{machine['memory_gib']:.1f} GiB, {machine['free_gib']:.1f} free")]
    yield "Machine", [*rows, ("/dev/shm", "unknown: there is none" if shared is None else f"{shared:.2f} GiB")]
    if "error" in stack:
        yield "Backend", [("none", "see the checks")]
    else:
        yield "Backend", [(stack["backend"], f"{stack['reason']}; device {stack['device']}")]
        rows = [(patch["name"], _verdict(patch)) for patch in stack["patches"]]
        yield "Patches", rows or [("none", "those of Unsloth are not looked at on this backend")]
    if found["batch"]:
        yield "Batch", [(f"{one['world_size']} rank(s)", _cut(one)) for one in found["batch"]]
    yield "Folders", [(one["name"], _folder_line(one)) for one in found["folders"]]
    said = {"ranks": launcher, "accelerate's default": found["accelerate_profile"] or {"profile": "none"}}
    yield "Launcher", [(name, ", ".join(f"{key} {value}" for key, value in of.items())) for name, of in said.items()]
    yield "Environment", list(found["environment"].items()) or [("none", "no variable of the list is set")]
    shown = {*found["versions"], "devices"}
    rest = [(name, why) for name, why in unknown.items() if name not in shown]
    if rest:
        yield "Unknown", rest


def _device_rows(found: Found) -> Rows:
    rows = []
    for device in found["devices"]:
        free = "free memory unknown" if device["free_gib"] is None else f"{device['free_gib']:.1f} free"
        about = f"{device['name']}, compute capability {device['compute_capability']}"
        rows.append((f"GPU {device['index']}", f"{about}, {device['memory_gib']:.1f} GiB, {free}"))
    return rows or [("none", found["unknown"].get("devices", "torch sees none"))]


def _topology_rows(found: Found) -> Rows:
    """One row where all pairs are alike, as on a machine with switches; else one a pair."""
    peers = {True: "peer access", False: "no peer access", None: "peer access unknown"}
    rows = [
        ("GPUs {} and {}".format(*pair["gpus"]), f"{pair['kind'] or 'unknown link'}, {peers[pair['peer_access']]}")
        for pair in found["topology"]
    ]
    if len(rows) > 1 and len({value for _, value in rows}) == 1:
        rows = [(f"all {len(rows)} pairs", rows[0][1])]
    return [("machine", found["topology_line"]), *rows]


def _verdict(patch: dict[str, Any]) -> str:
    state = "applied" if patch["applied"] else "needed, not applied" if patch["needed"] else "not needed"
    return f"{state}: {patch['reason']}"


def _cut(batch: dict[str, Any]) -> str:
    if "refused" in batch:
        return f"refused: {batch['refused']}"
    return f"{batch['per_device']} a rank x {batch['accumulation']} accumulated = {batch['global_batch_size']} a step"


def _folder_line(one: dict[str, Any]) -> str:
    size = f"{one['size_gib']:.2f} GiB" if one["size_gib"] is not None else f"size unknown: {one['size_unknown']}"
    disk = f"{one['disk_free_gib']:.1f} GiB free on {one['file_system'] or 'an unknown file system'}"
    return f"{one['path']} ({size}; {disk}{'' if one['writable'] else '; cannot be written'})"


if __name__ == "__main__":
    raise SystemExit(main())
