"""Files -> messages -> token ids and labels -> the cache, once per machine for the same data and settings."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
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
class Data:
    """The tokenized training and evaluation rows of a configuration."""

    train: Rows
    eval: Rows | None
    ledgers: dict[str, dict[str, Any]]  # of "train" and, if there are evaluation rows, "eval"
    format: str  # the row format and its evidence; also the turn markers, if they were derived from the template
    fingerprint: str  # of the data, the tokenizer and every setting that determines tokens and labels
    folder: Path  # of the cache entry
    cached: bool  # the entry existed already


def prepare(config: Config, tokenizer: Any, hooks: Hooks = NO_HOOKS) -> Data:
    """Tokenize and mask the data of `config`, or map what an earlier run or another rank prepared.

    Uses no process group: the ranks of a machine synchronize through a file lock.

    Args:
        hooks: `hooks.dataset` returns the rows if `config` names no data.

    Raises:
        UserError: files, format, template or cache are unusable, or no row has a supervised token.
        RunError: the script's function failed.
    """
    data = config.data
    template = load_template(tokenizer, config.model.chat_template)
    instruction, response, derived = data.instruction_part, data.response_part, ""
    if response == "auto":
        instruction, response = derive_markers(tokenizer, template)
        derived = f"; markers from the chat template: {response!r} (supervised), {instruction!r} (masked)"
    markers = None
    if response is not None:
        markers = Markers(tokenizer, response, instruction, last_only=data.last_turn_only)
    encoder = Encoder(
        tokenizer,
        # Text is not rendered, so a template that cannot be masked exactly does not matter.
        None if data.format == "text" or markers else template,
        max_length=data.max_length,
        over_length=data.over_length,
        assistant_only_loss=data.assistant_only_loss,
        last_turn_only=data.last_turn_only,
        train_on_roles=data.train_on_roles,
        train_on_tool_calls=data.train_on_tool_calls,
        train_on_thinking=data.train_on_thinking,
        chat_template_kwargs=data.chat_template_kwargs,
        markers=markers,
    )
    eval_files = _files(data.eval_file)
    key = store.fingerprint(
        {
            "train": _identity(config, hooks),
            "eval": sources.content_digest(eval_files) if eval_files else None,
            "tokenizer": _tokenizer_digest(tokenizer),
            "template": template,
            "held out": [data.eval_fraction, config.training.seed] if data.eval_fraction else None,
            "weights": [data.weights, config.training.seed] if data.weights else None,
            **{
                name: getattr(data, name)
                for name in ("format", "columns", "system_prompt", "max_length", "over_length")
                + ("assistant_only_loss", "last_turn_only", "split", "train_on_roles", "train_on_tool_calls")
                + ("train_on_thinking", "chat_template_kwargs")
            },
            "instruction_part": instruction,
            "response_part": response,
        }
    )
    cache = Path(data.cache_dir) if data.cache_dir else bootstrap.cache_folder() / "data"

    built = []

    def build(folder: Path) -> dict[str, Any]:
        built.append(folder)
        before = hooks.inputs() if config.rows_from_script else None
        rows, held_out = _rows(config, tokenizer, hooks)
        about = _build(folder, config, encoder, template is not None, rows, held_out)
        return about | ({"inputs": [before, hooks.inputs()]} if config.rows_from_script else {})

    def is_current(about: dict[str, Any]) -> bool:
        # The files as they were before the function ran, or as it left them: it may write files and then read them.
        return not config.rows_from_script or hooks.inputs() in about["inputs"]

    # One rank per machine verifies the checksums; the others check only file sizes.
    folder, about = store.entry(cache, key, build, verify=distributed.ranks().is_local_main, is_current=is_current)
    if config.rows_from_script and config.training.eval_steps and "eval" not in about["ledgers"]:
        raise UserError(
            f"training.eval_steps is {config.training.eval_steps}, but {config.script} returns no evaluation rows. "
            "Return a pair (training rows, evaluation rows), or set data.eval_file or data.eval_fraction."
        )
    return Data(
        train=store.load_rows(folder, "train"),
        eval=store.load_rows(folder, "eval") if "eval" in about["ledgers"] else None,
        ledgers=about["ledgers"],
        format=about["format"] + derived,
        # The same script may return different rows (a shuffle, a file on the network), so their contents are hashed.
        fingerprint=store.fingerprint({"rows": store.content(folder)}) if config.rows_from_script else key,
        folder=folder,
        cached=not built,
    )


def _identity(config: Config, hooks: Hooks) -> Any:
    """Identity of the training rows, for the cache key."""
    if config.rows_from_script:
        return ["script", hooks.identity()]
    files = _files(config.data.train_file)
    return sources.content_digest(files) if files else [config.data.dataset_name, config.data.dataset_config]


def _rows(config: Config, tokenizer: Any, hooks: Hooks) -> tuple[Iterator[Item], Iterator[Item] | None]:
    """The training rows, and the evaluation rows if they have their own source."""
    data = config.data
    eval_files, train_files = _files(data.eval_file), _files(data.train_file)
    held_out = sources.iter_rows(eval_files) if eval_files else None
    if config.rows_from_script:
        rows, returned_held_out = _returned(tokenizer, hooks)
        if returned_held_out is not None and data.eval_fraction:
            raise UserError(
                f"{config.script} returns evaluation rows and data.eval_fraction is {data.eval_fraction}: only one may "
                "choose them. Set data.eval_fraction to 0, or return only the training rows."
            )
        return rows, held_out or returned_held_out
    if train_files:
        return _mixture(train_files, data.weights, config.training.seed), held_out
    return sources.iter_hub(str(data.dataset_name), data.dataset_config, data.split), held_out


def _returned(tokenizer: Any, hooks: Hooks) -> tuple[Iterator[Item], Iterator[Item] | None]:
    """The training and evaluation rows that the script's function returns, possibly as generators."""
    returned = hooks.call("dataset", tokenizer)
    name = getattr(hooks.dataset, "__name__", "dataset")

    def read(rows: Any) -> Iterator[Item]:
        with hooks.user_errors("dataset"):
            yield from sources.iter_returned(rows, name)

    if not isinstance(returned, tuple):
        return read(returned), None
    if len(returned) != 2:
        raise UserError(
            f"{name}() returned {len(returned)} values. Return the rows, or a pair (training rows, evaluation rows)."
        )
    return read(returned[0]), None if returned[1] is None else read(returned[1])


