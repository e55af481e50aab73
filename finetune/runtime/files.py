"""Files that appear whole: written under another name, synced to the disk, renamed; and checksums to prove it later."""

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

BLOCK_BYTES = 1 << 22  # of one read while a file is summed
READERS = 8  # files that are summed at the same time; xxhash and reads release the GIL


def write_json(path: Path, content: Any) -> None:
    """Write `content` to a temporary file beside `path`, then rename: a reader sees the old file or the new one.

    Numbers that JSON has no word for (NaN, infinity) become null.

    Raises:
        OSError: the disk cannot take it; `filename` is `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(plain(content), indent=2, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        error.filename = str(path)  # the file that was asked for; a failed write names none
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
    """`value` made of what JSON knows: tuples become lists, NaN and infinity null, other objects their text."""
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


# --- on the disk, not only in the page cache ------------------------------------------------------------------------


def sync_file(path: Path) -> None:
    """Wait until the file's content is on the disk."""
    descriptor = os.open(path, os.O_RDWR)  # Windows flushes what is open for writing only
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the folder's list of names is on the disk, on systems that can open a folder."""
    with contextlib.suppress(OSError):  # Windows cannot open one, and some network file systems cannot sync one
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until all files and folders below `folder`, itself included, are on the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(parent, name))
        sync_folder(Path(parent))


@contextlib.contextmanager
def staging(target: Path, *, main: bool = True) -> Iterator[Path]:
    """A folder beside `target` to write into. If the block ends well, the folder is synced to the disk and takes the
    name of `target`, replacing whatever had it (a symbolic link itself, not what it points to). Otherwise it vanishes.

    Args:
        main: False on ranks that add their files to the folder of another one: they neither make nor rename it.
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
    """Remove a file, a folder with everything in it, or a symbolic link (never what it points to), if it is there.

    What cannot be removed stays; nobody is served by a run that dies while it cleans up.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def remove_whole(path: Path) -> None:
    """`remove`, of which no half is ever seen under the path's own name, however it is interrupted."""
    aside = path.with_name(f".{path.name}.removed.partial")
    remove(aside)
    with contextlib.suppress(OSError):
        os.rename(path, aside)
    remove(aside)


# --- checksums ------------------------------------------------------------------------------------------------------


def checksum(path: Path) -> str:
    """xxh3 checksum of a file's content, 128 bits in hexadecimal."""
    import xxhash

    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def checksums(paths: Iterable[Path]) -> list[str]:
    """`checksum` of each file, in the same order, of several at the same time."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(checksum, paths))


def checksum_of_json(content: Any) -> str:
    """xxh3 checksum of `content` as canonical JSON, 128 bits in hexadecimal."""
    import xxhash

    text = json.dumps(plain(content), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()
