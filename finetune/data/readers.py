"""How the rows of each source are read: their format, chat template, turn markers and encoder."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from finetune.config import Config
from finetune.data import formats
from finetune.data.formats import Format, RowError
from finetune.data.mixture import Item, Source
from finetune.data.templates.chat_templates import document_end, load_template
from finetune.data.templates.encoder import Encoded, Encoder, TokenizerError
from finetune.data.templates.markers import Markers, derive_markers
from finetune.data.templates.render import DATE
from finetune.errors import UserError, cut, listed
from finetune.runtime.ranks import interrupt
from finetune.runtime.types import JsonObject, Tokenizer

SAMPLE_ROWS = 100  # rows used to detect the format
LOOKED_AT = 10  # rows of a chunk that are searched for a template: all rows of a source are written in the same way
SLOW_SECONDS = 30.0  # of a chunk, before it is reported: a second is usual


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows of a chunk are read."""

    format: str  # and its evidence
    templated: bool  # the rows are in the chat template, by this program or before
    note: str | None  # about rows that are not, although they could be


class Readers:
    """The chat template, turn markers and encoder of each source; sources with the same settings share them."""

    def __init__(self, config: Config, tokenizer: Tokenizer, sources: Iterable[Source]) -> None:
        self._config, self.tokenizer = config, tokenizer
        self._templates: dict[str | None, str | None] = {}
        self._markers: dict[str | None, tuple[str | None, str | None]] = {}
        self._encoders: dict[tuple[str | None, bool, bool], Encoder] = {}  # by template, of text, of raw text
        self._turns: dict[str | None, str | None] = {}
        self.notes = ""
        for source in sources:
            try:
                self._add(source)
            except UserError as error:
                if source.template is None:
                    raise
                raise UserError(f"{source.name}, template {source.template}: {error}") from None

    def identity(self, source: Source) -> Any:
        """The template and the markers of a source, JSON-safe."""
        return self._read(self._name(source))

    def default_identity(self) -> Any:
        """Those of the configuration."""
        return self._read(self._config.model.chat_template)

    def _read(self, name: str | None) -> Any:
        if name not in self._templates:
            self._templates[name] = load_template(self.tokenizer, name)
            self._markers[name] = self._markers_of(self._templates[name])
        template = self._templates[name]
        return [f"{template} on {DATE}" if _writes_date(template) else template, *self._markers[name]]

    def encoder(self, source: Source) -> Encoder:
        """The encoder of a source."""
        return self._encoders[self._name(source), _needs_no_template(source), bool(source.raw)]

    def has_template(self, source: Source) -> bool:
        """Whether the conversations of a source can be rendered."""
        return self._templates[self._name(source)] is not None

    def marker(self, source: Source) -> str | None:
        """The text that begins an assistant's turn in the template of a source."""
        name = self._name(source)
        if name not in self._turns:
            template, self._turns[name] = self._templates[name], None
            with contextlib.suppress(UserError):  # it is not known
                self._turns[name] = template and derive_markers(self.tokenizer, template)[1].strip() or None
        return self._turns[name]

    def row_encoder(self, source: Source, format: Format) -> RowEncoder:
        """What turns the rows of a source into tokens."""
        data, encoder = self._config.data, self.encoder(source)
        return RowEncoder(encoder, format, data.system_prompt, self.has_template(source), data.keep_empty)

    def reading(self, rows: Sequence[JsonObject], format: Format, source: Source) -> Reading:
        """How rows of this very format are read."""
        has_template = self.has_template(source)
        in_template = has_template and not format.of_text and format.name not in ("text", "tokenized")
        if not in_template and (marker := self.marker(source)) is not None:  # it may have been written before
            in_template = any(marker in _text(row, format, self.tokenizer) for row in rows[:LOOKED_AT])
        data = self._config.data
        return Reading(
            format=formats.describe(
                format,
                has_template=has_template,
                assistant_only_loss=data.assistant_only_loss,
                completion_only_loss=data.completion_only_loss,
                last_turn_only=data.last_turn_only,
                markers=data.response_part is not None,
            ),
            templated=in_template,
            note=_remedy(format) if format.of_text and has_template and not in_template else None,
        )

    def _name(self, source: Source) -> str | None:
        return source.template or self._config.model.chat_template

    def _add(self, source: Source) -> None:
        name, is_text, raw = self._name(source), _needs_no_template(source), bool(source.raw)
        self._read(name)
        if (name, is_text, raw) not in self._encoders:
            self._encoders[name, is_text, raw] = self._new_encoder(name, is_text, raw)

    def _new_encoder(self, name: str | None, is_text: bool, raw: bool) -> Encoder:
        data = self._config.data
        instruction, response = self._markers[name]
        markers = None
        if response is not None:
            markers = Markers(self.tokenizer, response, instruction, last_only=data.last_turn_only)
        if not (is_text or markers) and _writes_date(self._templates[name]):
            date = data.chat_template_kwargs.get("strftime_now", DATE)
            self._note(f"; today is {date} in the chat template (data.chat_template_kwargs: {{strftime_now: DATE}})")
        return Encoder(
            self.tokenizer,
            # Text is not rendered, so a template that cannot be masked exactly does not matter.
            None if is_text or markers else self._templates[name],
            max_length=data.document_length,
            over_length=data.over_length or ("split" if raw else "truncate"),
            assistant_only_loss=data.assistant_only_loss,
            completion_only_loss=data.completion_only_loss,
            last_turn_only=data.last_turn_only,
            train_on_roles=data.train_on_roles,
            train_on_tool_calls=data.train_on_tool_calls,
            train_on_thinking=data.train_on_thinking,
            chat_template_kwargs=data.chat_template_kwargs,
            markers=markers,
            text_end=document_end(self.tokenizer) if raw else None,
        )

    def _note(self, text: str) -> None:
        self.notes += "" if text in self.notes else text

    def _markers_of(self, template: str | None) -> tuple[str | None, str | None]:
        """(instruction, response) markers, from the configuration or derived from the template."""
        data = self._config.data
        if data.response_part != "auto":
            return data.instruction_part, data.response_part
        instruction, response = derive_markers(self.tokenizer, template)
        found = f"; markers from the chat template: {response!r} (supervised), {instruction!r} (masked)"
        self._note(found)
        return instruction, response


