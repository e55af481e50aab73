"""Files -> messages -> token ids and labels -> the cache, once per machine for the same data and settings."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from finetune.config import Config
from finetune.data import formats, sources, store
from finetune.data.formats import Format, RowError
from finetune.data.ledger import Ledger
from finetune.data.markers import Markers, derive_markers
from finetune.data.store import Rows
from finetune.data.template import Encoded, Encoder, load_template
from finetune.errors import UserError
from finetune.runtime import bootstrap, distributed
from finetune.runtime.hooks import NO_HOOKS, Hooks

CHUNK_ROWS = 1000  # rows that one process encodes at a time
SAMPLE_ROWS = 100  # rows used to detect the format
# The first chunks are encoded in this process: starting workers takes seconds, because they import transformers.
POOL_FROM_CHUNK = 20

Item = tuple[dict[str, Any], str]  # a row and its position in the source


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows of one origin, all read the same way.

    name:      in messages and in the ledger
    open:      yields each row and its position; called at most once, and only if the cache lacks the rows
    identity:  JSON-safe value that changes when the rows do
    format:    a row format, or "auto"
    columns:   field of the format -> column
    template:  chat template by name or file; None is the configuration's
    weight:    passes over the rows per epoch: 2 takes each row twice, 0.3 takes 30% of them
    """

    name: str
    open: Callable[[], Iterator[Item]]
    identity: Any
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    weight: float = 1.0

    def key(self) -> list[Any]:
        """Everything about this source that determines its documents, JSON-safe."""
        return [self.identity, self.format, dict(self.columns), self.template, self.weight]


Splits = Mapping[str, Sequence[Source]]  # by name: "train", "eval", or "eval_NAME" for one of several held-out sets


@dataclass(frozen=True, kw_only=True)
class Data:
    """The tokenized rows of a run, by split."""

    splits: dict[str, Rows]
    ledgers: dict[str, dict[str, Any]]  # by split
    format: str  # the row format and its evidence; also the turn markers, if they were derived from the template
    fingerprint: str  # of the data, the tokenizer and every setting that determines tokens and labels
    folder: Path  # of the cache entry
    cached: bool  # the entry existed already

    @property
    def train(self) -> Rows:
        return self.splits["train"]

    @property
    def eval(self) -> Rows | None:
        return self.splits.get("eval")


def prepare(config: Config, tokenizer: Any, hooks: Hooks = NO_HOOKS) -> Data:
    """Tokenize and mask the data of `config`, or map what an earlier run or another rank prepared.

    Args:
        hooks: `hooks.dataset` returns the rows if `config` names no data.

    Raises:
        UserError: files, format, template or cache are unusable, or no row has a supervised token.
        RunError: the script's function failed.
    """
    held_out = _file_sources(_files(config.data.eval_file), None, config)
    if config.rows_from_script:
        return _prepare_returned(config, tokenizer, hooks, held_out)
    train_files = _files(config.data.train_file)
    train = _file_sources(train_files, config.data.weights, config) if train_files else [_hub_source(config)]
    return prepare_splits(config, tokenizer, {"train": train} | ({"eval": held_out} if held_out else {}))


def prepare_splits(config: Config, tokenizer: Any, splits: Splits) -> Data:
    """Tokenize and mask the rows of `splits`, or map what an earlier run or another rank prepared.

    Uses no process group: the ranks of a machine synchronize through a file lock.

    Args:
        config: how rows are read and held out. The data it names is not looked at.

    Raises:
        UserError: rows, format, template or cache are unusable, or no row has a supervised token.
    """
    key: dict[str, Any] = {name: [source.key() for source in sources] for name, sources in splits.items()}
    if any(source.weight % 1 for sources in splits.values() for source in sources):
        key["seed"] = config.training.seed  # decides which rows are repeated
    return _Preparation(config, tokenizer).run(key, lambda: splits)


