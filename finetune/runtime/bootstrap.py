"""Device, early patches, `import unsloth`, late patches: the one place where the order of imports matters.

Unsloth rewrites classes of transformers, trl and peft when it is imported, so it comes before them; the device of this
rank is chosen before Unsloth looks at the machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import patches
from finetune.errors import UserError
from finetune.runtime import distributed
from patches import core

# Unsloth removes these when it is imported (unsloth_zoo/patching_utils.py); what the user has set is put back.
KEPT = ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TORCH_LOGS")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "unsloth", "unsloth_zoo", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What this rank runs on."""

    backend: str  # "unsloth" or "transformers"
    reason: str  # why that one
    device: str  # "cuda" or "cpu"
    local_rank: int
    patches: tuple[core.Verdict, ...]

    @property
    def device_map(self) -> dict[str, int | str]:
        """The whole model on this rank's device."""
        return {"": self.local_rank if self.device == "cuda" else "cpu"}


def start(backend: str = "auto", log_level: str = "warning", without: Collection[str] = ()) -> Stack:
    """Choose this rank's device and import the backend.

    Args:
        backend: "auto" (Unsloth where it imports and supports the device, else transformers), "unsloth" or
            "transformers".
        log_level: of the libraries' own messages on rank 0; the other ranks tell errors alone.
        without: names of patches to leave out, to see what they are worth.

    Raises:
        UserError: `backend="unsloth"` where it cannot run, or more ranks than devices.
    """
    _set_environment()
    me = distributed.ranks()
    import torch

    if torch.cuda.is_available():
        if me.local_world_size > torch.cuda.device_count():
            raise UserError(
                f"{me.local_world_size} processes were launched on this machine and {torch.cuda.device_count()} GPUs "
                f"are visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). One process "
                f"needs one GPU: launch with --num_processes {torch.cuda.device_count()} or make more GPUs visible."
            )
        torch.cuda.set_device(me.local_rank)
        device = "cuda"
    else:
        device = "cpu"
    too_late = "trl" in sys.modules and "unsloth" not in sys.modules
    if too_late and backend != "transformers" and importlib.util.find_spec("unsloth") is not None:
        raise RuntimeError("trl was imported before the backend was chosen: Unsloth must be imported first.")

    verdicts = core.run(patches.EARLY, without) if backend != "transformers" else []
    refusal = None if backend == "transformers" else _import_unsloth()
    if backend == "unsloth" and refusal:
        raise UserError(
            f"model.backend is `unsloth` and Unsloth cannot run here: {refusal}. Install it with "
            "`pip install 'finetune[unsloth]'` on a host with a supported GPU, or set model.backend to `auto` or "
            "`transformers`."
        )
    if backend == "transformers":
        name, reason = "transformers", "model.backend asks for it"
    elif refusal:
        name, reason = "transformers", f"Unsloth cannot run here: {refusal}"
    else:
        name, reason = "unsloth", f"Unsloth {version('unsloth')} supports this {'GPU' if device == 'cuda' else 'CPU'}"
    if name == "unsloth":
        verdicts += core.run(patches.LATE, without)
    quiet_libraries(log_level)
    return Stack(backend=name, reason=reason, device=device, local_rank=me.local_rank, patches=tuple(verdicts))


def quiet_libraries(level: str) -> None:
    """Let the libraries tell what is at least of this severity, on rank 0; the other ranks tell errors alone."""
    import datasets
    import transformers

    level = level if distributed.ranks().is_main else "error"
    number = getattr(logging, level.upper())
    logging.getLogger().setLevel(number)
    transformers.utils.logging.set_verbosity(number)
    datasets.utils.logging.set_verbosity(number)
    if number >= logging.WARNING:  # their bars come from every rank, and between our own lines
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Inside, transformers logs errors only."""
    import transformers

    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)


def _set_environment() -> None:
    """Variables that the libraries read while they are imported. A value that the user has set stays."""
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # Unsloth's download that counts environments
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Unsloth writes the classes it generates into the working directory by default.
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(cache_folder() / "unsloth_compiled"))
    if not Path("/dev/nvidiactl").exists():
        # CPU runs: threads that spin while they wait for each other stall when anything else wants a core (on 2 cores
        # with one more busy process: 20 steps of the demo in 51 s, and in 4.8 s with this).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if _has_expandable_segments() and not any(name in os.environ for name in ALLOCATOR):
        # Unsloth sets the same when it is imported. That is too late here: torch reads it when CUDA starts, and
        # set_device starts it. It keeps batches of ever other sizes from leaving memory in fragments.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    me = distributed.ranks()
    if distributed.wants_cpu():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif me.world_size == 1:
        # One process uses one GPU: with more in sight, transformers would wrap the model in DataParallel.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]


def _has_expandable_segments() -> bool:
    """Whether the driver has the memory mapping that they need: not under WSL (unsloth issue 3511), nor on an NVIDIA
    Tegra board (unsloth issue 2401)."""
    if sys.platform != "linux" or "microsoft" in os.uname().release.lower():
        return False
    return not Path("/etc/nv_tegra_release").exists()


def cache_folder() -> Path:
    """Where this program keeps what it can make again: $FINETUNE_CACHE, else ~/.cache/finetune."""
    return Path(os.environ.get("FINETUNE_CACHE", Path.home() / ".cache" / "finetune"))


def _import_unsloth() -> str | None:
    """Import Unsloth; return why that is not possible here, or None."""
    if importlib.util.find_spec("unsloth") is None:
        return "it is not installed"
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    try:
        with quiet_ranks():
            import unsloth  # noqa: F401
    except (ImportError, NotImplementedError, RuntimeError) as error:
        return " ".join(str(error).split())[:300] or type(error).__name__
    finally:
        os.environ |= kept
    return None


@contextlib.contextmanager
def quiet_ranks():
    """Let one rank speak: what libraries print on the others is dropped."""
    if distributed.ranks().is_main:
        yield
    else:
        with contextlib.redirect_stdout(io.StringIO()):
            yield


def versions() -> dict[str, str | None]:
    """Installed versions of the libraries that decide what a run computes; None where one is not installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