def _text(row: Mapping[str, object], format: Format, tokenizer: Tokenizer) -> str:
    """What a row of text or token ids says; empty if its token ids are no such."""
    if format.name != "tokenized":
        return "".join(str(row.get(column, "")) for column in format.columns.values())
    ids = row.get(format.columns["input_ids"])
    if isinstance(ids, list | tuple) and all(type(one) is int and one >= 0 for one in ids):
        return tokenizer.decode(ids)
    return ""


def _remedy(format: Format) -> str:
    """What to say of prompts and completions that the model's chat template does not render although it could."""
    columns = f"{{instruction: {format.columns['prompt']}, output: {format.columns['completion']}}}"
    return (
        "prompt and completion are trained as they are, without the chat template of the model. With it: "
        f"data.columns: {columns}, or rows of messages"
    )


def _writes_date(template: str | None) -> bool:
    return "strftime_now" in (template or "")


def _needs_no_template(source: Source) -> bool:
    """Whether its rows are known not to be rendered: then a template that cannot be masked exactly does not matter."""
    return bool(source.raw) or source.format in ("text", "tokenized")


def detect(rows: Iterable[Item], source: Source, config: Config) -> tuple[Format, Iterator[Item]]:
    """The format of the first rows, and an iterator over all rows."""
    rows, asked = iter(rows), "text" if source.format == "document" else source.format
    first = list(islice(rows, SAMPLE_ROWS))
    columns = list(dict.fromkeys(column for row, _ in first for column in row))
    mapping = source.columns or formats.text_column(columns, source.text_field, asked)
    lacks_text = not source.columns and not source.raw and source.text_field not in ("text", *columns)
    try:
        found = formats.detect(columns, [row for row, _ in first], asked, mapping, as_trl=source.as_trl)
        if lacks_text and found.name == "text":
            raise UserError(f"the columns are {listed(columns)}. Set it to one of them.")
    except UserError as error:
        if lacks_text:
            error = UserError(f"data.dataset_text_field names no column of the rows: {cut(source.text_field)}; {error}")
        raise UserError(f"{first[0][1]}: {error}" if first else str(error)) from None
    if config.data.response_part is not None and found.name != "text":
        raise UserError(
            f"data.response_part applies only to rows of text, and these rows have the format {found.name} "
            f"({found.evidence}), whose turns are known without markers. Remove data.response_part and "
            "data.instruction_part, or set data.format to text and data.columns to {text: COLUMN}."
        )
    return found, chain(first, rows)


