"""Rows -> messages -> token ids and labels -> the cache, once per machine for the same data and settings."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from finetune.config import Config
from finetune.config.schema import DEFAULTS
from finetune.data import formats, store
from finetune.data.formats import RowError
from finetune.data.ledger import Ledger
from finetune.data.mixture import Item, Source, configured_sources
from finetune.data.readers import Columns, Readers, Reading, RowEncoder, detect
from finetune.data.store import Rows
from finetune.data.templates.chat_templates import TEMPLATES
from finetune.data.templates.encoder import Encoded
from finetune.errors import RunError, UserError
from finetune.runtime import bootstrap
from finetune.runtime.ranks import distributed
from finetune.runtime.types import JsonObject, Tokenizer
from finetune.text import counted

CHUNK_ROWS = 1000  # rows that one process encodes at a time
# The first chunks are encoded in this process: starting workers takes seconds, because they import transformers.
POOL_FROM_CHUNK = 20


@dataclass(frozen=True, kw_only=True)
class Data:
    """The tokenized rows of every split."""

    splits: dict[str, Rows]
    ledgers: dict[str, JsonObject]  # by split
    format: str  # how rows were read and why; also what came from the template: turn markers, today's date
    fingerprint: str  # of the data, the tokenizer and every setting that determines tokens and labels
    order_key: str  # the same of the training rows alone: what their order is drawn from
    folder: Path  # of the cache entry
    cached: bool  # the entry existed already

    @property
    def train(self) -> Rows:
        """The rows of the split "train". Raises KeyError if there is none."""
        return self.splits["train"]

    @property
    def eval(self) -> Rows | None:
        """The rows of the split "eval", if there is one."""
        return self.splits.get("eval")


def prepare(config: Config, tokenizer: Tokenizer) -> Data:
    """Tokenize and mask the data of `config`, or map what an earlier run or another rank prepared.

    Raises:
        UserError: files, format, template or cache are unusable, or no row has a supervised token.
    """
    return prepare_splits(config, tokenizer, configured_sources(config))


def prepare_splits(config: Config, tokenizer: Tokenizer, splits: Mapping[str, Sequence[Source]]) -> Data:
    """Tokenize and mask the rows of several splits, or map what an earlier run or another rank prepared.

    Uses no process group: the ranks of a machine synchronize through a file lock.

    Args:
        splits: the sources of each split, in order. `data.eval_fraction` moves rows from "train" to "eval".

    Raises:
        UserError: files, format, template or cache are unusable, or no row of a split has a supervised token.
    """
    data, seed = config.data, config.training.seed
    every = [source for sources in splits.values() for source in sources]
    readers = Readers(config, tokenizer, every)
    digest = _tokenizer_digest(tokenizer)
    key = store.fingerprint(
        {
            "splits": {
                name: [
                    [source.identity, *_reading(source), source.weight, readers.identity(source)] for source in split
                ]
                for name, split in splits.items()
            },
            "tokenizer": digest,
            "seed": seed if data.eval_fraction or any(source.weight % 1 for source in every) else None,
            **{
                name: getattr(data, name)
                for name in ("system_prompt", "document_length", "over_length", "assistant_only_loss", "eval_fraction")
                + ("last_turn_only", *_LATER)
            },
        }
    )
    cache = Path(data.cache_dir) if data.cache_dir else bootstrap.cache_folder() / "data"

    built = []

    def build(folder: Path) -> JsonObject:
        built.append(folder)
        return _build(folder, config, readers, splits)

    # One rank per machine verifies the checksums; the others check only file sizes.
    folder, about = store.entry(cache, key, build, verify=distributed.ranks().is_local_main)
    return Data(
        splits={name: store.load_rows(folder, _file_name(name)) for name in about["ledgers"]},
        ledgers=about["ledgers"],
        format=about["format"] + readers.notes,
        fingerprint=_identity(config, splits, readers, digest),
        order_key=_identity(config, {name: one for name, one in splits.items() if name == "train"}, readers, digest),
        folder=folder,
        cached=not built,
    )


# Settings of `data:` that came after version 2 of the cache: part of an identity only if they are not at their default.
_LATER = (
    "completion_only_loss",
    "train_on_roles",
    "train_on_tool_calls",
    "train_on_thinking",
    "chat_template_kwargs",
    "keep_empty",
)


def _reading(source: Source) -> list[Any]:
    """How the rows of a source are read. A text field that is not set is not part of it: older releases have none."""
    return [source.format, source.columns | ({} if source.text_field == "text" else {"text field": source.text_field})]


def _identity(config: Config, splits: Mapping[str, Sequence[Source]], readers: Readers, tokenizer: str) -> str:
    """The fingerprint of these splits. That of the training rows alone is what their order is drawn from.

    It is not the key of the cache: a new layout of the cached files must not change the order, or no run of an earlier
    version could be resumed. A plan's digest also covers the lengths and supervised tokens of all rows.
    """
    data, seed = config.data, config.training.seed

    def of(source: Source) -> Any:
        own = [*_reading(source), source.template, source.weight]
        if own == [data.format, data.columns, None, 1.0]:
            return source.identity
        return [source.identity, *own, [seed, "rounded"] if source.weight % 1 else None]

    rows = {name: [of(source) for source in split] for name, split in splits.items()}
    alone = {name: found[0] if len(found) == 1 else found for name, found in rows.items()}
    template, instruction, response = readers.default_identity()
    same = ("format", "columns", "system_prompt", "max_length")
    same += ("assistant_only_loss", "last_turn_only", "split")
    settings = {
        "eval": None,
        "over_length": data.over_length or "truncate",
        **alone,
        "tokenizer": tokenizer,
        "template": template,
        "held out": [data.eval_fraction, seed] if data.eval_fraction else None,
        "weights": None,
        **{name: getattr(data, name) for name in same},
        **{name: getattr(data, name) for name in _LATER if getattr(data, name) != DEFAULTS[f"data.{name}"]},
        "instruction_part": instruction,
        "response_part": response,
    }
    return store.digest({"version": 2, **settings})


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Rows of one source that are encoded together."""

    rows: list[JsonObject]
    placed: list[tuple[str, str, int]]  # of each row: its position in the source, its split and how often it is used
    readings: list[Reading]  # of each row
    source: str
    encoder: RowEncoder

    @property
    def places(self) -> list[str]:
        """The position of each row in the source."""
        return [where for where, _, _ in self.placed]


