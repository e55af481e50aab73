"""Read rows (dicts), each with its position, from files, Hub datasets and scripts. formats.py interprets them."""

from __future__ import annotations

import contextlib
import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import IO, Any

from finetune.data.arrow import batch_rows, dataset_rows
from finetune.data.remote import RemoteFile, expand_url, is_url, remote_errors
from finetune.errors import UserError, listed
from finetune.redact import redact
from finetune.runtime.files import open_regular, read_bytes, special_kind
from finetune.runtime.types import JsonObject

Row = JsonObject
File = Path | RemoteFile

RAW_KINDS = (".txt", ".md")  # documents, not rows
KINDS = (".jsonl", ".json", ".csv", ".parquet", ".arrow", *RAW_KINDS)
COMPRESSIONS = (".gz",)
_TEXT_KINDS = (".jsonl", ".json", ".csv", *RAW_KINDS)
_SUPPORTED = (
    "Supported are .jsonl, .json and .csv (also compressed as .gz), .parquet, .arrow, folders written by "
    "datasets.save_to_disk, and .txt and .md for raw text."
)
_ABOUT = ("README", "LICENSE")  # files about a folder, not data in it
# Files about a dataset next to its data, which `datasets` skips as well (FILES_TO_IGNORE in datasets/data_files.py).
_DESCRIPTIONS = ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json")
# Names by which `datasets` knows the split of a file or folder (datasets/data_files.py), "held out", and such names
# with "set", as in testset.jsonl, which `datasets` would train on.
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation", "held[-_ ]?out", "holdout"),
}
_SPLIT_NAMES = {
    split: re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(names)})(?:set)?(?:[-._ 0-9]|$)", re.IGNORECASE)
    for split, names in _SPLITS.items()
}
_BATCH_ROWS = 1024  # rows of an Arrow table converted to Python objects at once
_CHUNK_BYTES = 1 << 20
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}  # of a CSV


def iter_rows(files: Sequence[str | File], *, whole: bool = False) -> Iterator[tuple[Row, str]]:
    """Yields (row, where) from files, URLs, globs, folders of files and save_to_disk folders, in the order given.

    `where` is for messages: "train.jsonl:17" (physical line) or "x.parquet:row 17", both counted from 1. Memory use is
    bounded by a line or a record batch, except for .json, which is parsed as one document. `whole`: a .txt file is one
    document; otherwise blank lines divide it into several. Raises UserError if a file
    is missing, empty, truncated, not UTF-8, or contains something other than rows.
    """
    for path in expand(files):
        empty = True
        for item in _reader(path, whole):
            empty = False
            yield item
        if empty:
            others = " If it is one of several files, remove it." if len(files) > 1 else ""
            raise UserError(f"{path} is empty: it has no rows. Write rows to it, or name another file.{others}")


def expand(files: Sequence[str | File]) -> list[File]:
    """Expand paths, URLs, globs and folders into files and save_to_disk folders; the matches of each are sorted.

    Raises:
        UserError: nothing matches, or one glob or folder has held-out files next to others.
    """
    if not files:
        raise UserError(f"No data file was given. {_SUPPORTED}")
    found: list[File] = []
    for name in files:
        matches = [name] if isinstance(name, File) else _expand_one(name)
        _check_one_split(str(name), matches)
        found += matches
    return found


def is_raw(path: File) -> bool:
    """Whether a file holds documents of raw text instead of rows."""
    return _kind(path) in RAW_KINDS


def divided(path: File, *, whole: bool) -> str:
    """How a file of raw text is divided into documents, in words; empty for a file of rows."""
    if not is_raw(path):
        return ""
    one = whole or _kind(path) == ".md"
    return "one per file" if one else "divided by blank lines (data.format: document keeps a file whole)"


def content_digest(files: Sequence[str | File]) -> str:
    """xxh3-128 (hex) of what `iter_rows` would read: type, size and bytes of every file, in order. It does not depend
    on the names of files and folders, so a moved or renamed folder keeps its digest. A file behind a URL is not read:
    its address, size and checksum or time stand for it."""
    import xxhash

    digest = xxhash.xxh3_128()
    for path in expand(files):
        if isinstance(path, RemoteFile):
            digest.update(json.dumps(path.identity()).encode())
            continue
        for part in _arrow_parts(path) if path.is_dir() else [path]:
            digest.update(f"{_kind(part)}:{part.stat().st_size}:".encode())
            with open_regular(part) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
    return digest.hexdigest()


