"""Reading of regular files only, atomic file and folder writes (temporary name, fsync, rename), and checksums.

A folder that others made (a repository, a model, a run) may hold anything under the name of a file: a FIFO that blocks
its reader, a device without end, a link to a file of the user. Such a file is read and written through this module.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from finetune.errors import UserError
from finetune.redact import redact
from finetune.runtime.types import JsonObject

BLOCK_BYTES = 1 << 22  # read at a time for a checksum
AHEAD_BYTES = 1 << 17  # of one piece of advice: Linux reads no more than a device's read_ahead_kb, 128 or more
READERS = 8  # threads that compute checksums; xxhash and reads release the GIL


def cache_folder() -> Path:
    """Folder for files that can be regenerated: $FINETUNE_CACHE, else ~/.cache/finetune."""
    named = os.environ.get("FINETUNE_CACHE")
    return Path.home() / ".cache" / "finetune" if named is None else Path(named)


def private_folder(path: Path) -> Path | None:
    """`path`, created if need be; None if it cannot be written, or if others own it or may write to it, or may put
    another in its place. For code, which will be run."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve()
        found, above = path.stat(), [one.stat() for one in path.parents]
    except OSError:
        return None
    # A folder above may be its owner's or its group's to change: a group is often one user's own.
    open_above = any(one.st_mode & 0o002 and not one.st_mode & stat.S_ISVTX for one in above)
    closed = found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(path, os.W_OK)
    return path if closed and not open_above else None


# --- regular files --------------------------------------------------------------------------------------------------

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


class NotRegular(UserError, OSError):
    """A regular file was expected, and the path is something else: `strerror` says what."""

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__(f"{path} is {kind}, not a regular file. Remove it, or give another path.")
        self.filename, self.strerror = str(path), f"it is {kind}, not a regular file"

    def __str__(self) -> str:
        return redact(self.args[0])  # OSError's own text would be "[Errno None] ..."


def special_kind(path: Path, *, follow: bool = True) -> str | None:
    """What `path` is ("a FIFO", "a folder", ...) if it is not a regular file, else None. Nothing is opened.

    Args:
        follow: False to report a symbolic link instead of what it points to.

    Raises:
        OSError: there is no such file.
    """
    return _kind_of_stat(os.stat(path, follow_symlinks=follow))


def _kind_of_stat(found: os.stat_result) -> str | None:
    return None if stat.S_ISREG(found.st_mode) else _KINDS.get(stat.S_IFMT(found.st_mode), "of an unknown kind")


def special_entry(folder: Path) -> str | None:
    """The first entry of a folder that is neither a regular file nor a folder, as "NAME is a FIFO"; None without one.
    A library that loads the folder would block on it, or read it without end. Links are judged by their target.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # whoever opens the folder reports it
        return None
    for name in names:
        with contextlib.suppress(OSError):  # a link that leads nowhere is as good as missing
            if (kind := special_kind(folder / name)) and kind != _KINDS[stat.S_IFDIR]:
                return f"{name} is {kind}"
    return None


def open_descriptor(path: Path, flags: int = os.O_RDONLY, *, follow: bool = True) -> int:
    """Open a regular file, and return its file descriptor. A FIFO or a device is never opened.

    Args:
        follow: False to refuse a symbolic link.

    Raises:
        NotRegular: it is not a regular file.
        OSError: it cannot be opened.
    """
    if kind := special_kind(path, follow=follow):
        raise NotRegular(path, kind)
    # Without waiting, and checked again: the file may have been replaced since.
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW))
    if kind := _kind_of_stat(os.fstat(descriptor)):
        os.close(descriptor)
        raise NotRegular(path, kind)
    return descriptor


def open_regular(path: Path) -> io.BufferedReader:
    """A regular file, opened for reading as bytes. Raises as `open_descriptor`."""
    return open(open_descriptor(path), "rb")


def read_bytes(path: Path, at_most: int | None = None) -> bytes:
    """The content of a regular file, or its first `at_most` bytes. Raises as `open_descriptor`."""
    with open_regular(path) as file:
        return file.read(-1 if at_most is None else at_most)


def read_text(path: Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The content of a regular file as text, with line ends as `\n`. Raises as `open_descriptor`; ValueError if it has
    another encoding."""
    with io.TextIOWrapper(open_regular(path), encoding=encoding, errors=errors) as file:
        return file.read()