def _build(folder: Path, config: Config, readers: Readers, splits: Mapping[str, Sequence[Source]]) -> JsonObject:
    opened = {name: [(source, rows) for source in split if (rows := source.open())] for name, split in splits.items()}
    names = [name for name in opened if opened[name]]
    if config.data.eval_fraction and "train" in names:
        names.append("eval")
    ledgers = {name: Ledger() for name in names}
    overlap = Overlap()
    writers = {name: store.Writer(folder, _file_name(name)) for name in names}
    chunks = (chunk for name in names for chunk in _chunks(name, opened.get(name, ()), config, readers, ledgers[name]))
    _encode_all(chunks, config.data.num_proc, ledgers, writers, overlap)
    for name in names:
        if name != "train" and "train" in names:
            ledgers[name].leaked = overlap.to_dict(name)
        writers[name].close()
        own = ledgers[name].sources if name in splits else {}  # held-out rows of a source may be few
        empty = [source for source, counts in own.items() if counts.rows_read and not counts.rows_kept]
        if empty or not ledgers[name].rows_kept:
            raise UserError(_nothing_left(name, ledgers, empty, config.data.eval_fraction))
    return {
        "ledgers": {name: ledger.to_dict() for name, ledger in ledgers.items()},
        "format": "; ".join(ledgers["train" if "train" in names else names[0]].formats()),
    }