def iter_hub(
    name: str, config: str | None = None, split: str = "train", revision: str | None = None
) -> Iterator[tuple[Row, str]]:
    """Yields (row, where) from a dataset on the Hub, downloaded once by `datasets` and memory-mapped from its cache.
    Raises UserError if it cannot be downloaded or if the name, config or split does not exist."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    what = f"{name} ({config})" if config else name
    try:
        data = datasets.load_dataset(name, config, split=split, revision=revision)
    except DatasetNotFoundError as error:
        raise UserError(
            f"The dataset {what!r} was not found on the Hub: {_reason(error)}. Check the name, log in with "
            "`hf auth login` if it is private or gated, or set data.train_file to local files."
        ) from error
    except (ConnectionError, TimeoutError) as error:
        raise UserError(
            f"The dataset {what!r} is not in the local cache and cannot be downloaded: {_reason(error)}. Unset "
            "HF_HUB_OFFLINE and HF_DATASETS_OFFLINE if they are set. Without network access, run `hf download "
            f"--repo-type dataset {name}` on another machine, copy the folder, and set data.train_file to its files."
        ) from error
    except (ValueError, RuntimeError) as error:  # for an unknown config or split, datasets lists the existing ones
        raise UserError(
            f"The split {split!r} of the dataset {what!r} cannot be loaded: {_reason(error)}. Check data.split and "
            "data.dataset_config."
        ) from error
    if not isinstance(data, datasets.Dataset):
        raise UserError(f"data.split must name one split of the dataset {what!r}: {split!r}. Set it to, say, train.")
    for number, row in enumerate(dataset_rows(data, data.features), 1):
        yield row, f"{name}:{split}:row {number}"


# --- which files ----------------------------------------------------------------------------------------------------


def _expand_one(name: str) -> Sequence[File]:
    if is_url(name):
        return expand_url(name, lambda file: _is_data(file) and (not is_raw(file) or _asks_for_raw(name)), _SUPPORTED)
    path = Path(name).expanduser()
    if path.is_dir():
        return _expand_folder(path)
    if path.exists():
        if kind := special_kind(path):
            raise UserError(f"{path} is {kind}, not a file or folder. {_SUPPORTED}")
        if _kind(path) not in KINDS:
            raise UserError(f"{path} has an unsupported extension: {''.join(path.suffixes) or 'none'}. {_SUPPORTED}")
        return [path]
    if glob.has_magic(name):
        # A glob may also match other files, such as a README: these are skipped.
        found = sorted(glob.glob(str(path), recursive=True))
        matches = [Path(match) for match in found if _is_data(Path(match)) or _is_saved_dataset(Path(match))]
        matches = [match for match in matches if not is_raw(match) or _asks_for_raw(name)]
        if not matches:
            others = f", only {', '.join(found[:10])}" if found else ""
            raise UserError(f"No data file matches {name!r}{others}. {_SUPPORTED}")
        return matches
    raise UserError(f"{path} does not exist. {_what_exists_near(path)}")


def _expand_folder(path: Path) -> list[Path]:
    if _is_saved_dataset(path):
        return [path]
    children = sorted(path.iterdir())
    if (path / "dataset_dict.json").is_file() and (saved := [child for child in children if _is_saved_dataset(child)]):
        raise _several_splits(str(path), {child.name: [child] for child in saved})
    if matches := _data_in(children):
        return matches
    if inner := [
        child for child in children if child.is_dir() and (_is_saved_dataset(child) or _data_in(child.iterdir()))
    ]:
        remedy = f"Give {' or '.join(map(str, inner[:3]))}, which {'has' if len(inner) == 1 else 'have'} some."
    else:
        remedy = _SUPPORTED
    listing = ", ".join(child.name for child in children[:10]) or "nothing"
    raise UserError(f"The folder {path} has no data file: it contains {listing}. {remedy}")


def _data_in(children: Iterable[Path]) -> list[Path]:
    """The data files of a folder: raw text only if there is no other data."""
    matches = [p for p in children if p.is_file() and _is_data(p) and not p.name.startswith(".")]
    raw = [p for p in matches if is_raw(p) and p.name.partition(".")[0].upper() not in _ABOUT]
    return [p for p in matches if not is_raw(p)] or raw


def _is_data(path: File) -> bool:
    return _kind(path) in KINDS and str(path).rpartition("/")[2] not in _DESCRIPTIONS


def _asks_for_raw(pattern: str) -> bool:
    """Whether a glob or URL names the ending of raw text itself: others may match files about the data."""
    return is_raw(Path(pattern))


def _check_one_split(name: str, files: Sequence[File]) -> None:
    """Check that a glob or a folder has no files of a test or validation split next to others. Raises UserError."""
    if len(files) < 2:
        return
    splits: dict[str, list[File]] = {}
    base = redact(_fixed_part(name))
    for file in files:
        inner = str(file).removeprefix(base) if str(file).startswith(base) else str(file).rpartition("/")[2]
        splits.setdefault(_split_of(inner), []).append(file)
    if len(splits) > 1 and splits.keys() & {"validation", "test"}:
        raise _several_splits(name, splits)


def _fixed_part(name: str) -> str:
    """What of a glob or folder its files' names begin with."""
    fixed = name if is_url(name) else str(Path(name).expanduser())
    return re.split(r"[*?\[]", fixed)[0].rpartition("/")[0] if glob.has_magic(fixed) else fixed