def _prepare_returned(config: Config, tokenizer: Any, hooks: Hooks, held_out: list[Source]) -> Data:
    """`prepare` for the rows that a function of the user's script returns; it is called only to fill the cache."""
    key = {"train": ["script", hooks.identity()], "eval": [source.key() for source in held_out]}
    read = {"format": config.data.format, "columns": config.data.columns}
    before = ""

    def opened() -> Splits:
        nonlocal before
        before = hooks.inputs()
        returned = _returned(tokenizer, hooks)
        if len(returned) > 1 and config.data.eval_fraction:
            raise UserError(
                f"{config.script} returns evaluation rows and data.eval_fraction is {config.data.eval_fraction}: only "
                "one may choose them. Set data.eval_fraction to 0, or return only the training rows."
            )
        name = getattr(hooks.dataset, "__name__", "dataset")
        sources = [Source(name=f"{name}()", open=lambda rows=rows: rows, identity=None, **read) for rows in returned]
        evaluated = held_out or sources[1:]
        return {"train": sources[:1]} | ({"eval": evaluated} if evaluated else {})

    # The files as they were before the function ran, or as it left them: it may write files and then read them.
    data = _Preparation(config, tokenizer).run(
        key,
        opened,
        note=lambda: {"inputs": [before, hooks.inputs()]},
        is_current=lambda about: hooks.inputs() in about["inputs"],
    )
    if config.training.eval_steps and data.eval is None:
        raise UserError(
            f"training.eval_steps is {config.training.eval_steps}, but {config.script} returns no evaluation rows. "
            "Return a pair (training rows, evaluation rows), or set data.eval_file or data.eval_fraction."
        )
    # The same script may return different rows (a shuffle, a file on the network), so their contents are hashed.
    return replace(data, fingerprint=store.fingerprint({"rows": store.content(data.folder)}))


def _returned(tokenizer: Any, hooks: Hooks) -> list[Iterator[Item]]:
    """The training rows that the script's function returns, and the evaluation rows if it returns any."""
    returned = hooks.call("dataset", tokenizer)
    name = getattr(hooks.dataset, "__name__", "dataset")

    def read(rows: Any) -> Iterator[Item]:
        with hooks.user_errors("dataset"):
            yield from sources.iter_returned(rows, name)

    if not isinstance(returned, tuple):
        return [read(returned)]
    if len(returned) != 2:
        raise UserError(
            f"{name}() returned {len(returned)} values. Return the rows, or a pair (training rows, evaluation rows)."
        )
    return [read(rows) for rows in returned if rows is not None]


def _file_sources(files: list[str], weights: list[float] | None, config: Config) -> list[Source]:
    """One source per entry of `data.train_file` or `data.eval_file`."""
    return [
        Source(
            name=file,
            open=lambda file=file: sources.iter_rows([file]),
            identity=sources.content_digest([file]),
            format=config.data.format,
            columns=config.data.columns,
            weight=weights[number] if weights else 1.0,
        )
        for number, file in enumerate(files)
    ]


def _hub_source(config: Config) -> Source:
    data = config.data
    return Source(
        name=str(data.dataset_name),
        open=lambda: sources.iter_hub(str(data.dataset_name), data.dataset_config, data.split),
        identity=[data.dataset_name, data.dataset_config, data.split],
        format=data.format,
        columns=data.columns,
    )