def safetensors_header(file: BinaryIO) -> tuple[JsonObject, int]:
    """Of a safetensors file opened at its start: dtype, shape and data_offsets of each tensor by name, and the offset
    of the data. The format: 8 bytes of header length, JSON header, data.

    Raises:
        EOFError: the file ends before its header does.
        ValueError: it is no such file.
    """
    start = file.read(8)
    length = int.from_bytes(start, "little")
    content = file.read(min(length, 100_000_000))  # the format's own limit
    if len(start) < 8 or len(content) < length:
        raise EOFError("the file ends before its header does")
    try:
        header = json.loads(content)
        header.pop("__metadata__", None)
        if not all(_is_tensor(one) for one in header.values()):
            raise TypeError("an entry is no tensor")
    except (RecursionError, AttributeError, TypeError) as error:
        raise ValueError("its header is not valid") from error
    return header, 8 + length


def _is_tensor(given: object) -> bool:
    """Whether this is a tensor's entry in the header of a safetensors file."""
    match given:
        case {"dtype": str(), "shape": [*sizes], "data_offsets": [int(begin), int(end)]}:
            return 0 <= begin <= end and all(type(size) is int and size >= 0 for size in sizes)
    return False


def safetensors_index(path: Path) -> dict[str, str]:
    """The file of each tensor of a model in several safetensors files, by their index.

    Raises:
        OSError: it cannot be read.
        ValueError: it does not name files of its own folder.
    """
    content = read_json(path)
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not all(
        isinstance(name, str) and name.endswith(".safetensors") and name == Path(name).name and "\\" not in name
        for name in named.values()
    ):
        raise ValueError(f"{path} does not name the files of the tensors")
    return named


def safetensors_names(folder: Path) -> list[str] | None:
    """The safetensors files of a model that transformers loads: the only one, or those of the index. None if the folder
    has neither. Raises as `safetensors_index`."""
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    return sorted(set(safetensors_index(index).values())) if index.is_file() else None


