"""Selects the device, applies early patches, imports Unsloth and applies late patches, in that order.

This is the only module in which import order matters. Unsloth rewrites classes of transformers, trl and peft when it is
imported, so it must be imported before them. It also inspects the GPUs, so this rank's device is selected first.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.util
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import patches
from finetune.errors import UserError
from finetune.runtime import startup
from finetune.runtime.files import cache_folder, private_folder
from finetune.runtime.machine import cpu_threads, flash
from finetune.runtime.ranks import distributed
from patches import core

# Unsloth deletes these when it is imported (unsloth_zoo/patching_utils.py); the user's values are restored.
RESTORED = ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TORCH_LOGS")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Transformers and Unsloth import these if they are installed, for assisted generation, detection and embeddings.
UNUSED = ("sentence_transformers", "sklearn", "scipy")
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "unsloth", "unsloth_zoo", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The backend and the device of this rank."""

    backend: str  # "unsloth" or "transformers"
    reason: str  # why this backend was chosen
    device: str  # "cuda" or "cpu"
    local_rank: int
    patches: tuple[core.Verdict, ...]
    without: tuple[str, ...] = ()  # names of patches that are left out

    def with_masks(self) -> Stack:
        """This stack for rows that attend through a mask, with the patches for that. Their probe loads cuDNN, which
        takes seconds on a new machine, so other runs do without."""
        return replace(self, patches=(*self.patches, *core.run(patches.MASKED, self.without)))

    @property
    def torch_device(self) -> Any:
        """This rank's device, as a `torch.device`."""
        import torch

        return torch.device(self.device, self.local_rank) if self.device == "cuda" else torch.device("cpu")

    @property
    def device_map(self) -> dict[str, int | str]:
        """Places the whole model on this rank's device."""
        return {"": self.local_rank if self.device == "cuda" else "cpu"}


# What libraries log in a healthy run, by logger, which would read as a fault.
NOISE = {
    # torchao registers types as it did before torch 2.13.
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
    # A kernel for 4 bits on some CPUs, in place of which bitsandbytes uses its own.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # A resumed run compares its settings itself; the rows per rank change with the number of ranks.
    "transformers.trainer_utils": "do not match the ones in the `trainer_state.json`",
    # transformers does what is right for this tokenizer, whatever its file says.
    "transformers.tokenization_utils_tokenizers": "Ignoring clean_up_tokenization_spaces=True",
}


@contextlib.contextmanager
def library_imports() -> Iterator[None]:
    """For importing the libraries: the garbage collector rests, and later collections leave out their objects.

    There are millions, and they live as long as the process. Unsloth collects 20 times while it loads a model, which
    took 7 s on an H200 host (benchmarks/results/LOG.md).

    Each rank is warned that torchao has kernels for other devices, which does not concern its optimizers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    torchao = logging.getLogger("torchao")
    level = torchao.level
    torchao.setLevel(logging.ERROR)
    try:
        yield
    finally:
        torchao.setLevel(level)
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def without_unused() -> Iterator[None]:
    """Context in which libraries do not find the packages of `UNUSED`, whose import takes over a second. Not for
    others' code, which may use what libraries do with them: they look for them once."""
    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