def _chunks(
    split: str,
    opened: Sequence[tuple[Source, Iterator[Item]]],
    config: Config,
    readers: Readers,
    ledger: Ledger,
) -> Iterator[_Chunk]:
    """The rows of a split, in order, CHUNK_ROWS of the same source at a time. `ledger` gets the columns of each source
    that are not read."""
    seed, first = config.training.seed, 0
    of_entry = Counter[str]()  # rows read: an entry of several files is weighted as a whole
    held_out = int(config.data.eval_fraction * 2**64) if split == "train" else 0
    for source, rows in opened:
        format, rows = detect(rows, source, config)
        if source.raw:
            end = readers.encoder(source).text_end
            format = replace(format, evidence=f"documents of raw text, {source.raw}, each ends with {end!r}")
        columns = Columns(format, has_template=readers.has_template(source))
        read = 0
        while batch := list(islice(rows, CHUNK_ROWS)):
            chosen, placed = [], []
            drawn = [_random_number(f"{seed} weight {first + read + row}") for row in range(len(batch))]
            all_copies = _copies(source.weight, of_entry[source.name], drawn)
            for (number, (row, where)), copies in zip(enumerate(batch, read), all_copies, strict=True):
                # A held-out row is used once: its copies would otherwise be training rows.
                is_held_out = held_out > 0 and _random_number(f"{seed} {first + number}") < held_out
                if copies:
                    chosen.append(row)
                    placed.append((where, "eval", 1) if is_held_out else (where, split, copies))
                columns.add(row)
            read += len(batch)
            of_entry[source.name] += len(batch)
            if chosen:
                alike: dict[bool, list[JsonObject]] = {}  # a source may have prompts of text and of messages
                for row in chosen:
                    alike.setdefault(format.of(row).of_text, []).append(row)
                readings = {
                    of_text: readers.reading(group, format.of(group[0]), source) for of_text, group in alike.items()
                }
                yield _Chunk(
                    rows=chosen,
                    placed=placed,
                    readings=[readings[format.of(row).of_text] for row in chosen],
                    source=source.name,
                    encoder=readers.row_encoder(source, format),
                )
        formats.check_mapping(source.columns, columns.all)
        ledger.source(source.name).unread += columns.unread
        ledger.notes.update(columns.notes())
        first += read
    for source, _ in opened:
        if (count := of_entry[source.name]) and not _rounded(count * source.weight):
            raise UserError(
                f"{source.name}: a weight of {source.weight:g} takes none of its {counted(count, 'row')}. Set it to at "
                f"least {math.ceil(500 / count) / 1000:g}, or remove the source."
            )


def _copies(weight: float, read: int, drawn: Sequence[int]) -> list[int]:
    """How often each of the next rows of a source is used, given the number drawn for each. With those that were
    `read` before, it is round(rows x weight) in all."""
    whole, count = int(weight), len(drawn)
    extra = _rounded((read + count) * weight) - _rounded(read * weight) - whole * count
    chosen = set(sorted(range(count), key=drawn.__getitem__)[:extra])
    return [whole + (row in chosen) for row in range(count)]


def _rounded(number: float) -> int:
    return int(number + 0.5)


def _encode_all(
    chunks: Iterator[_Chunk],
    num_proc: int | None,
    ledgers: dict[str, Ledger],
    writers: dict[str, store.Writer],
    overlap: Overlap,
) -> None:
    """Encode every row, in order, into the writer of its split."""
    seen: dict[str, set[bytes]] = {name: set() for name in ledgers}
    for chunk, results in _encoded_chunks(chunks, num_proc):
        for (where, name, copies), reading, result in zip(chunk.placed, chunk.readings, results, strict=True):
            ledger = ledgers[name]
            ledger.read(chunk.source, reading.format, copies)
            if isinstance(result, RowError):
                ledger.drop(chunk.source, result.reason, where, result.detail, copies)
                continue
            for piece in [*result] * copies:
                ledger.keep(chunk.source, len(piece.input_ids), piece.label_tokens, templated=reading.templated)
                writers[name].add(piece.input_ids, piece.labels)
            for piece in result:
                ledger.ids(max(int(piece.input_ids.max()), int(piece.labels.max())), where)
                digest = hashlib.blake2b(piece.input_ids.tobytes() + piece.labels.tobytes(), digest_size=8).digest()
                ledger.duplicates += digest in seen[name]
                seen[name].add(digest)
                if notes := (*piece.notes, *([reading.note] if reading.note else [])):
                    ledger.notes.update(notes)
                if len(ledgers) > 1:
                    overlap.add(name, piece.input_ids, where)
            shortened = sum(piece.shortened for piece in result)
            if chunk.encoder.encoder.over_length == "split" and len(result) > 1:
                ledger.split += copies * (shortened > 0)
            else:  # a row of several documents may have several that are cut, or none
                ledger.truncated += copies * shortened


class Overlap:
    """Rows of other splits that have the same token ids as a training row."""

    def __init__(self) -> None:
        self._train: set[bytes] = set()
        self._others: dict[str, list[tuple[bytes, str]]] = {}  # digest and position; training rows may come later

    def add(self, split: str, ids: np.ndarray, where: str) -> None:
        """Note a document of a split."""
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
        if split == "train":
            self._train.add(digest)
        else:
            self._others.setdefault(split, []).append((digest, where))

    def to_dict(self, split: str) -> JsonObject:
        """For the ledger of `split`: how many rows, and where the first is; its line is None if the source has none."""
        others = self._others.get(split, [])
        found = list(dict.fromkeys(where for digest, where in others if digest in self._train))
        if not found:
            return {"rows": 0, "first": None}
        file, _, line = found[0].rpartition(":")
        first = {"file": file, "line": int(line)} if line.isdecimal() else {"file": found[0], "line": None}
        return {"rows": len(found), "first": first}


