"""Atomic file and folder writes (temporary name, fsync, rename), and checksums to verify files later."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 22  # read at a time for a checksum
READERS = 8  # threads that compute checksums; xxhash and reads release the GIL


def cache_folder() -> Path:
    """Folder for files that can be regenerated: $FINETUNE_CACHE, else ~/.cache/finetune."""
    return Path(os.environ.get("FINETUNE_CACHE", Path.home() / ".cache" / "finetune"))


def private_folder(path: Path) -> Path | None:
    """`path`, created if need be; None if it cannot be written, or if others own it or may write to it. For code, which
    will be run."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError:
        return None
    foreign = hasattr(os, "getuid") and found.st_uid != os.getuid()
    return None if foreign or found.st_mode & 0o022 or not os.access(path, os.W_OK) else path


def write_json(path: Path, content: Any) -> None:
    """`write_text` of `content` as JSON. NaN and infinity, which JSON cannot represent, become null."""
    write_text(path, json.dumps(plain(content), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write `content` to `path`, atomically: a reader sees either the old file or the new one.

    Raises:
        OSError: the file cannot be written; the error's `filename` is `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        error.filename = str(path)  # a failed write names no file, and the temporary name means nothing to the user
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError, or ValueError if it is not JSON (deep nesting included)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def plain(value: Any) -> Any:
    """`value` as JSON types: tuples become lists, NaN and infinity become null, other objects become strings."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    if hasattr(value, "item"):  # numpy and torch scalars
        return plain(value.item())
    return str(value)


# --- flushed to the disk --------------------------------------------------------------------------------------------


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    descriptor = os.open(path, os.O_RDWR)  # Windows only flushes files that are open for writing
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder's list of names to the disk, on systems that support it."""
    with contextlib.suppress(OSError):  # Windows cannot open a folder, and some network file systems cannot sync one
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush `folder` and all files and folders below it to the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(parent, name))
        sync_folder(Path(parent))


@contextlib.contextmanager
def staging(target: Path, *, main: bool = True) -> Iterator[Path]:
    """A temporary folder next to `target`. If the block succeeds, the folder is flushed to the disk and renamed to
    `target`, replacing what was there (a symbolic link is replaced, not followed). Otherwise it is removed.

    Args:
        main: False on ranks that only add files to the folder: they neither create nor rename it.
    """
    folder = target.with_name(f".{target.name}.partial")
    if not main:
        yield folder
        return
    replaced = target.with_name(f".{target.name}.replaced.partial")
    remove(folder)
    remove(replaced)
    folder.mkdir(parents=True)
    try:
        yield folder
        sync_tree(folder)
        if os.path.lexists(target):
            os.rename(target, replaced)
        os.rename(folder, target)
        sync_folder(target.parent)
        remove(replaced)
    finally:
        remove(folder)


def remove(path: Path) -> None:
    """Remove a file, a folder with its contents, or a symbolic link (not its target), if it exists.

    What cannot be removed is left in place: failing to clean up must not end a run.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def remove_atomically(path: Path) -> None:
    """Like `remove`, but a partly removed folder is never visible under its own name, even after an interruption."""
    aside = path.with_name(f".{path.name}.removed.partial")
    remove(aside)
    with contextlib.suppress(OSError):
        os.rename(path, aside)
    remove(aside)


# --- checksums ------------------------------------------------------------------------------------------------------


def checksum(path: Path) -> str:
    """128-bit xxh3 checksum of a file's content, in hexadecimal."""
    import xxhash

    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def checksums(paths: Iterable[Path]) -> list[str]:
    """`checksum` of each file, computed in parallel, in the same order."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(checksum, paths))


def checksum_of_json(content: Any) -> str:
    """128-bit xxh3 checksum of `content` as canonical JSON, in hexadecimal."""
    import xxhash

    text = json.dumps(plain(content), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()