@library_imports()
def start(
    backend: str = "auto",
    log_level: str | None = "warning",
    without: Collection[str] = (),
    *,
    setting: str = "model.backend",
    optimizers: Collection[str] = (),
) -> Stack:
    """Select this rank's device and import the backend.

    If the program has imported Unsloth already, early patches come too late: those whose defect is present are marked
    as missed.

    Args:
        backend: "auto" (Unsloth if it imports and supports the device, else transformers), "unsloth" or
            "transformers".
        log_level: log level of the libraries on rank 0, None to leave it; other ranks log errors only.
        without: names of patches to skip, to measure their effect.
        setting: what the user chose the backend with, for messages.
        optimizers: that the run may use, as `training.optim`.

    Raises:
        UserError: Unsloth was requested but cannot run here, there are more ranks than devices, or the launcher asks
            for another strategy than DDP.
    """
    (start_up := startup.current()).ended("python")
    _check_strategy()
    if backend != "transformers" and os.environ.get("UNSLOTH_MOE_LORA_B_LAYOUT", "rank_major") != "rank_major":
        raise UserError(
            f"UNSLOTH_MOE_LORA_B_LAYOUT is {os.environ['UNSLOTH_MOE_LORA_B_LAYOUT']}: runs train stacked experts in "
            "PEFT's order. Unset it; an adapter in Unsloth's older order is converted when it is loaded."
        )
    keep_bytecode()
    metadata.packages_distributions = functools.cache(metadata.packages_distributions)  # transformers and TRL each scan
    set_environment()
    leave_out_noise()
    me = distributed.ranks()
    import torch

    if torch.cuda.is_available():
        if me.local_world_size > torch.cuda.device_count():
            raise UserError(
                f"{me.local_world_size} processes were launched on this machine, but {torch.cuda.device_count()} GPUs "
                f"are visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). Each process "
                f"needs its own GPU: launch with --num_processes {torch.cuda.device_count()} or make more GPUs visible."
            )
        torch.cuda.set_device(me.local_rank)
        _hash_triton()
        device = "cuda"
    else:
        device = "cpu"
    cpu_threads.set_threads(device)
    too_late = "trl" in sys.modules and "unsloth" not in sys.modules
    if too_late and backend != "transformers" and importlib.util.find_spec("unsloth") is not None:
        raise RuntimeError("trl was imported before Unsloth: in a training script, import trl inside functions.")

    verdicts = core.run(patches.FIRST, without)
    if backend != "transformers":
        verdicts += core.run(patches.EARLY, without, too_late="unsloth" in sys.modules)
    if device == "cuda" and "unsloth" not in sys.modules:  # Unsloth keeps the function it finds
        flash.install_switch()
    refusal = None if backend == "transformers" else import_unsloth()
    if backend == "unsloth" and refusal:
        raise UserError(
            f"{setting} is `unsloth`, but Unsloth cannot run here: {refusal}. Install it with "
            f"`pip install 'finetune-multigpu[unsloth]'` on a host with a supported GPU, or set {setting} to `auto` or "
            "`transformers`."
        )
    if backend == "transformers":
        name, reason = "transformers", f"set by {setting}"
    elif refusal:
        name, reason = "transformers", f"Unsloth cannot run here: {refusal}"
    else:
        name, reason = "unsloth", f"Unsloth {version('unsloth')} supports this {'GPU' if device == 'cuda' else 'CPU'}"
    if name == "unsloth":
        verdicts += core.run(patches.LATE, without)
    verdicts += core.run(patches.EVERY, without)
    for optimizer in optimizers:
        verdicts += core.run(patches.OPTIMIZERS.get(optimizer, ()), without)
    quiet_libraries(log_level)
    start_up.ended("libraries")
    return Stack(
        backend=name,
        reason=reason,
        device=device,
        local_rank=me.local_rank,
        patches=tuple(verdicts),
        without=tuple(without),
    )


def _hash_triton() -> None:
    """Have Triton hash its files, hundreds of MB, of which it takes note at its first kernel: while other libraries are
    imported. It is itself imported before that: its modules import each other, which two threads at once cannot do."""
    with contextlib.suppress(ImportError, AttributeError):  # older releases have it elsewhere
        triton_key = importlib.import_module("triton.runtime.cache").triton_key
        threading.Thread(target=triton_key, name="hash-triton", daemon=True).start()


def _check_strategy() -> None:
    """Check that the launcher asks for no other strategy than DDP.

    Raises:
        UserError: its profile shards the model, which this program would not do; the message has the setting that does.
    """
    others = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "PARALLELISM_CONFIG": "sharding"}
    for name, strategy in others.items():
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("true", "1"):
            raise UserError(
                f"The accelerate profile asks for {strategy}, which this program does not take from a profile. Launch "
                "with `torchrun --standalone --nproc_per_node 2`, on 2 GPUs; for a model larger than one GPU add "
                "`--training.strategy shard`, which shards it with FSDP2."
            )


def quiet_libraries(level: str | None) -> None:
    """Set the libraries' log level: `level` on rank 0 (None leaves it), "error" on others. Above "info", hide their
    progress bars."""
    import datasets
    import transformers

    leave_out_noise()
    level = level if distributed.ranks().is_main else "error"
    if level is None:
        return
    number = getattr(logging, level.upper())
    logging.getLogger().setLevel(number)
    transformers.utils.logging.set_verbosity(number)
    datasets.utils.logging.set_verbosity(number)
    if number >= logging.WARNING:  # every rank would draw them, in the middle of our own output
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()


