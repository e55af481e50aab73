"""Reading: files or a hub name -> rows (dicts) with the place each came from. Nothing here knows what a row means."""

from __future__ import annotations

import csv
import glob
import gzip
import importlib.util
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

from finetune.errors import UserError

Row = dict[str, Any]

KINDS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst")
_TEXT_KINDS = (".jsonl", ".json", ".csv")
_READABLE = (
    "readable are .jsonl, .json and .csv (also with .gz or .zst), .parquet, .arrow and datasets.save_to_disk folders"
)
_BATCH_ROWS = 1024  # rows of an Arrow table turned into Python objects at once
_CHUNK_BYTES = 1 << 20


def iter_rows(files: Sequence[str]) -> Iterator[tuple[Row, str]]:
    """Yields (row, where) over files, globs, folders of files and save_to_disk folders, in the order given.

    `where` is for people: "train.jsonl:17" (physical line) or "x.parquet:row 17"; both count from 1. Memory is bounded
    by a line or a record batch, except for .json, which is one document. Raises UserError for anything that cannot be
    read exactly: a file that is missing, empty, truncated, in another encoding, or holds something that is not a row.
    """
    for path in expand(files):
        empty = True
        for item in _reader(path):
            empty = False
            yield item
        if empty:
            raise UserError(f"{path} is empty: it holds no row; remove it from the list or fill it")


def expand(files: Sequence[str]) -> list[Path]:
    """The files and save_to_disk folders that `files` (paths, globs, folders) stand for; matches come sorted."""
    if not files:
        raise UserError(f"no data file was given; {_READABLE}")
    return [path for name in files for path in _expand_one(name)]


def content_digest(files: Sequence[str]) -> str:
    """xxh3-128 (hex) of what `iter_rows` would read: kind, size and bytes of every file, in order. Names of files and
    folders do not enter, so a moved or renamed folder keeps its digest; the order of the files does."""
    import xxhash

    digest = xxhash.xxh3_128()
    for path in expand(files):
        for part in _arrow_parts(path) if path.is_dir() else [path]:
            digest.update(f"{_kind(part)}:{part.stat().st_size}:".encode())
            with part.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
    return digest.hexdigest()