class Columns:
    """The columns of all rows of a source.

    all:    how many rows have each column
    unread: those with values that are not read
    """

    def __init__(self, format: Format, *, has_template: bool) -> None:
        self._format, self._has_template = format, has_template
        self._rows = 0
        self.all: Counter[str] = Counter()
        self.unread: list[str] = []

    def add(self, row: Mapping[str, object]) -> None:
        """Count the columns of a row."""
        self._rows += 1
        self.all.update(row.keys())
        unread = self._format.unread(row, has_template=self._has_template)
        self.unread += sorted(unread.difference(self.unread))

    def notes(self) -> dict[str, int]:
        """Notes on rows of token ids without a mask that other rows have, and the number of these rows."""
        if self._format.name != "tokenized":
            return {}
        lacking = {
            column: self._rows - self.all[column]
            for column in map(self._format.column, formats.MASKS)
            if 0 < self.all[column] < self._rows
        }
        return {f"without {column!r}, which other rows have, all tokens count": n for column, n in lacking.items()}


@dataclass(frozen=True)
class RowEncoder:
    """Turns the rows of one source into tokens and labels, in any process."""

    encoder: Encoder
    format: Format
    system_prompt: str | None
    has_template: bool
    keep_empty: bool

    def encode(self, rows: Sequence[JsonObject], places: list[str]) -> list[list[Encoded] | RowError]:
        """What becomes of each row.

        Args:
            places: the position of each row in the source.

        Raises:
            UserError: the tokenizer gives up on a row.
        """
        results: list[list[Encoded] | RowError] = []
        positions, conversations = [], []
        for row in rows:
            try:
                conversations.append(self._conversation(row))
                positions.append(len(results))
                results.append([])
            except RowError as error:
                results.append(error)
        with _report_if_slow(places):
            try:
                encoded = self.encoder.encode_batch(conversations)
            except TokenizerError:
                for position, conversation in zip(positions, conversations, strict=True):
                    _encode_alone(self.encoder, conversation, places[position])
                raise
        for position, result in zip(positions, encoded, strict=True):
            results[position] = result
        return results

    def _conversation(self, row: JsonObject) -> formats.Row:
        return formats.to_conversation(
            row,
            self.format,
            system_prompt=self.system_prompt,
            has_template=self.has_template,
            train_on_roles=self.encoder.train_on_roles if self.encoder.assistant_only_loss else None,
            keep_empty=self.keep_empty,
        )


def _encode_alone(encoder: Encoder, conversation: formats.Row, where: str) -> None:
    """Raise UserError if the tokenizer gives up on this row."""
    try:
        encoder.encode_batch([conversation])
    except TokenizerError as error:
        raise UserError(
            f"{where}: the tokenizer failed on this row: {error}. Shorten or remove the row, or use a model with "
            "another tokenizer: a regular expression in tokenizer.json may take too many steps on such a text."
        ) from None


@contextlib.contextmanager
def _report_if_slow(places: list[str]) -> Iterator[None]:
    """Inside, rows are tokenized, and reported if that takes long: the tokenizer's regular expressions have no limit on
    time, and Python handles no signal until they end."""
    timer = threading.Timer(SLOW_SECONDS, report_slow, [places])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def report_slow(places: list[str]) -> None:
    """Warn that the tokenizer takes long on these rows."""
    rows = f"row {places[0]}" if len(places) == 1 else f"rows {places[0]} to {places[-1]}"
    sys.stderr.write(
        f"warning: tokenizing {rows} has taken {SLOW_SECONDS:.0f} s so far. If they are not very long, a regular "
        "expression of the tokenizer (tokenizer.json) is slow on one of them. To stop, press Ctrl-C and wait up to "
        f"{interrupt.STUCK_SECONDS:.0f} s; then shorten or remove the row, or use a model with another tokenizer.\n"
    )
    sys.stderr.flush()