def leave_out_noise() -> None:
    """Leave out the messages of `NOISE`, a warning of torch that accelerate causes, and untrue ones of PEFT."""
    for name, message in NOISE.items():
        logging.getLogger(name).addFilter(_without(message))
    # accelerate gives DDP its former argument; the new one does not do what is meant (engine/training/trainer.py).
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    # PEFT writes this pattern itself for experts of transformers 4, applies it, and looks for it in the modules only.
    warnings.filterwarnings("ignore", r"The following .*_pattern keys did not match .*gate_up_proj", RuntimeWarning)
    # Unsloth's record of the order of stacked experts, which PEFT takes for that of a newer PEFT.
    warnings.filterwarnings("ignore", r"Unexpected keyword arguments \['lora_B_layout'", UserWarning)
    # Of the trial of packs, which compiles nothing.
    warnings.filterwarnings("ignore", "Unsloth: detected a manual forward/backward run before", UserWarning)


@functools.cache  # a logger takes the same filter once
def _without(message: str) -> Callable[[logging.LogRecord], bool]:
    """A filter that leaves out the records that contain a message."""
    return lambda record: message not in record.getMessage()


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Context in which transformers logs errors only."""
    import transformers

    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)


def set_environment() -> None:
    """Set variables that libraries read when they are imported, unless the user has set them."""
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # Unsloth counts installations through a Hub download
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Unsloth writes the classes it generates into the working directory by default.
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(cache_folder() / "unsloth_compiled"))
    cpu_threads.sleep_while_waiting()
    if _has_expandable_segments() and not any(name in os.environ for name in ALLOCATOR):
        # Reduces fragmentation when batch sizes vary. Unsloth sets this on import, but by then set_device has
        # initialized CUDA and torch has already read the variable.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    me = distributed.ranks()
    if distributed.wants_cpu():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif me.world_size == 1:
        # If one process sees several GPUs, transformers wraps the model in DataParallel.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]


@functools.cache
def keep_bytecode() -> None:
    """Keep the bytecode of what is imported from here on in the cache folder, if torch's is nowhere: its folder can't
    be written, or PYTHONDONTWRITEBYTECODE is set, as in many container images. Compiling takes most of such a start
    (docs/defects.md, D12). One rank of a machine writes it, in a folder for these versions of the packages: bytecode
    is known by its source's time and size, which may be those of another version."""
    if (torch := importlib.util.find_spec("torch")) is None or torch.origin is None:
        return
    beside = Path(torch.origin).parent / "__pycache__" / Path(importlib.util.cache_from_source(torch.origin)).name
    if beside.is_file() or (not sys.dont_write_bytecode and os.access(beside.parents[1], os.W_OK)):
        return
    installed = "\n".join(sorted(one.name for entry in sys.path for one in Path(entry).glob("*-info")))
    with contextlib.suppress(UserError, RuntimeError):  # wrong ranks, no home folder: a run says so later
        kept, given = (cache_folder() / "bytecode").resolve(), sys.pycache_prefix
        ours = given is None or Path(given).parent == kept  # the process that starts a rank hands it down
        if ours and (folder := private_folder(kept / hashlib.sha256(installed.encode()).hexdigest()[:16])):
            sys.dont_write_bytecode = distributed.ranks().local_rank > 0
            os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(folder)  # also for torch's compiling processes


def _has_expandable_segments() -> bool:
    """Whether the driver supports the virtual memory mapping that they need. WSL (unsloth issue 3511) and NVIDIA Tegra
    boards (unsloth issue 2401) do not."""
    if sys.platform != "linux" or "microsoft" in os.uname().release.lower():
        return False
    return not Path("/etc/nv_tegra_release").exists()


def import_unsloth() -> str | None:
    """Import Unsloth, without its banner. Returns None, or the reason if it cannot be imported."""
    if importlib.util.find_spec("unsloth") is None:
        return "it is not installed"
    restored = {name: os.environ[name] for name in RESTORED if name in os.environ}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import unsloth  # noqa: F401
    except (ImportError, NotImplementedError, RuntimeError) as error:
        return " ".join(str(error).split())[:300] or type(error).__name__
    finally:
        os.environ |= restored
    return None


@contextlib.contextmanager
def quiet_ranks():
    """Context in which library output to stdout is dropped on all ranks but rank 0."""
    if distributed.ranks().is_main:
        yield
    else:
        with contextlib.redirect_stdout(io.StringIO()):
            yield


def versions() -> dict[str, str | None]:
    """Installed versions of the libraries that affect a run's results; None if a library is not installed."""
    return {"python": sys.version.split()[0]} | {name: installed_version(name) for name in LIBRARIES}


@functools.cache
def installed_version(name: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def http_library() -> Any:
    """The module that huggingface_hub asks the Hub with: httpx, or httpx2 from its release 2.0 on."""
    from huggingface_hub.errors import HfHubHTTPError

    return importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
