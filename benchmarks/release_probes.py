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
could not run: its module is not in the release, does not import here, or needs a GPU.
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

from patches import (
    EARLY,
    LATE,
    unsloth_fused_loss_backward,
    unsloth_fused_loss_view,
    unsloth_packed_probe_in_checkpoint,
)

LOSS = (unsloth_fused_loss_view, unsloth_fused_loss_backward)
TIMEOUT = 600  # seconds per release
# Modules that `import unsloth` leaves out on a CPU, and that a probe looks for.
PROBED_MODULES = {
    "unsloth_embeddings_on_disk": "unsloth.models.llama",
    "unsloth_full_checkpointing": "unsloth.models.vision",
    "unsloth_merged_export_ranks": "unsloth.save",
}


def short_name(patch: ModuleType) -> str:
    """The name of the patch's file."""
    return patch.__name__.rpartition(".")[2]


def installed(name: str) -> str | None:
    """Version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def reason(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def probe(patch: ModuleType) -> dict[str, Any]:
    """Probe, apply, probe again."""
    try:
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
    importlib.import_module(unsloth_fused_loss_view.MODULE)


def probe_all(loss_alone: str | None) -> dict[str, Any]:
    """Every patch in this process: those of the loss if `loss_alone` names a release's folder, else the others."""
    import torch

    if loss_alone:
        try:
            load_loss(Path(loss_alone))
        except Exception as error:
            return {short_name(patch): {"unknown": reason(error)} for patch in LOSS}
        return {short_name(patch): probe(patch) for patch in LOSS}
    found = {short_name(patch): probe(patch) for patch in EARLY}
    try:
        importlib.import_module("unsloth")
    except BaseException as error:  # some releases raise SystemExit
        return found | {"import_error": reason(error)}
    for patch in (patch for patch in LATE if patch not in LOSS):
        name = short_name(patch)
        try:
            importlib.import_module(PROBED_MODULES.get(name, "unsloth"))
        except Exception as error:
            found[name] = {"unknown": reason(error)}
            continue
        if patch is unsloth_packed_probe_in_checkpoint and not torch.cuda.is_available():
            found[name] = packed_probe_on_a_cpu()
            continue
        found[name] = probe(patch)
    return found


def packed_probe_on_a_cpu() -> dict[str, Any]:
    """The kernel that this probe runs needs a GPU; whether a release tries it at all can be seen without."""
    patch = unsloth_packed_probe_in_checkpoint
    try:
        module = importlib.import_module(patch.MODULE)
    except ModuleNotFoundError:
        return {"present": False}
    except Exception as error:
        return {"unknown": reason(error)}
    return {"unknown": "its kernel needs a GPU"} if hasattr(module, patch.NAME) else {"present": False}


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
    names = [short_name(patch) for patch in (*EARLY, *LATE)]
    return {
        "unsloth": versions.get("unsloth"),
        "unsloth_zoo": versions.get("unsloth_zoo"),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        **{name: installed(name) for name in ("triton", "transformers", "trl")},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "imports": error is None,
        "import_error": error,
        "probes": {name: probes.get(name, {"unknown": "the release does not import here"}) for name in names},
    }


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
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
