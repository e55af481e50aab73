"""Reads a model's files while the libraries are imported, so that loading finds them in the system's page cache.

With 2.5 GB on a disk of 200 MB/s it saves 4 of 25 seconds (benchmarks/results/LOG.md). `posix_fadvise` saves nothing:
the kernel then reads only a small part of the file.
"""

from __future__ import annotations

import threading
from pathlib import Path

from finetune.config import Config
from finetune.engine.preflight import adapter_files
from finetune.errors import UserError
from finetune.runtime.files import open_regular, safetensors_names
from finetune.runtime.ranks import distributed

BLOCK_BYTES = 1 << 23
# Bytes that a container may use.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
SHARE = 0.5  # of the free memory that the files may fill: the system would drop what does not fit before it is used


def start(config: Config) -> threading.Thread | None:
    """Begin to read the model's weights, in a thread of the first rank of each machine. Call it once the files are
    found and before the libraries are imported.

    Returns:
        The thread, which ends with the process; None if there is nothing to read, or no room for it.
    """
    model = config.model
    if config.demo or distributed.ranks().local_rank != 0:
        return None
    if model.load_in_4bit and model.backend != "transformers" and not Path(str(model.model_name_or_path)).is_dir():
        return None  # Unsloth may load another name of the Hub, whose weights are in 4 bits already
    try:
        folder = adapter_files.base_folder(config)
        files = [] if folder is None else weights(folder)
    except UserError:  # loading reports it
        return None
    if not files or sum(file.stat().st_size for file in files) > SHARE * free_bytes():
        return None
    thread = threading.Thread(target=_read, args=(files,), name="read ahead", daemon=True)
    thread.start()
    return thread


def weights(folder: Path) -> list[Path]:
    """The files of `folder` that transformers loads. There may be others, with the same weights in another format."""
    try:
        names = safetensors_names(folder) or ()
    except (OSError, ValueError):  # loading reports it
        return []
    return [folder / name for name in names if (folder / name).is_file()]


def _read(files: list[Path]) -> None:
    block = bytearray(BLOCK_BYTES)
    for path in files:
        try:
            with open_regular(path) as file:
                while file.readinto(block):  # releases the interpreter's lock
                    pass
        except OSError:  # loading reports it
            return


def free_bytes() -> int:
    """Available memory: the host's, or the container's limit if that is lower."""
    import psutil

    limits = [psutil.virtual_memory().available]
    for file in LIMITS:
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return min(limits)
