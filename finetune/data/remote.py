"""Data files behind a URL (hf://, s3://, https://, ...), read as streams through fsspec."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

from finetune.errors import UserError
from finetune.redact import redact

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::|://)")
# What file systems report that changes with the contents: checksums first, then times.
_VERSIONS = ("sha256", "ETag", "etag", "Content-MD5", "md5Hash", "content_md5", "Digest", "crc32c", "checksum") + (
    *("blob_id", "xet_hash", "version", "generation", "mtime", "LastModified", "Last-Modified", "last_modified"),
    *("updated", "modified", "created"),
)


class RemoteFile:
    """One file behind a URL, with what the readers of local files use of a path. Its text has no secrets."""

    def __init__(self, url: str, system: Any, path: str) -> None:
        self._url, self._system, self._path = url, system, path
        name = urlsplit(path).path if path.startswith(("http://", "https://")) else path
        self.suffixes = PurePosixPath(name).suffixes
        self.suffix = self.suffixes[-1] if self.suffixes else ""

    def __str__(self) -> str:
        return redact(self._url)

    def open(self, mode: str = "rb") -> IO[bytes]:
        """The contents as a seekable stream."""
        with remote_errors(self._url):
            return self._system.open(self._path, mode)

    def identity(self) -> list[Any]:
        """The address, the size and every checksum or time that the file system reports. It reads nothing.

        Raises:
            UserError: the file system reports neither, so a changed file could not be detected.
        """
        with remote_errors(self._url):
            info = self._system.info(self._path)
        versions = {name: str(info[name]) for name in _VERSIONS if info.get(name) is not None}
        if not versions:
            raise UserError(
                f"{self}: the server reports no checksum or modification time, so a changed file could not be "
                "detected. Download it and give its path."
            )
        return [str(self._path), info.get("size"), versions]


def is_url(name: str) -> bool:
    """Whether a name is a URL, not a path of this machine."""
    return _URL.match(name) is not None


def expand_url(url: str, is_data: Callable[[RemoteFile], bool], supported: str) -> list[RemoteFile]:
    """The files that a URL, a glob or a folder stands for, sorted.

    Args:
        is_data: whether a reader exists for a file.
        supported: sentence for errors: what can be read.

    Raises:
        UserError: nothing is there, a package is missing, or the server cannot be reached.
    """
    with remote_errors(url):
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        kind = system.info(path)["type"] if system.exists(path) else None
        if kind == "directory":
            found = sorted(entry["name"] for entry in system.ls(path, detail=True) if entry["type"] == "file")
        elif kind is None and glob.has_magic(url):
            found = sorted(system.glob(path))
        elif kind is None:
            raise FileNotFoundError("there is no such file")
        else:
            found = [path]
    files = [RemoteFile(url if name == path else system.unstrip_protocol(name), system, name) for name in found]
    matches = [file for file in files if is_data(file)]
    if not matches:
        listed = ", ".join(str(file) for file in files[:10])
        raise UserError(f"{redact(url)} has no data file{f': it has {listed}' if listed else ''}. {supported}")
    return matches


@contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Report an error of a file system or its server as one that names the URL, without secrets."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        package = _package(url, error)
        remedy = f"Run `pip install {package}`, or download the file and give its path."
        raise UserError(f"{redact(url)} needs the package {package}. {remedy}") from error
    except Exception as error:  # every file system has its own
        reason = redact(f"{type(error).__name__}: {error}".strip().rstrip("."))
        raise UserError(f"{redact(url)} cannot be read: {reason}. {_remedy(url)}") from error


def _package(url: str, error: ImportError) -> str:
    from fsspec.registry import known_implementations

    kind = known_implementations.get(url.partition(":")[0], {}).get("class", "fsspec").partition(".")[0]
    missing = getattr(error.__cause__, "name", None) or error.name or "aiohttp"
    return missing if kind in ("fsspec", "huggingface_hub") else kind


def _remedy(url: str) -> str:
    if not url.startswith("hf://"):
        return "Check the URL, the network and the credentials, or download the file and give its path."
    return (
        "Check the URL, log in with `hf auth login` if the dataset is private, and unset HF_HUB_OFFLINE if it is set. "
        "Without network access, copy the file here and give its path."
    )