class _Preparation:
    """Fills or finds the cache entry of a configuration's rows."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        data = config.data
        self.config, self.tokenizer = config, tokenizer
        self.template = load_template(tokenizer, config.model.chat_template)
        instruction, response, self.derived = data.instruction_part, data.response_part, ""
        if response == "auto":
            instruction, response = derive_markers(tokenizer, self.template)
            self.derived = f"; markers from the chat template: {response!r} (supervised), {instruction!r} (masked)"
        self.parts = (instruction, response)
        self.markers = None
        if response is not None:
            self.markers = Markers(tokenizer, response, instruction, last_only=data.last_turn_only)

    def run(
        self,
        key: Any,
        opened: Callable[[], Splits],
        note: Callable[[], dict[str, Any]] = dict,
        is_current: Callable[[dict[str, Any]], bool] = lambda about: True,
    ) -> Data:
        """The tokenized rows.

        Args:
            key: identity of the splits, JSON-safe.
            opened: the splits; called only if the cache lacks them.
            note: further facts to keep in the cache entry.
            is_current: called with them; if False, the entry is filled again.
        """
        data = self.config.data
        cache = Path(data.cache_dir) if data.cache_dir else bootstrap.cache_folder() / "data"
        fingerprint = store.fingerprint({"splits": key, **self._settings()})
        built = []

        def build(folder: Path) -> dict[str, Any]:
            built.append(folder)
            about = self._build(folder, opened())
            return about | note()

        # One rank per machine verifies the checksums; the others check only file sizes.
        verify = distributed.ranks().is_local_main
        folder, about = store.entry(cache, fingerprint, build, verify=verify, is_current=is_current)
        return Data(
            splits={name: store.load_rows(folder, name) for name in about["ledgers"]},
            ledgers=about["ledgers"],
            format=about["format"] + self.derived,
            fingerprint=fingerprint,
            folder=folder,
            cached=not built,
        )

    def _settings(self) -> dict[str, Any]:
        """Everything but the rows that determines tokens and labels."""
        data = self.config.data
        names = ("system_prompt", "max_length", "over_length", "assistant_only_loss", "last_turn_only")
        return {
            "tokenizer": _tokenizer_digest(self.tokenizer),
            "template": self.template,
            "held out": [data.eval_fraction, self.config.training.seed] if data.eval_fraction else None,
            "parts": self.parts,
            **{name: getattr(data, name) for name in names},
        }

    def encoder(self, template: str | None, format: Format) -> Encoder:
        """How the rows of a source become tokens and labels."""
        data = self.config.data
        return Encoder(
            self.tokenizer,
            # Text is not rendered, so a template that cannot be masked exactly does not matter.
            None if format.name == "text" or self.markers else template,
            max_length=data.max_length,
            over_length=data.over_length,
            assistant_only_loss=data.assistant_only_loss,
            last_turn_only=data.last_turn_only,
            markers=self.markers,
        )

    def _build(self, folder: Path, splits: Splits) -> dict[str, Any]:
        names = [*splits] + (["eval"] if self.config.data.eval_fraction and "eval" not in splits else [])
        writing = _Writing(folder, names, self.config)
        read: dict[str, list[str]] = {}
        for split, sources_of_split in splits.items():
            for number, source in enumerate(sources_of_split):
                items, format = self._detected(source, number)
                read.setdefault(f"{format.name} ({format.evidence})", []).append(source.name)
                template = self.template if source.template is None else load_template(self.tokenizer, source.template)
                work = (self.encoder(template, format), format, self.config.data.system_prompt, template is not None)
                writing.add(split, source, format, _encoded_chunks(items, work, self.config.data.num_proc))
        described = [text if len(read) == 1 else f"{', '.join(named)}: {text}" for text, named in read.items()]
        return {"ledgers": writing.finish(), "format": "; ".join(described)}

    def _detected(self, source: Source, number: int) -> tuple[Iterator[Item], Format]:
        """The rows of a source, repeated by its weight, and their format."""
        format, rows = _detect(source.open(), source, self.config)
        return _repeated(rows, source.weight, self.config.training.seed, number), format


class _Writing:
    """Writes the encoded rows of all splits to a cache entry, and counts them."""

    def __init__(self, folder: Path, names: Sequence[str], config: Config) -> None:
        self._config = config
        self._ledgers = {name: Ledger() for name in names}
        self._writers = {name: store.Writer(folder, name) for name in names}
        self._seen: dict[str, set[bytes]] = {name: set() for name in names}
        self._overlap = {name: Overlap() for name in names if name != "train"} if "train" in names else {}
        self._threshold = int(config.data.eval_fraction * 2**64)
        self._rows = 0  # of the training sources

    def add(self, split: str, source: Source, format: Format, chunks: Iterator[tuple[list[str], list]]) -> None:
        """Write the documents of a source. Some training rows are held out, by `data.eval_fraction`."""
        own = {name: Ledger() for name in self._ledgers}  # of this source
        for wheres, results in chunks:
            for where, result in zip(wheres, results, strict=True):
                self._write(self._split_of(split), where, result, own)
        for name, ledger in own.items():
            if ledger.rows_read:
                self._ledgers[name].add_source(source.name, format.name, ledger)

    def _split_of(self, split: str) -> str:
        if split != "train":
            return split
        self._rows += 1
        held_out = self._threshold and _draw(self._config.training.seed, self._rows - 1) < self._threshold
        return "eval" if held_out else "train"

    def _write(self, name: str, where: str, result: list[Encoded] | RowError, own: dict[str, Ledger]) -> None:
        ledger = own[name]
        ledger.rows_read += 1
        if isinstance(result, RowError):
            ledger.drop(result.reason, where, result.detail)
            return
        seen = self._seen[name]
        for piece in result:
            ledger.keep(len(piece.input_ids), piece.label_tokens)
            self._writers[name].add(piece.input_ids, piece.labels)
            digest = hashlib.blake2b(piece.input_ids.tobytes() + piece.labels.tobytes(), digest_size=8).digest()
            ledger.duplicates += digest in seen
            seen.add(digest)
            for split, overlap in self._overlap.items():
                if name in ("train", split):
                    overlap.add("train" if name == "train" else "eval", piece.input_ids, where)
        ledger.truncated += len(result) == 1 and result[0].shortened
        ledger.split += len(result) > 1

    def finish(self) -> dict[str, dict[str, Any]]:
        """Close the files. Returns the ledger of each split.

        Raises:
            UserError: a split has no row with a supervised token.
        """
        for name, ledger in self._ledgers.items():
            self._writers[name].close()
            if name in self._overlap:
                ledger.leaked = self._overlap[name].to_dict()
            if not ledger.rows_kept:
                script = self._config.script if self._config.rows_from_script else None
                raise UserError(_nothing_left(name, ledger, script))
        return {name: ledger.to_dict() for name, ledger in self._ledgers.items()}


def _repeated(rows: Iterator[Item], weight: float, seed: int, source: int) -> Iterator[Item]:
    """The rows of a source, repeated by its weight."""
    repeats, threshold = int(weight), int((weight % 1) * 2**64)
    for number, item in enumerate(rows):
        extra = threshold > 0 and _draw(seed, f"weight {source} {number}") < threshold
        yield from [item] * (repeats + extra)


def _detect(rows: Iterator[Item], source: Source, config: Config) -> tuple[Format, Iterator[Item]]:
    """The format of the first rows of a source, and an iterator over all rows."""
    first = list(islice(rows, SAMPLE_ROWS))
    columns = list(dict.fromkeys(column for row, _ in first for column in row))
    try:
        found = formats.detect(columns, [row for row, _ in first], source.format, source.columns)
    except UserError as error:
        raise UserError(f"{first[0][1]}: {error}" if first else str(error)) from None
    if config.data.response_part is not None and found.name != "text":
        raise UserError(
            f"data.response_part applies only to rows of text, and these rows have the format {found.name} "
            f"({found.evidence}), whose turns are known without markers. Remove data.response_part and "
            "data.instruction_part, or set data.format to text and data.columns to {text: COLUMN}."
        )
    return found, chain(first, rows)


class Overlap:
    """Evaluation rows that have the same token ids as a training row."""

    def __init__(self) -> None:
        self._train: set[bytes] = set()
        self._eval: list[tuple[bytes, str]] = []  # digest and position; training rows may come later

    def add(self, split: str, ids: np.ndarray, where: str) -> None:
        """Note a document of a split."""
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
        if split == "train":
            self._train.add(digest)
        else:
            self._eval.append((digest, where))

    def to_dict(self) -> dict[str, Any]:
        """For the ledger: how many rows, and where the first is; its line is None if the source has none."""
        found = list(dict.fromkeys(where for digest, where in self._eval if digest in self._train))
        if not found:
            return {"rows": 0, "first": None}
        file, _, line = found[0].rpartition(":")
        first = {"file": file, "line": int(line)} if line.isdecimal() else {"file": found[0], "line": None}
        return {"rows": len(found), "first": first}


def _encoded_chunks(
    rows: Iterator[Item], work: tuple, num_proc: int | None
) -> Iterator[tuple[list[str], list[list[Encoded] | RowError]]]:
    """Encode rows in chunks, in order: in this process, and from chunk POOL_FROM_CHUNK on in several processes."""
    processes = num_proc or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    chunks = iter(lambda: list(islice(rows, CHUNK_ROWS)), [])
    inline = chunks if processes == 1 else islice(chunks, POOL_FROM_CHUNK)
    for chunk in inline:
        yield [where for _, where in chunk], _encode([row for row, _ in chunk], work)
    following = next(chunks, None)
    if following is None:
        return
    # Spawned, not forked: forking a process whose tokenizer has started threads can deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker) as pool:
        pending: deque[tuple[list[str], Future]] = deque()
        for chunk in chain([following], chunks):
            pending.append(([where for _, where in chunk], pool.submit(_encode, [row for row, _ in chunk], work)))
            if len(pending) > 2 * processes:
                wheres, future = pending.popleft()
                yield wheres, future.result()
        for wheres, future in pending:
            yield wheres, future.result()


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process per core already
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent dies; a worker of a killed parent would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(rows: Sequence[dict[str, Any]], work: tuple) -> list[list[Encoded] | RowError]:
    encoder, format, system_prompt, has_template = work
    results: list[list[Encoded] | RowError] = []
    positions, conversations = [], []
    for row in rows:
        try:
            conversations.append(
                formats.to_conversation(row, format, system_prompt=system_prompt, has_template=has_template)
            )
            positions.append(len(results))
            results.append([])
        except RowError as error:
            results.append(error)
    for position, result in zip(positions, encoder.encode_batch(conversations), strict=True):
        results[position] = result
    return results


def _nothing_left(name: str, ledger: Ledger, script: str | None) -> str:
    key = script or ("data.train_file" if name == "train" else "data.eval_file or data.eval_fraction")
    reasons = "; ".join(
        f"{count:,} x {reason} (first: {ledger.examples[reason]})" for reason, count in ledger.dropped.most_common()
    )
    return (
        f"{key}: none of the {ledger.rows_read:,} rows has a supervised token. Dropped: {reasons or 'none'}. Check the "
        "first row listed for each reason, and the settings data.columns, data.format, data.max_length, "
        "data.assistant_only_loss and data.response_part."
    )


def _files(given: str | list[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or [])


def _draw(seed: int, number: int | str) -> int:
    """A pseudorandom number in [0, 2**64) for one row; it alone decides if the row is held out or repeated."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little")


def _tokenizer_digest(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    text += repr((tokenizer.special_tokens_map, tokenizer.eos_token_id))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