def _encoded_chunks(
    chunks: Iterator[_Chunk], num_proc: int | None
) -> Iterator[tuple[_Chunk, list[list[Encoded] | RowError]]]:
    """Encode chunks, in order: in this process, and from chunk POOL_FROM_CHUNK on in several processes."""
    processes = num_proc or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    inline = chunks if processes == 1 else islice(chunks, POOL_FROM_CHUNK)
    for chunk in inline:
        yield chunk, chunk.encoder.encode(chunk.rows, chunk.places)
    following = next(chunks, None)
    if following is None:
        return
    # Spawned, not forked: forking a process whose tokenizer has started threads can deadlock.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(processes, mp_context=context, initializer=start_worker) as pool:
            pending: deque[tuple[_Chunk, Future]] = deque()
            for chunk in chain([following], chunks):
                pending.append((chunk, pool.submit(chunk.encoder.encode, chunk.rows, chunk.places)))
                if len(pending) > 2 * processes:
                    encoded, future = pending.popleft()
                    yield encoded, future.result()
            for encoded, future in pending:
                yield encoded, future.result()
    except BrokenProcessPool as error:
        raise RunError(
            f"One of {processes} tokenizing processes was killed: it lacked memory (lower data.num_proc) or time."
        ) from error


def start_worker() -> None:
    """Prepare a process that encodes rows: it ends with its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process per core already
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent dies; a worker of a killed parent would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# What to do about rows that are dropped, by reason; for the others, the columns and the format are to be checked.
_OTHER_TEMPLATE = (
    "set model.chat_template to one that renders them (chatml_tools renders tools; the built-in ones are "
    f"{', '.join(TEMPLATES)}; or a Jinja file)"
)
REMEDIES = {
    "not_rendered": _OTHER_TEMPLATE,
    "template_error": _OTHER_TEMPLATE,
    "mask_ambiguous": "set model.chat_template to another one, or data.assistant_only_loss: false",
    "over_length": "raise data.max_length, or set data.over_length: split",
    "no_label": "check data.max_length, data.assistant_only_loss and data.response_part",
    "no_assistant": "check data.columns, data.format and data.assistant_only_loss",
}


def _nothing_left(split: str, ledgers: Mapping[str, Ledger], sources: Sequence[str], eval_fraction: float) -> str:
    """Why a split has no row, or of these sources none, although they have some."""
    ledger = ledgers[split]
    if not (ledger.rows_read or eval_fraction):
        return f"There are no rows ({split}). Add some."
    if not ledger.rows_read:
        total = counted(sum(one.rows_read for one in ledgers.values()), "row")
        found, change = ("none", "Raise") if split == "eval" else ("all of them", "Lower")
        drawn = f"data.eval_fraction: {eval_fraction:g} of {total} is {found}: each row is drawn by itself"
        return f"{drawn}. {change} it, or give data.eval_file."
    names, read = ", ".join(sources) or "data.eval_fraction", sum(ledger.sources[name].rows_read for name in sources)
    dropped = ledger.dropped.most_common()
    reasons = "; ".join(f"{count:,} x {reason} (first: {ledger.examples[reason]})" for reason, count in dropped)
    remedies = dict.fromkeys(REMEDIES.get(reason, "check data.columns and data.format") for reason, _ in dropped)
    return (
        f"{names}: none of {counted(read or ledger.rows_read, 'row')} ({split}) has a supervised token. Dropped in "
        f"{split}: {reasons}. Look at the first row of each reason, and {'; '.join(remedies)}."
    )


def cached_rows(folder: Path, split: str) -> Rows | None:
    """The rows of a split in an entry of the cache; None if they are not there any more."""
    return store.load_rows(folder, _file_name(split)) if store.is_complete(folder, _file_name(split)) else None


def _file_name(split: str) -> str:
    """Split names may be any text."""
    return quote(split, safe="")


def _random_number(seed: str) -> int:
    """A pseudorandom number in [0, 2**64), of the seed and number of a row."""
    return int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little")


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    head, rest = text.partition('"truncation"')[0], text.partition('"added_tokens"')[2]
    if backend is not None and rest:
        # Both are left by the tokenizer's last call, which never happened on a rank that read the cache of `map`.
        text = f'{head}"truncation":null,"padding":null,"added_tokens"{rest}'
    text += repr((tokenizer.special_tokens_map, tokenizer.eos_token_id))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