def iter_hub(
    name: str, config: str | None = None, split: str = "train", revision: str | None = None
) -> Iterator[tuple[Row, str]]:
    """Yields (row, where) of a data set on the hub, downloaded once by `datasets` and memory-mapped from its cache.
    Raises UserError when it cannot be reached or when name, config or split do not exist."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    what = f"{name} ({config})" if config else name
    try:
        data = datasets.load_dataset(name, config, split=split, revision=revision)
    except DatasetNotFoundError as error:
        raise UserError(
            f"data set {what!r} was not found on the hub: {error}; check the name, log in if it is private, "
            "or give local files as data.train_file"
        ) from error
    except (ConnectionError, TimeoutError) as error:
        raise UserError(
            f"data set {what!r} is neither in the local cache nor reachable: {error}; on a machine with network run "
            f"`hf download --repo-type dataset {name}` and copy the folder here, then give its files as "
            "data.train_file; or unset HF_HUB_OFFLINE / HF_DATASETS_OFFLINE"
        ) from error
    except (ValueError, RuntimeError) as error:  # unknown config or split: datasets lists those that exist
        raise UserError(f"data set {what!r}, split {split!r}: {error}") from error
    if not isinstance(data, datasets.Dataset):
        raise UserError(f"data set {what!r}: split {split!r} does not name one split; name one, such as 'train'")
    for number, row in enumerate(data, 1):
        yield dict(row), f"{name}:{split}:row {number}"


def iter_made(rows: Any, name: str) -> Iterator[tuple[Row, str]]:
    """Yields (row, where) of what a user's function `name` returned: a `datasets.Dataset`, or any iterable of mappings.
    Raises UserError when it is nothing of the kind."""
    if isinstance(rows, Mapping):
        raise UserError(f"{name}() returned several sets of rows ({', '.join(map(str, rows))}); return one of them")
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise UserError(f"{name}() returned a {type(rows).__name__}; return a datasets.Dataset or a list of rows")
    if hasattr(rows, "with_format"):  # of `datasets`: plain values, not the tensors that a set_format("torch") makes
        rows = rows.with_format(None)  # pyright: ignore[reportAttributeAccessIssue]
    for number, row in enumerate(rows, 1):
        where = f"{name}():row {number}"
        yield _as_row(row, where), where


# --- which files ----------------------------------------------------------------------------------------------------


def _expand_one(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        return _expand_folder(path)
    if path.exists():
        if not path.is_file():
            raise UserError(f"{path} is not a file or folder but a pipe, socket or device; {_READABLE}")
        if _kind(path) not in KINDS:
            raise UserError(f"{path} has the ending {''.join(path.suffixes) or '(none)'!r}; {_READABLE}")
        return [path]
    if glob.has_magic(name):
        # A glob may also catch a README: only what can be read is taken, and nothing at all is an error.
        found = sorted(glob.glob(str(path), recursive=True))
        matches = [Path(match) for match in found if _kind(Path(match)) in KINDS or _is_saved_dataset(Path(match))]
        if not matches:
            raise UserError(f"no file matches {name!r}{f' and is data: {found}' if found else ''}; {_READABLE}")
        return matches
    raise UserError(f"{path} does not exist; {_neighbours(path)}")


def _expand_folder(path: Path) -> list[Path]:
    if _is_saved_dataset(path):
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in path.iterdir() if _is_saved_dataset(child))
        raise UserError(f"{path} holds the splits {splits}; name one of them, such as {path / splits[0]}")
    children = sorted(path.iterdir())
    matches = [p for p in children if p.is_file() and _kind(p) in KINDS and not p.name.startswith(".")]
    if not matches:
        listing = ", ".join(child.name for child in children[:10]) or "nothing"
        raise UserError(f"the folder {path} holds no data file (it holds {listing}); {_READABLE}")
    return matches


def _is_saved_dataset(path: Path) -> bool:
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _arrow_parts(folder: Path) -> list[Path]:
    try:
        state = json.loads((folder / "state.json").read_bytes())
        parts = [folder / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}/state.json is not what datasets.save_to_disk writes; save the data again") from error
    for part in parts:
        if not part.is_file():
            raise UserError(f"{part} is missing though {folder}/state.json names it; copy the folder again")
    return parts


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        inner = suffixes[0] if len(suffixes) == 2 else ""
        return inner if inner in _TEXT_KINDS else ""
    return suffixes[-1] if suffixes else ""


def _neighbours(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"nor does the folder {folder}"
    names = sorted(child.name for child in folder.iterdir() if child.is_dir() or _kind(child) in KINDS)
    near = get_close_matches(path.name, names, n=5, cutoff=0.5) or names[:10]
    return f"in {folder} there is {', '.join(near)}" if near else f"the folder {folder} holds no data file"


# --- how each kind is read ------------------------------------------------------------------------------------------


def _reader(path: Path) -> Iterator[tuple[Row, str]]:
    if path.is_dir():
        return _read_saved_dataset(path)
    kind = _kind(path)
    if kind == ".parquet":
        return _read_parquet(path)
    if kind == ".arrow":
        return _number(path, _arrow_rows(path))
    return _read_text(path, {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}[kind])


def _read_text(path: Path, reader: Any) -> Iterator[tuple[Row, str]]:
    """A truncated archive is found only while it is being read, so its errors are named here, around the reading."""
    try:
        yield from reader(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is not a whole compressed file ({error}); copy or compress it again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        if type(error).__name__ == "ZstdError":  # by name: the package is optional
            raise UserError(f"{path} is not a zstd file ({error}); copy or compress it again") from error
        raise


def _open(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if suffix == ".zst":
        if importlib.util.find_spec("zstandard") is None:
            raise UserError(f"{path} is zstd-compressed; run `pip install zstandard`, or decompress it with `zstd -d`")
        return io.BufferedReader(_ZstdFile(path))
    return path.open("rb")


class _ZstdFile(io.RawIOBase):
    """A .zst file as bytes. Not zstandard's own reader, because that takes a file cut off in the middle for whole."""

    def __init__(self, path: Path) -> None:
        import zstandard  # pyright: ignore[reportMissingImports]

        self._file, self._context = path.open("rb"), zstandard.ZstdDecompressor()
        self._frame, self._pending = None, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            packed = getattr(self._frame, "unused_data", b"") or self._file.read(_CHUNK_BYTES // 16)
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._frame is None or self._frame.eof:  # several frames one after another are one file
                self._frame = self._context.decompressobj()
            self._pending = memoryview(self._frame.decompress(packed))
        count = min(len(buffer), len(self._pending))
        buffer[:count], self._pending = self._pending[:count], self._pending[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_jsonl(path: Path) -> Iterator[tuple[Row, str]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            text = _decode(path, line, first=number == 1)
            if not text.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not JSON ({error.msg}, column {error.colno}); one object a line") from error
            except (ValueError, RecursionError) as error:  # an integer of thousands of digits; deep nesting
                raise UserError(f"{where}: JSON that cannot be read ({error}); remove the row") from error
            yield _as_row(row, where), where


def _read_json(path: Path) -> Iterator[tuple[Row, str]]:
    with _open(path) as file:
        text = _decode(path, file.read(), first=True)
    if not text.strip():
        return
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):  # JSON Lines under the name .json is common
            yield from _read_jsonl(path)
            return
        raise UserError(f"{path}:{error.lineno}: not JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: JSON that cannot be read ({error})") from error
    if isinstance(data, dict):
        if not isinstance(data.get("data"), list):
            keys = ", ".join(list(data)[:10])
            raise UserError(
                f"{path} is one object with the keys {keys}; a .json file is a list of rows or "
                '{"data": [rows]}; a file with one object a line is called .jsonl'
            )
        data = data["data"]
    if not isinstance(data, list):
        raise UserError(f'{path} is one {type(data).__name__}; a .json file is a list of rows or {{"data": [rows]}}')
    for number, row in enumerate(data, 1):
        where = f"{path}:row {number}"
        yield _as_row(row, where), where


def _read_csv(path: Path) -> Iterator[tuple[Row, str]]:
    csv.field_size_limit(2**31 - 1)  # the default refuses a text of more than 128 KiB
    with _open(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
        try:
            reader = csv.DictReader(file, strict=True)
            header = reader.fieldnames or []
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice:
                raise UserError(f"{path}: the header names {twice} twice; give every column its own name")
            for number, row in enumerate(reader, 1):
                where = f"{path}:row {number}"
                if None in row:
                    extra = len(row[None])  # pyright: ignore[reportArgumentType]
                    raise UserError(
                        f"{where} (line {reader.line_num}) has {len(header) + extra} fields, the header "
                        f"{len(header)}; put quotes around texts that hold a comma"
                    )
                yield row, where
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: not CSV ({error}); quote texts that hold a comma") from error
        except UnicodeDecodeError as error:
            raise _wrong_encoding(path) from error


def _read_parquet(path: Path) -> Iterator[tuple[Row, str]]:
    import pyarrow
    import pyarrow.parquet

    def rows() -> Iterator[Row]:
        try:
            with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UserError(f"{path} is not a whole Parquet file ({error}); copy or write it again") from error

    return _number(path, rows())


def _read_saved_dataset(folder: Path) -> Iterator[tuple[Row, str]]:
    return _number(folder, (row for part in _arrow_parts(folder) for row in _arrow_rows(part)))


def _arrow_rows(path: Path) -> Iterator[Row]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            try:  # `datasets` writes the stream format, other programs often the file format
                batches = iter(pyarrow.ipc.open_stream(source))
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            for batch in batches:
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    yield from batch.slice(start, _BATCH_ROWS).to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is not a whole Arrow file ({error}); copy or write it again") from error


# --- small parts ----------------------------------------------------------------------------------------------------


def _number(path: Path, rows: Iterator[Row]) -> Iterator[tuple[Row, str]]:
    for number, row in enumerate(rows, 1):
        yield row, f"{path}:row {number}"


def _as_row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row is an object of named fields, this is a {type(row).__name__}")
    return row


def _decode(path: Path, data: bytes, first: bool) -> str:
    try:
        return data.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise _wrong_encoding(path) from error


def _wrong_encoding(path: Path) -> UserError:
    """Reads again to say where: a text wrapper decodes in chunks and does not know the place in the file."""
    offset, number, guess = 0, 1, "LATIN1"
    with _open(path) as file:
        for number, line in enumerate(file, 1):  # a newline byte is never inside a UTF-8 character
            if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
                guess = "UTF-16"
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                offset += error.start
                break
            offset += len(line)
    unpacked = "unpacked " if path.suffix in COMPRESSIONS else ""
    return UserError(
        f"{path}:{number}: not UTF-8 from byte {offset} of the {unpacked}file; "
        f"convert it to UTF-8 (perhaps `iconv -f {guess} -t UTF-8`)"
    )