def _split_of(inner: str) -> str:
    """The split that a path below the given folder belongs to by its names; "" if by none."""
    for part in reversed(inner.split("/")):  # the file's own name first
        for split, pattern in _SPLIT_NAMES.items():
            if pattern.search(part):
                return split
    return ""


def _several_splits(name: str, splits: Mapping[str, Sequence[File]]) -> UserError:
    """The error that suggests which split to train on, and which to evaluate on."""
    listed = "; ".join(
        f"{split or 'without a split in the name'}: {', '.join(str(file) for file in files[:3])}"
        + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        for split, files in splits.items()
    )

    def given(split: str) -> str:
        files = [str(file) for file in splits[split]]
        return files[0] if len(files) == 1 else f"[{', '.join(files[:2])}{', ...' if len(files) > 2 else ''}]"

    if len(splits) == 1:
        return UserError(f"{redact(name)} contains one split: {listed}. Give its folder: {given(next(iter(splits)))}.")
    # A dataset for several purposes has a pair of splits for each, such as train_sft and test_sft.
    train = _best_split(splits, ("train", ""), ("", "sft"))
    held_out = _best_split(splits, ("validation", "test"), (_purpose(train or ""), ""))
    found = {"data.train_file": train, "data.eval_file": held_out}
    remedies = " and ".join(f"{key}: {given(split)}" for key, split in found.items() if split is not None)
    return UserError(f"{redact(name)} contains several splits: {listed}. Give one of them: {remedies}.")


def _best_split(splits: Iterable[str], kinds: Sequence[str], purposes: Sequence[str]) -> str | None:
    """The split of one of these kinds that is best for one of these purposes; the first purpose and kind come first."""

    def rank(split: str) -> tuple[int, int]:
        purpose = _purpose(split)
        return purposes.index(purpose) if purpose in purposes else len(purposes), kinds.index(_split_of(split))

    return min((split for split in splits if _split_of(split) in kinds), key=rank, default=None)


def _purpose(split: str) -> str:
    """What the name of a split has in addition to its kind: "sft" of "train_sft"."""
    kind = _split_of(split)
    return _SPLIT_NAMES[kind].sub("", split) if kind else split


def _is_saved_dataset(path: Path) -> bool:
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _arrow_parts(folder: Path) -> list[Path]:
    try:
        state = json.loads(read_bytes(folder / "state.json"))
        parts = [folder / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}/state.json was not written by datasets.save_to_disk, or is damaged. Save the dataset again."
        ) from error
    for part in parts:
        if not part.is_file():
            raise UserError(f"{part} is missing: {folder}/state.json lists it. Copy the folder again.")
    return parts