def _build(
    folder: Path,
    config: Config,
    encoder: Encoder,
    has_template: bool,
    rows: Iterator[Item],
    held_out: Iterator[Item] | None,
) -> dict[str, Any]:
    names = ["train"] + (["eval"] if held_out is not None or config.data.eval_fraction else [])
    ledgers = {name: Ledger() for name in names}
    overlap = Overlap()
    writers = {name: store.Writer(folder, name) for name in names}
    threshold = int(config.data.eval_fraction * 2**64)

    def split_of(number: int) -> str:
        return "eval" if threshold and _draw(config.training.seed, number) < threshold else "train"

    train_format, rows = _detect(rows, config)
    _encode_all(rows, train_format, config, encoder, has_template, ledgers, writers, split_of, overlap)
    if held_out is not None:
        eval_format, held_out = _detect(held_out, config)
        _encode_all(held_out, eval_format, config, encoder, has_template, ledgers, writers, lambda _: "eval", overlap)
    if "eval" in ledgers:
        ledgers["eval"].leaked = overlap.to_dict()
    for name in names:
        writers[name].close()
        if not ledgers[name].rows_kept:
            raise UserError(_nothing_left(name, ledgers[name], config.script if config.rows_from_script else None))
    return {
        "ledgers": {name: ledger.to_dict() for name, ledger in ledgers.items()},
        "format": f"{train_format.name} ({train_format.evidence})",
    }


def _mixture(files: list[str], weights: list[float] | None, seed: int) -> Iterator[Item]:
    """The rows of all files, repeated by the weight of their file: 2.0 takes each row twice, 0.3 takes 30% of them."""
    for index, file in enumerate(files):
        weight = weights[index] if weights else 1.0
        repeats, threshold = int(weight), int((weight % 1) * 2**64)
        for number, item in enumerate(sources.iter_rows([file])):
            extra = threshold > 0 and _draw(seed, f"weight {index} {number}") < threshold
            yield from [item] * (repeats + extra)


def _detect(rows: Iterable[Item], config: Config) -> tuple[Format, Iterator[Item]]:
    """The format of the first rows, and an iterator over all rows."""
    rows = iter(rows)
    first = list(islice(rows, SAMPLE_ROWS))
    columns = list(dict.fromkeys(column for row, _ in first for column in row))
    try:
        found = formats.detect(columns, [row for row, _ in first], config.data.format, config.data.columns)
    except UserError as error:
        raise UserError(f"{first[0][1]}: {error}" if first else str(error)) from None
    if config.data.response_part is not None and found.name != "text":
        raise UserError(
            f"data.response_part applies only to rows of text, and these rows have the format {found.name} "
            f"({found.evidence}), whose turns are known without markers. Remove data.response_part and "
            "data.instruction_part, or set data.format to text and data.columns to {text: COLUMN}."
        )
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
    overlap: Overlap,
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
                if piece.notes:
                    ledger.note(piece.notes)
                if "eval" in ledgers:
                    overlap.add(name, piece.input_ids, where)
            ledger.truncated += len(result) == 1 and result[0].shortened
            ledger.split += len(result) > 1


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
                formats.to_conversation(
                    row,
                    format,
                    system_prompt=system_prompt,
                    has_template=has_template,
                    train_on_roles=encoder.train_on_roles,
                )
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
