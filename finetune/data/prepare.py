"""Files -> formats -> messages -> ids and labels -> the cache, once per machine and change."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from finetune import bootstrap, distributed
from finetune.config import Config
from finetune.data import formats, sources, store
from finetune.data.formats import Format, RowError
from finetune.data.ledger import Ledger
from finetune.data.store import Rows
from finetune.data.template import Encoded, Encoder, load_template
from finetune.errors import UserError

CHUNK_ROWS = 1000  # rows that one process encodes at a time
SAMPLE_ROWS = 100  # rows that the format is detected from
# Worker processes import transformers, which takes seconds: fewer rows than this are quicker without them.
POOL_FROM_CHUNK = 20

Item = tuple[dict[str, Any], str]  # a row and where it stands


@dataclass(frozen=True, kw_only=True)
class Data:
    """The tokenised training and held-out rows of a configuration."""

    train: Rows
    eval: Rows | None
    ledgers: dict[str, dict[str, Any]]  # "train" and, where rows are held out, "eval"
    format: str  # name of the row format and why it was chosen
    fingerprint: str  # of the data, the tokenizer and every setting that decides tokens and labels
    folder: Path  # of the cache entry
    cached: bool  # it was there already


def prepare(config: Config, tokenizer: Any) -> Data:
    """Tokenise and mask the data of `config`, or map what an earlier run or another rank has prepared.

    Takes no part in any process group: ranks of one machine meet at a file lock.

    Raises:
        UserError: files, format, template or cache are not usable, or no row is left to learn from.
    """
    data = config.data
    template = load_template(tokenizer, config.model.chat_template)
    encoder = Encoder(
        tokenizer,
        template,
        max_length=data.max_length,
        over_length=data.over_length,
        assistant_only_loss=data.assistant_only_loss,
        last_turn_only=data.last_turn_only,
    )
    train_files, eval_files = _files(data.train_file), _files(data.eval_file)
    key = store.fingerprint(
        {
            "train": sources.content_digest(train_files) if train_files else _hub_identity(config),
            "eval": sources.content_digest(eval_files) if eval_files else None,
            "tokenizer": _tokenizer_digest(tokenizer),
            "template": template,
            "held out": [data.eval_fraction, config.training.seed] if data.eval_fraction else None,
            "weights": [data.weights, config.training.seed] if data.weights else None,
            **{
                name: getattr(data, name)
                for name in ("format", "columns", "system_prompt", "max_length", "over_length")
                + ("assistant_only_loss", "last_turn_only", "split")
            },
        }
    )
    cache = Path(data.cache_dir) if data.cache_dir else bootstrap.cache_folder() / "data"

    built = []

    def build(folder: Path) -> dict[str, Any]:
        built.append(folder)
        return _build(folder, config, encoder, template is not None, train_files, eval_files)

    # One rank of each machine reads every byte to verify it; the others trust it.
    folder, about = store.entry(cache, key, build, verify=distributed.ranks().is_local_main)
    return Data(
        train=store.load_rows(folder, "train"),
        eval=store.load_rows(folder, "eval") if "eval" in about["ledgers"] else None,
        ledgers=about["ledgers"],
        format=about["format"],
        fingerprint=key,
        folder=folder,
        cached=not built,
    )


def _build(
    folder: Path, config: Config, encoder: Encoder, has_template: bool, train_files: list[str], eval_files: list[str]
) -> dict[str, Any]:
    if train_files:
        rows = _mixture(train_files, config.data.weights, config.training.seed)
    else:
        rows = sources.iter_hub(str(config.data.dataset_name), config.data.dataset_config, config.data.split)
    names = ["train"] + (["eval"] if eval_files or config.data.eval_fraction else [])
    ledgers = {name: Ledger() for name in names}
    writers = {name: store.Writer(folder, name) for name in names}
    threshold = int(config.data.eval_fraction * 2**64)

    def split_of(number: int) -> str:
        return "eval" if threshold and _draw(config.training.seed, number) < threshold else "train"

    train_format, rows = _detect(rows, config)
    _encode_all(rows, train_format, config, encoder, has_template, ledgers, writers, split_of)
    if eval_files:
        held_out = sources.iter_rows(eval_files)
        eval_format, held_out = _detect(held_out, config)
        _encode_all(held_out, eval_format, config, encoder, has_template, ledgers, writers, lambda number: "eval")
    for name in names:
        writers[name].close()
        if not ledgers[name].rows_kept:
            raise UserError(_nothing_left(name, ledgers[name]))
    return {
        "ledgers": {name: ledger.to_dict() for name, ledger in ledgers.items()},
        "format": f"{train_format.name} ({train_format.evidence})",
    }


def _mixture(files: list[str], weights: list[float] | None, seed: int) -> Iterator[Item]:
    """The rows of all files, each as often as the weight of its file says: 2.0 twice, 0.3 for three of ten rows."""
    for place, file in enumerate(files):
        weight = weights[place] if weights else 1.0
        whole, part = int(weight), int((weight % 1) * 2**64)
        for number, item in enumerate(sources.iter_rows([file])):
            times = whole + (part > 0 and _draw(seed, f"weight {place} {number}") < part)
            yield from [item] * times


def _detect(rows: Iterable[Item], config: Config) -> tuple[Format, Iterator[Item]]:
    """The format of the first rows, and all rows again."""
    rows = iter(rows)
    first = list(islice(rows, SAMPLE_ROWS))
    columns = list(dict.fromkeys(column for row, _ in first for column in row))
    found = formats.detect(columns, [row for row, _ in first], config.data.format, config.data.columns)
    return found, chain(first, rows)


def _encode_all(
    rows: Iterator[Item],
    format: Format,
    config: Config,
    encoder: Encoder,
    has_template: bool,
    ledgers: dict[str, Ledger],
    writers: dict[str, store.Writer],
    split_of: Any,
) -> None:
    """Encode every row, in order, into the writer of its split."""
    seen: dict[str, set[bytes]] = {name: set() for name in ledgers}
    number = 0
    work = (encoder, format, config.data.system_prompt, has_template)
    for wheres, results in _encoded_chunks(rows, work, config.data.num_proc):
        for where, result in zip(wheres, results, strict=True):
            name = split_of(number)
            ledger = ledgers[name]
            number += 1
            ledger.rows_read += 1
            if isinstance(result, RowError):
                ledger.drop(result.reason, where, result.detail)
                continue
            for piece in result:
                ledger.keep(len(piece.input_ids), piece.label_tokens)
                writers[name].add(piece.input_ids, piece.labels)
                digest = hashlib.blake2b(piece.input_ids.tobytes() + piece.labels.tobytes(), digest_size=8).digest()
                ledger.duplicates += digest in seen[name]
                seen[name].add(digest)
            ledger.truncated += len(result) == 1 and result[0].shortened
            ledger.split += len(result) > 1


def _encoded_chunks(
    rows: Iterator[Item], work: tuple, num_proc: int | None
) -> Iterator[tuple[list[str], list[list[Encoded] | RowError]]]:
    """Chunks of rows encoded in this process, and from POOL_FROM_CHUNK on in several, in the order of the rows."""
    processes = num_proc or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    chunks = iter(lambda: list(islice(rows, CHUNK_ROWS)), [])
    inline = chunks if processes == 1 else islice(chunks, POOL_FROM_CHUNK)
    for chunk in inline:
        yield [where for _, where in chunk], _encode([row for row, _ in chunk], work)
    following = next(chunks, None)
    if following is None:
        return
    # Spawned, not forked: a fork of a process whose tokenizer has threads can deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_one_thread) as pool:
        pending: deque[tuple[list[str], Future]] = deque()
        for chunk in chain([following], chunks):
            pending.append(([where for _, where in chunk], pool.submit(_encode, [row for row, _ in chunk], work)))
            if len(pending) > 2 * processes:
                wheres, future = pending.popleft()
                yield wheres, future.result()
        for wheres, future in pending:
            yield wheres, future.result()


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core: threads beside them only get in the way


def _encode(rows: Sequence[dict[str, Any]], work: tuple) -> list[list[Encoded] | RowError]:
    encoder, format, system_prompt, has_template = work
    results: list[list[Encoded] | RowError] = []
    places, conversations = [], []
    for row in rows:
        try:
            conversations.append(
                formats.to_conversation(row, format, system_prompt=system_prompt, has_template=has_template)
            )
            places.append(len(results))
            results.append([])
        except RowError as error:
            results.append(error)
    for place, result in zip(places, encoder.encode_batch(conversations), strict=True):
        results[place] = result
    return results


def _nothing_left(name: str, ledger: Ledger) -> str:
    key = "data.train_file" if name == "train" else "data.eval_file or data.eval_fraction"
    reasons = "; ".join(
        f"{count:,} x {reason} (first: {ledger.examples[reason]})" for reason, count in ledger.dropped.most_common()
    )
    return (
        f"{key}: none of the {ledger.rows_read:,} rows has a token to learn. Dropped: {reasons or 'none'}. Look at "
        "the first "
        "row named for each reason; data.columns, data.format, data.max_length and data.assistant_only_loss decide "
        "what is kept."
    )


def _files(given: str | list[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or [])


def _hub_identity(config: Config) -> list[str | None]:
    return [config.data.dataset_name, config.data.dataset_config]


def _draw(seed: int, number: int | str) -> int:
    """A number in [0, 2**64) for one row: which rows are held out or repeated depends on nothing else."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little")


def _tokenizer_digest(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    text += repr((tokenizer.special_tokens_map, tokenizer.eos_token_id))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