def _kind(path: File) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        inner = suffixes[0] if len(suffixes) == 2 else ""
        return inner if inner in _TEXT_KINDS else ""
    return suffixes[-1] if suffixes else ""


def _what_exists_near(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"The folder {folder} does not exist either."
    names = sorted(child.name for child in folder.iterdir() if child.is_dir() or _kind(child) in KINDS)
    near = get_close_matches(path.name, names, n=5, cutoff=0.5) or names[:10]
    return f"The folder {folder} has {', '.join(near)}." if near else f"The folder {folder} has no data file."


# --- one reader per type --------------------------------------------------------------------------------------------


def _reader(path: File, whole: bool) -> Iterator[tuple[Row, str]]:
    if isinstance(path, Path):
        yield from _read_saved_dataset(path) if path.is_dir() else _file_rows(path, whole)
    else:
        with remote_errors(str(path)):
            yield from _file_rows(path, whole)


def _file_rows(path: File, whole: bool) -> Iterator[tuple[Row, str]]:
    kind = _kind(path)
    if kind == ".parquet":
        return _read_parquet(path)
    if kind == ".arrow":
        return _number(path, _arrow_rows(path))
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".md": _read_whole}
    return _read_text(path, readers.get(kind) or (_read_whole if whole else _read_paragraphs))


def _read_text(path: File, reader: Any) -> Iterator[tuple[Row, str]]:
    """Rows of a text file. A truncated archive fails only while it is read, so errors are handled around the reader."""
    try:
        yield from reader(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path} is an incomplete or damaged compressed file ({error}). Copy or compress it again."
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}. Check its permissions and its disk.") from error


@contextlib.contextmanager
def _open(path: File) -> Iterator[IO[bytes]]:
    """The contents of a file, decompressed."""
    with open_regular(path) if isinstance(path, Path) else path.open() as file:
        if path.suffix.lower() == ".gz":
            with gzip.open(file) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            yield file


def _read_jsonl(path: File) -> Iterator[tuple[Row, str]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            text = _decode(path, line, first=number == 1)
            if not text.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{where}: invalid JSON ({error.msg}, column {error.colno}). Each line must be one object."
                ) from error
            except (ValueError, RecursionError) as error:  # an integer with thousands of digits; deep nesting
                raise UserError(f"{where}: JSON that cannot be read ({_reason(error)}). Remove the row.") from error
            yield _as_row(row, where), where


def _read_json(path: File) -> Iterator[tuple[Row, str]]:
    with _open(path) as file:
        text = _decode(path, file.read(), first=True)
    if not text.strip():
        return
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):  # JSON Lines are often named .json
            yield from _read_jsonl(path)
            return
        raise UserError(
            f"{path}:{error.lineno}: invalid JSON ({error.msg}, column {error.colno}). Correct this line."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: JSON that cannot be read ({_reason(error)}). Remove the row that causes it."
        ) from error
    if isinstance(data, dict):
        if not isinstance(data.get("data"), list):
            keys = listed(data, 10)
            raise UserError(
                f'{path} must be a list of rows or {{"data": [rows]}}: it is an object with the keys {keys}. Rename a '
                "file with one object per line to .jsonl."
            )
        data = data["data"]
    if not isinstance(data, list):
        raise UserError(
            f'{path} must be a list of rows or {{"data": [rows]}}: it is a {type(data).__name__}. Convert it.'
        )
    for number, row in enumerate(data, 1):
        where = f"{path}:row {number}"
        yield _as_row(row, where), where


def _read_paragraphs(path: File) -> Iterator[tuple[Row, str]]:
    """Documents divided by blank lines."""
    lines: list[str] = []
    with _open(path) as file:
        for number, text in enumerate(chain(_lines(path, file), [""]), 1):
            if text.strip():
                lines.append(text)
            elif lines:
                yield {"text": "".join(lines).strip("\n")}, f"{path}:{number - len(lines)}"
                lines = []


def _read_whole(path: File) -> Iterator[tuple[Row, str]]:
    """One document."""
    with _open(path) as file:
        text = "".join(_lines(path, file))
    if text.strip():
        yield {"text": text.strip("\n")}, f"{path}:1"


