"""Tokenized rows on disk: written once to a content-addressed folder, memory-mapped by every rank of the machine."""

from __future__ import annotations

import errno
import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock
from filelock import Timeout as LockTimeout

from finetune.data import IGNORE_INDEX
from finetune.errors import UserError
from finetune.runtime.files import checksum, staging, write_json
from finetune.runtime.machine.disk import disk_errors
from finetune.runtime.types import JsonObject

VERSION = 8  # increment if the file layout or the code that determines tokens and labels changes; part of every key
BATCH_TOKENS = 4_000_000  # tokens per Arrow record batch, which a writer holds in memory
SCHEMA = pa.schema({"input_ids": pa.large_list(pa.int32()), "labels": pa.large_list(pa.int32())})
_INFO = "entry.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Tokenized documents, memory-mapped.

    dataset:       the same file as a `datasets.Dataset` with columns input_ids and labels
    lengths:       int32 [n], tokens of each document
    label_tokens:  int32 [n], supervised tokens of each document; never its first token, which has no context
    """

    dataset: Any
    lengths: np.ndarray
    label_tokens: np.ndarray
    _file_indices: np.ndarray  # int64 [n], index of each document in the file
    _batches: list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # per record batch: offsets, ids, labels
    _starts: list[int]  # index of the first document of each record batch

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of one document, int32 [length] each, without a copy."""
        index = int(self._file_indices[range(len(self))[index]])
        batch = bisect_right(self._starts, index) - 1
        offsets, ids, labels = self._batches[batch]
        start, end = offsets[index - self._starts[batch] : index - self._starts[batch] + 2]
        return ids[start:end], labels[start:end]

    def take(self, indices: np.ndarray) -> Rows:
        """Only these documents, renumbered in this order, without copying tokens."""
        return replace(
            self,
            dataset=self.dataset.select(indices.tolist()),
            lengths=self.lengths[indices],
            label_tokens=self.label_tokens[indices],
            _file_indices=self._file_indices[indices],
        )


class Writer:
    """Writes documents to `NAME.arrow` in record batches, and their lengths and label counts to `NAME.npz`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self._sink = pa.OSFile(str(self._path.with_suffix(".arrow")), "wb")
        self._stream = pa.ipc.new_stream(self._sink, SCHEMA)
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._pending_tokens = 0
        self._lengths: list[int] = []
        self._label_tokens: list[int] = []

    def add(self, input_ids: np.ndarray, labels: np.ndarray) -> None:
        """Add one document: int32 [length] each."""
        self._pending.append((input_ids, labels))
        self._pending_tokens += len(input_ids)
        self._lengths.append(len(input_ids))
        self._label_tokens.append(int(np.count_nonzero(labels[1:] != IGNORE_INDEX)))
        if self._pending_tokens >= BATCH_TOKENS:
            self._flush()

    def close(self) -> None:
        """Write the remaining documents and the counts."""
        self._flush()
        self._stream.close()
        self._sink.close()
        np.savez(
            self._path.with_suffix(".npz"),
            lengths=np.array(self._lengths, dtype=np.int32),
            label_tokens=np.array(self._label_tokens, dtype=np.int32),
        )

    def _flush(self) -> None:
        if self._pending:
            offsets = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in self._pending])]).astype(np.int64)
            columns = [
                pa.LargeListArray.from_arrays(offsets, np.concatenate([row[side] for row in self._pending]))
                for side in (0, 1)
            ]
            self._stream.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self._pending, self._pending_tokens = [], 0


def load_rows(folder: Path, name: str) -> Rows:
    """Memory-map what `Writer(folder, name)` wrote. Resident memory does not grow with the data."""
    import datasets

    path = folder / f"{name}.arrow"
    batches, starts, count = [], [], 0
    for batch in pa.ipc.open_stream(pa.memory_map(str(path))):
        ids, labels = batch.columns
        batches.append((ids.offsets.to_numpy(), ids.values.to_numpy(), labels.values.to_numpy()))
        starts.append(count)
        count += len(batch)
    with np.load(path.with_suffix(".npz")) as arrays:
        lengths, label_tokens = arrays["lengths"], arrays["label_tokens"]
    return Rows(
        dataset=datasets.Dataset.from_file(str(path)),
        lengths=lengths,
        label_tokens=label_tokens,
        _file_indices=np.arange(count),
        _batches=batches,
        _starts=starts,
    )


def fingerprint(settings: JsonObject) -> str:
    """Key of a cache entry: digest of everything that determines its tokens and labels (JSON-safe values)."""
    return digest({"version": VERSION, **settings})


def digest(value: JsonObject) -> str:
    """Digest (hex) of a JSON object, whatever the order of its keys."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def entry(cache: Path, key: str, build: Callable[[Path], dict], *, verify: bool) -> tuple[Path, dict]:
    """The folder of `key`, built if it is missing, and the value that `build` returned when it was built.

    `build(folder)` fills a temporary folder, which is renamed when it is complete, so a process that dies leaves no
    incomplete entry. A file lock lets one process build while all others (ranks and other runs) wait.

    Args:
        verify: read every file and compare checksums instead of only sizes.

    Raises:
        UserError: the cache folder is not writable.
        RunError: the disk is full.
    """
    folder = cache / key
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{key}.lock"):
            if not _is_whole(folder, verify=verify):
                with disk_errors(cache, "the data cache"), staging(folder) as partial:
                    about = build(partial)
                    made = {file.name: (file.stat().st_size, checksum(file)) for file in sorted(partial.iterdir())}
                    write_json(partial / _INFO, {"about": about, "files": made})
    except OSError as error:
        if not isinstance(error, PermissionError | LockTimeout) and error.errno != errno.EROFS:
            raise
        raise UserError(
            f"The data cache {cache} is not writable: {error}. Set data.cache_dir or the environment variable "
            "FINETUNE_CACHE to a writable folder."
        ) from None
    return folder, json.loads((folder / _INFO).read_text())["about"]


def is_complete(folder: Path, name: str) -> bool:
    """Whether an entry has what `Writer(folder, name)` wrote, by the sizes of all its files."""
    return _is_whole(folder, verify=False) and (folder / f"{name}.arrow").is_file()


def _is_whole(folder: Path, *, verify: bool) -> bool:
    """Whether an entry need not be built again."""
    try:
        files = json.loads((folder / _INFO).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return False
    for name, (size, recorded) in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size or (verify and checksum(path) != recorded):
            return False
    return True