def tensor_sizes(path: Path) -> dict[str, tuple[int, list[int]]]:
    """Of each tensor in a safetensors file: how many numbers it has, and its shape. bitsandbytes stores two numbers of
    4 bits per byte.

    Raises:
        OSError, EOFError, ValueError: it cannot be read.
    """
    with open_regular(path) as file:
        header, _ = safetensors_header(file)
    doubled = {name: 2 if one["dtype"] == "U8" else 1 for name, one in header.items()}
    return {name: (math.prod(one["shape"]) * doubled[name], one["shape"]) for name, one in header.items()}


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError, or ValueError if it is not JSON (deep nesting included)."""
    try:
        return json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def check_output(path: Path) -> None:
    """Raise NotRegular if something other than a regular file is in the place of an output: a link would choose
    another place for it."""
    if os.path.lexists(path) and (kind := special_kind(path, follow=False)):
        raise NotRegular(path, kind)


def check_name(path: Path, given: str) -> None:
    """Check that the path of a model or an output is text: libraries that read or write it take no other bytes.

    Args:
        given: the option or key.

    Raises:
        UserError: it is not UTF-8.
    """
    for name in (str(path), path.resolve().name):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f"{given} is {path}, whose name is not UTF-8. Give another name.") from None


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest one above it that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def nearest_folder(path: Path, given: str) -> Path:
    """A folder, or the nearest one above it that exists.

    Args:
        given: the option or key.

    Raises:
        UserError: a file or a broken symbolic link is in the way.
    """
    found = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    if found.is_dir():
        return found
    kind = "a file" if found.exists() else f"a symbolic link to {os.readlink(found)}, which does not exist"
    raise UserError(f"{given} is {path}, and {found} is {kind}. Give a folder.")


def check_writable(path: Path, flag: str) -> None:
    """Check, before the work, that a file can be written in this place as far as that is known.

    Raises:
        UserError: it cannot; names the option.
    """
    if why := _why_unwritable(path):
        raise UserError(f"{flag} {path}: {why}.")


def _why_unwritable(path: Path) -> str | None:
    try:
        if path.is_dir():
            return "expected a file, got a folder. Give the name of a file"
        check_output(path)
        above = nearest_existing(path.absolute().parent)
    except (OSError, ValueError) as error:
        return f"{getattr(error, 'strerror', None) or error}. Give another path"
    if not above.is_dir():
        return f"{path.parent if above == path.absolute().parent else above} is a file. Give another path"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"{above} is read-only for this user. Give another path"
    return None


def write_json(path: Path, content: object) -> None:
    """`write_text` of `content` as JSON. NaN and infinity, which JSON cannot represent, become null."""
    write_text(path, json.dumps(to_json_types(content), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, content: str) -> None:
    """`write_bytes` of `content` in UTF-8. A byte of a file's name that is not UTF-8 is written as an escape."""
    write_bytes(path, content.encode(errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, atomically: a reader sees either the old file or the new one. A symbolic link is
    replaced, not followed.

    Raises:
        NotRegular: `path` is a FIFO, a device or a folder, or a link to one.
        OSError: the file cannot be written; the error's `filename` is `path`.
    """
    if path.exists() and (kind := special_kind(path)):
        raise NotRegular(path, kind)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_new(temporary) as file:
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


def open_new(path: Path) -> io.BufferedWriter:
    """An empty file, opened for writing bytes. What was there is removed; a link is not followed."""
    remove(path)
    return open(path, "xb")


def append_text(path: Path, content: str) -> None:
    """Add `content` to the end of a file in UTF-8.

    Raises:
        NotRegular: it is a symbolic link or not a regular file.
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND
    try:
        descriptor = open_descriptor(path, flags, follow=False)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    with open(descriptor, "ab") as file:
        file.write(content.encode())


def to_json_types(value: object) -> Any:
    """`value` as JSON types: tuples become lists, NaN and infinity become null, other objects become strings."""
    if isinstance(value, dict):
        return {str(key): to_json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    item = getattr(value, "item", None)  # of numpy and torch scalars
    return str(value) if item is None else to_json_types(item())


# --- flushed to the disk --------------------------------------------------------------------------------------------


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder's list of names to the disk, on systems that support it."""
    with contextlib.suppress(OSError):  # some network file systems cannot
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush `folder` and all files and folders below it to the disk. Whoever may read a folder may read its files of
    tensors, which safetensors keeps to their owner."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".safetensors"):
                os.chmod(Path(parent, name), os.stat(parent).st_mode & 0o666)
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


# --- read ahead -----------------------------------------------------------------------------------------------------


def read_ahead(paths: Iterable[Path]) -> None:
    """Have the system read files into its memory while this process does something else, on systems that take such
    advice; not if together they need more than half of the free memory. What cannot be read is left to its reader."""
    import psutil

    sizes = {}
    for path in paths:
        with contextlib.suppress(OSError):
            sizes[path] = path.stat().st_size
    if not hasattr(os, "posix_fadvise") or sum(sizes.values()) > psutil.virtual_memory().available / 2:
        return

    def read() -> None:
        for path, size in sizes.items():
            with contextlib.suppress(OSError), open_regular(path) as file:
                for start in range(0, size, AHEAD_BYTES):
                    os.posix_fadvise(file.fileno(), start, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    threading.Thread(target=read, name="read-ahead", daemon=True).start()


# --- checksums ------------------------------------------------------------------------------------------------------


def checksum(path: Path) -> str:
    """128-bit xxh3 checksum of a file's content, in hexadecimal."""
    import xxhash

    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES))
    with open_regular(path) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def checksums(paths: Iterable[Path]) -> list[str]:
    """`checksum` of each file, computed in parallel, in the same order."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(checksum, paths))


def checksum_of_json(content: object) -> str:
    """128-bit xxh3 checksum of `content` as canonical JSON, in hexadecimal."""
    import xxhash

    text = json.dumps(to_json_types(content), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()