def _lines(path: File, file: IO[bytes]) -> Iterator[str]:
    """Lines that end in \\n, \\r\\n or, as of a classic Mac, \\r; all with \\n instead."""
    first = True
    for some in file:
        for line in some.splitlines(keepends=True):
            yield _decode(path, line, first).replace("\r\n", "\n").replace("\r", "\n")
            first = False


def _read_csv(path: File) -> Iterator[tuple[Row, str]]:
    csv.field_size_limit(2**31 - 1)  # the default rejects fields above 128 KiB
    try:
        with _open(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
            yield from _csv_rows(path, file)
    except UnicodeDecodeError as error:
        raise _wrong_encoding(path) from error


def _csv_rows(path: File, file: IO[str]) -> Iterator[tuple[Row, str]]:
    first = file.readline()
    # A comma, or if the header has none, the semicolon or tab that some spreadsheets write instead.
    separators = [one for one in _SEPARATORS if len(next(csv.reader([first], delimiter=one), ())) > 1] or [","]
    quotes = f"Put quotes around text that contains a {_SEPARATORS[separators[0]]}."
    reader = csv.DictReader(chain([first], file), delimiter=separators[0], strict=True)
    try:
        header = reader.fieldnames or []
        repeated = sorted({name for name in header if header.count(name) > 1})
        if repeated:
            raise UserError(f"{path}: the header repeats {listed(repeated)}. Give each column a unique name.")
        for number, row in enumerate(reader, 1):
            where = f"{path}:row {number}"
            if None in row:
                extra = len(row[None])  # pyright: ignore[reportArgumentType]
                raise UserError(
                    f"{where} (line {reader.line_num}) has {len(header) + extra} fields, but the header has "
                    f"{len(header)}. {quotes}"
                )
            yield row, where
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: invalid CSV ({error}). {quotes}") from error


def _read_parquet(path: File) -> Iterator[tuple[Row, str]]:
    import pyarrow
    import pyarrow.parquet

    def rows() -> Iterator[Row]:
        try:
            local = isinstance(path, Path)
            with pyarrow.parquet.ParquetFile(path if local else path.open(), memory_map=local) as file:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    yield from batch_rows(batch)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UserError(
                f"{path} is an incomplete or damaged Parquet file ({_reason(error)}). Copy or write it again."
            ) from error

    return _number(path, rows())


def _read_saved_dataset(folder: Path) -> Iterator[tuple[Row, str]]:
    return _number(folder, (row for part in _arrow_parts(folder) for row in _arrow_rows(part)))


def _arrow_source(path: File) -> Any:
    import pyarrow

    return pyarrow.memory_map(str(path)) if isinstance(path, Path) else pyarrow.PythonFile(path.open(), mode="r")


def _arrow_rows(path: File) -> Iterator[Row]:
    import pyarrow

    try:
        with _arrow_source(path) as source:
            try:  # `datasets` writes Arrow's stream format, other programs often its file format
                batches = iter(pyarrow.ipc.open_stream(source))
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            for batch in batches:
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    yield from batch_rows(batch.slice(start, _BATCH_ROWS))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is an incomplete or damaged Arrow file ({_reason(error)}). Copy or write it again."
        ) from error


# --- helpers --------------------------------------------------------------------------------------------------------


def _number(path: File, rows: Iterator[Row]) -> Iterator[tuple[Row, str]]:
    for number, row in enumerate(rows, 1):
        yield row, f"{path}:row {number}"


def _as_row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be an object with named fields, not a {type(row).__name__}. Correct it.")
    return row


def _decode(path: File, data: bytes, first: bool) -> str:
    try:
        return data.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise _wrong_encoding(path) from error


def _wrong_encoding(path: File) -> UserError:
    """Reads the file again to find the position: a text wrapper decodes in chunks and does not report it."""
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
    which = "decompressed file" if path.suffix in COMPRESSIONS else "file"
    return UserError(
        f"{path}:{number}: not UTF-8 at byte {offset} of the {which}. Convert it, for example with "
        f"`iconv -f {guess} -t UTF-8`."
    )


def _reason(error: Exception) -> str:
    """A library's message without its final period, to be used inside a sentence."""
    return str(error).strip().rstrip(".")
