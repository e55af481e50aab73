"""Which published Unsloth releases have the defects that patches/ repairs, and whether the patches repair them there.

    pip download --no-deps --dest wheels unsloth==2026.10.7 unsloth_zoo==2026.10.7
    for wheel in wheels/*2026.10.7*.whl; do unzip -qo $wheel -d releases/2026.10.7; done
    python -m benchmarks.release_probes releases/* > record.jsonl

Each folder holds one release of unsloth and of unsloth_zoo, unpacked. It comes first on the path of a fresh process,
with the installed torch and transformers; there each patch's probe runs, then the patch, then the probe again. Prints
one line of JSON per release. A release that does not import with the installed versions is recorded with the reason,
and its loss is probed alone. On a CPU, where Unsloth does not load it, that is how the loss of every release is probed.
Most releases need the package `triton` to import, on a CPU as well.

Per patch: `present` is what the probe found, `repaired` what it found after the patch. `unknown` says why a probe
could not run: its module is not in the release, does not import here, or needs a GPU. On stderr, the patches that a
release makes superfluous: `make test-newest` asks the newest one.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import patches
from finetune.runtime.bootstrap import installed_version

LOSS = (patches.unsloth_fused_loss_view, patches.unsloth_fused_loss_backward)
# Their probes find nothing without a GPU. What they look for: a function or a class, and its module.
ON_A_GPU = {
    patches.unsloth_all_trl_trainers: ("unsloth.models.rl", "patch_trl_rl_trainers"),
    patches.unsloth_packed_probe_in_checkpoint: ("unsloth.utils.hf_packed_attention", "_varlen_in_graph_probe"),
    patches.unsloth_rope_gradient_layout: ("unsloth.kernels.rope_embedding", "Fast_RoPE_Embedding_QK"),
}
TIMEOUT = 600  # seconds per release
# Modules that `import unsloth` leaves out on a CPU, and that a probe looks for.
PROBED_MODULES = {
    patches.unsloth_embeddings_on_disk: "unsloth.models.llama",
    patches.unsloth_full_checkpointing: "unsloth.models.vision",
    patches.unsloth_merged_export_ranks: "unsloth.save",
}


def short_name(patch: ModuleType) -> str:
    """The name of the patch's file."""
    return patch.__name__.rpartition(".")[2]


def reason(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def probe(patch: ModuleType, module: str = "patches") -> dict[str, Any]:
    """Probe, apply, probe again, in a process that has the module."""
    try:
        importlib.import_module(module)
        if not patch.needed():
            return {"present": False}
        patch.apply()
        return {"present": True, "repaired": not patch.needed()}
    except Exception as error:
        return {"unknown": reason(error)}


def load_loss(folder: Path) -> None:
    """Import the loss of the release unpacked in `folder`, without running the `__init__` of its packages."""
    for name in ("unsloth_zoo", "unsloth_zoo.fused_losses", "unsloth_zoo.temporary_patches"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    device = types.ModuleType("unsloth_zoo.device_type")  # the release's own raises where there is no GPU
    device.DEVICE_TYPE = "cuda"  # type: ignore[attr-defined]
    sys.modules[device.__name__] = device
    os.environ["UNSLOTH_CE_LOSS_TARGET_GB"] = "1"  # else they ask the GPU for its free memory, by way of other modules
    importlib.import_module(patches.unsloth_fused_loss_view.MODULE)


def probe_all(loss_alone: str | None) -> dict[str, Any]:
    """Every patch in this process: those of the loss if `loss_alone` names a release's folder, else the others."""
    import torch

    if loss_alone:
        try:
            load_loss(Path(loss_alone))
        except Exception as error:
            return {short_name(patch): {"unknown": reason(error)} for patch in LOSS}
        return {short_name(patch): probe(patch) for patch in LOSS}
    elsewhere = {} if torch.cuda.is_available() else ON_A_GPU
    found = {short_name(patch): probe(patch) for patch in patches.EARLY if patch not in elsewhere}
    try:
        importlib.import_module("unsloth")
    except BaseException as error:  # some releases raise SystemExit
        return found | {"import_error": reason(error)}
    found |= {short_name(patch): without_a_gpu(*where) for patch, where in elsewhere.items()}
    late = [patch for patch in patches.LATE if patch not in (*LOSS, *elsewhere)]
    return found | {short_name(patch): probe(patch, PROBED_MODULES.get(patch, "unsloth")) for patch in late}


def without_a_gpu(module: str, name: str) -> dict[str, Any]:
    """Whether a release has what a probe would run on a GPU."""
    try:
        has = hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        has = False
    except Exception as error:
        return {"unknown": reason(error)}
    return {"unknown": "needs a GPU"} if has else {"present": False}


def in_a_process(folder: Path, *options: str) -> dict[str, Any]:
    """The probes of one release in a fresh process with `folder` first on its path."""
    path = [str(folder), str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "UNSLOTH_COMPILE_LOCATION": str(folder / "compiled"),
        "HF_HUB_OFFLINE": "1",
    }
    if not Path("/dev/nvidiactl").exists():
        environment |= {"UNSLOTH_ALLOW_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.release_probes", "--here", *options],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"probes"')]
    if done.returncode or not lines:
        return {"import_error": " ".join((done.stderr or done.stdout).split())[-300:]}
    return json.loads(lines[-1])["probes"]


def record(folder: Path) -> dict[str, Any]:
    """One release."""
    import torch

    versions = {one.name: one.version for one in importlib.metadata.distributions(path=[str(folder)])}
    probes = in_a_process(folder)
    error = probes.pop("import_error", None)
    probes |= in_a_process(folder, "--loss-of", str(folder))
    names = [short_name(patch) for patch in (*patches.EARLY, *patches.LATE)]
    return {
        "unsloth": versions.get("unsloth"),
        "unsloth_zoo": versions.get("unsloth_zoo"),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        **{name: installed_version(name) for name in ("triton", "transformers", "trl")},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "imports": error is None,
        "import_error": error,
        "probes": {name: probes.get(name, {"unknown": "the release does not import here"}) for name in names},
    }


def summary(found: dict[str, Any]) -> str:
    """Which patches a release makes superfluous, of those that wait for one."""
    waiting = [name for name in found["probes"] if importlib.import_module(f"patches.{name}").REMOVE_WHEN is None]
    states = {name: found["probes"][name].get("present", found["probes"][name].get("unknown")) for name in waiting}
    retired = [name for name, state in states.items() if state is False]
    lines = [f"unsloth {found['unsloth']} with transformers {found['transformers']} and trl {found['trl']}:"]
    lines += [f"  {name}: {'still needed' if state is True else state}" for name, state in states.items() if state]
    lines += [f"  {name}: superfluous; set REMOVE_WHEN in patches/{name}.py to this release" for name in retired]
    return "\n".join([*lines, *filter(None, [found["import_error"]])]) + "\n"


def main() -> int:
    """Probe the releases given as folders. Exit 0 if every patch helps where its defect is, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="an unpacked release")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # a process of one release
    parser.add_argument("--loss-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        sys.stdout.write(json.dumps({"probes": probe_all(options.loss_of)}) + "\n")
        return 0
    if not options.folders:
        parser.error("no release given")
    failed = False
    for folder in options.folders:
        if not list(folder.glob("unsloth_zoo*.dist-info")):
            parser.error(f"not an unpacked release (no unsloth_zoo*.dist-info): {folder}")
        found = record(folder.resolve())
        failed |= any(one.get("repaired") is False for one in found["probes"].values())
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        sys.stderr.write(summary(found))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
