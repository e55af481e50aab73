"""Convert conversations to token ids and labels, with an exact loss mask for any chat template.

`spans` finds the supervised messages in the rendered text, `token_ranges` the tokens of each span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from finetune.data import IGNORE_INDEX
from finetune.data.formats import TRAINED_ROLES, Conversation, Row, RowError, Text, Tokens
from finetune.data.templates.chat_templates import TEMPLATES
from finetune.data.templates.markers import Markers
from finetune.data.templates.spans import SpanFinder, added_token_pattern, outside, template_variables
from finetune.data.templates.token_ranges import Span, byte_lengths, tokens_by_length, tokens_by_offset
from finetune.errors import UserError
from finetune.runtime.types import Tokenizer

if TYPE_CHECKING:
    import rich.text
    from tokenizers import Encoding

OverLength = Literal["truncate", "keep_end", "drop", "split"]
PREVIEW_START, PREVIEW_END = 1000, 500  # tokens of a long document that a preview shows
NO_END = (
    "the chat template has no token at the end of an answer (model.chat_template: chatml has), so the model does not "
    "learn to stop"
)
END_UNMARKED = "the template's {% generation %} blocks end before the turn does, so the model does not learn to stop"
_Rendered = tuple[int, str, list[Span]]  # index of the row, its text, its supervised spans


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoded:
    """One document. `input_ids` and `labels` are int32 of equal length. A label is IGNORE_INDEX if its token is not
    supervised. The label of the first token is kept as TRL builds it, but nothing precedes that token, so it is never
    predicted and not counted. `shortened`: the row was longer than max_length. `notes`: what of the row the chat
    template left out; of the pieces of a row, the first one has them."""

    input_ids: np.ndarray
    labels: np.ndarray
    shortened: bool = False
    notes: tuple[str, ...] = ()

    @property
    def label_tokens(self) -> int:
        """Supervised tokens, without the first token."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


class TokenizerError(UserError):
    """The tokenizer gave up, such as after too many steps of a regular expression in tokenizer.json."""


class Encoder:
    """Tokenizes and labels conversations and texts. Picklable, so that it can be sent to worker processes.

    assistant_only_loss: of a conversation, supervise only assistant turns, each including its end-of-turn token but not
        the whitespace after it. If False, supervise everything but the messages that the row marks not to be trained.
    completion_only_loss: of a prompt and its completion, supervise only the completion. It begins where the token ids
        of the prompt (of messages: with the generation prompt) and those of the whole differ, as in TRL. None is True,
        but of token ids only if the rows also have the columns prompt and completion.
    last_turn_only: supervise only the last of the turns that would be supervised otherwise.
    train_on_roles: supervise the messages of these roles instead of those of the assistant.
    train_on_tool_calls: if False, mask assistant turns with tool calls.
    train_on_thinking: if False, mask the reasoning at the start of assistant turns, including its closing tag.
    chat_template_kwargs: variables for the chat template; those of a row come before them.
    markers: supervise the responses that these markers find in a Text. No EOS is appended to such a text.
    text_end: what ends a text, instead of what a tokenizer adds; None for EOS, and what it adds, as in TRL.
    max_length: in tokens, at least 2; None for no limit. Longer rows are cut at the end ("truncate") or at the start
        ("keep_end"), dropped ("drop"), or cut into pieces ("split"): each piece but the first begins with the last
        token of the piece before it, as context, so that every label is predicted exactly once. Pieces without labels
        are dropped.

    A text gets the tokenizer's special tokens, and EOS unless it ends with it. A text that begins with BOS gets no
    second one.

    A token that extends beyond a span is supervised if the part outside is only whitespace (" Hello" after
    "Assistant:" + " " keeps its first word), and masked otherwise.

    Raises UserError if the tokenizer is not a fast one, or, with the first conversation, if the template cannot be
    masked exactly.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None,
        *,
        max_length: int | None = None,
        over_length: OverLength = "truncate",
        assistant_only_loss: bool = True,
        completion_only_loss: bool | None = None,
        last_turn_only: bool = False,
        train_on_roles: Sequence[str] | None = None,
        train_on_tool_calls: bool = True,
        train_on_thinking: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        markers: Markers | None = None,
        text_end: str | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"The tokenizer {tokenizer.name_or_path!r} ({type(tokenizer).__name__}) does not report the positions "
                "of tokens in the text. Use a fast tokenizer (one with a tokenizer.json)."
            )
        self._tokenizer = tokenizer
        self._template = chat_template
        self._max_length = max_length
        self.over_length = over_length
        self.assistant_only_loss = assistant_only_loss
        self._completion_only_loss = completion_only_loss
        self._last_turn_only = last_turn_only
        self._markers = markers
        self.text_end = (tokenizer.eos_token or "") if text_end is None else text_end
        self._ends_once = text_end is not None
        self.train_on_roles = TRAINED_ROLES if train_on_roles is None else tuple(train_on_roles)
        self._train_on_tool_calls, self._train_on_thinking = train_on_tool_calls, train_on_thinking
        self._byte_lengths = byte_lengths(tokenizer)
        self._finder: SpanFinder | None = None
        if chat_template is not None:
            self._finder = SpanFinder(
                chat_template,
                template_variables(tokenizer, chat_template_kwargs),
                added_token_pattern(tokenizer),
                masks_reasoning=not train_on_thinking,
            )

    def encode_batch(self, rows: Sequence[Row]) -> list[list[Encoded] | RowError]:
        """For each row, its pieces (one, unless split) or the RowError that excludes it (reasons: template_error,
        mask_ambiguous, not_rendered, over_length, no_label). Each row is tokenized once, and each prompt of a
        prompt/completion row once more."""
        results: dict[int, list[Encoded] | RowError] = {}
        notes: dict[int, tuple[str, ...]] = {}
        rendered: list[_Rendered] = []
        prompts: dict[int, str] = {}  # what precedes the completion, by row
        plain: list[tuple[int, Text]] = []
        documents: list[tuple[int, np.ndarray, np.ndarray]] = []
        for index, row in enumerate(rows):
            try:
                if isinstance(row, Tokens):
                    self._check_has_no_messages()
                    results[index] = self._given(row)
                elif isinstance(row, Text):
                    self._check_has_no_messages()
                    _check_characters(row.text)
                    plain.append((index, row))
                else:
                    text, spans, prompt, left_out = self._rendered(row)
                    _check_characters(text)
                    notes[index] = row.notes + left_out
                    rendered.append((index, text, spans))
                    if prompt is not None:
                        prompts[index] = prompt
            except RowError as error:
                results[index] = error.with_traceback(None)
        documents += self._label(rendered, prompts)
        documents += self._label_texts(plain)
        for index, ids, labels in documents:
            try:
                results[index] = self._pieces(ids, labels, notes.get(index, ()))
            except RowError as error:
                results[index] = error.with_traceback(None)
        return [results[index] for index in range(len(rows))]

    def _check_has_no_messages(self) -> None:
        """Raises UserError if settings select messages, which rows of text or token ids do not have."""
        chosen = {
            "data.train_on_roles": self.train_on_roles != TRAINED_ROLES,
            "data.train_on_tool_calls": not self._train_on_tool_calls,
            "data.train_on_thinking": not self._train_on_thinking,
        }
        if names := [name for name, given in chosen.items() if given]:
            raise UserError(
                f"{' and '.join(names)} cannot be used with rows of text or token ids, which have no messages. Remove "
                f"{'it' if len(names) == 1 else 'them'}, or use rows of messages."
            )

    # --- tokens and labels ------------------------------------------------------------------------------------------

    def _given(self, row: Tokens) -> list[Encoded]:
        """The documents of a row of token ids."""
        labels = row.labels
        notes: tuple[str, ...] = ()
        largest = max(int(row.input_ids.max()), int(labels.max()))
        if self._tokenizer.convert_ids_to_tokens([largest])[0] is None:
            notes = ("token ids or labels that the tokenizer does not have",)
        completion = row.by_default if self._completion_only_loss is None else self._completion_only_loss
        if completion and row.completion_mask is not None:
            labels = np.where(row.completion_mask, labels, np.int32(IGNORE_INDEX))
        stops = np.cumsum(row.lengths).tolist()
        pieces: list[Encoded] = []
        unlabeled: list[RowError] = []
        for start, stop in zip([0, *stops[:-1]], stops, strict=True):
            try:
                pieces += self._pieces(row.input_ids[start:stop], labels[start:stop], () if pieces else notes)
            except RowError as error:
                if error.reason != "no_label":
                    raise
                unlabeled.append(error)  # nothing is predicted in this document; the others stay
        if not pieces:
            raise unlabeled[0]
        return pieces

    def _label(self, group: list[_Rendered], prompts: dict[int, str]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(index, ids, labels) of each rendered conversation. After a prompt, only what follows it is supervised."""
        places = list(prompts)
        encodings = self.tokenize([prompts[index] for index in places], False, offsets=False)
        before = {index: encoding.ids for index, encoding in zip(places, encodings, strict=True)}
        by_length = [self._byte_lengths is not None and text.isascii() for _, text, _ in group]
        for fast in (True, False):
            members = [entry for entry, is_fast in zip(group, by_length, strict=True) if is_fast is fast]
            encodings = self.tokenize([text for _, text, _ in members], False, offsets=not fast)
            for (index, text, spans), encoding in zip(members, encodings, strict=True):
                ids = np.array(encoding.ids, dtype=np.int32)
                ends = self._byte_lengths[ids].cumsum() if fast and self._byte_lengths is not None else None
                if ends is not None and len(ends) and ends[-1] == len(text):
                    ranges = [tokens_by_length(ends, text, span) for span in spans]
                else:
                    if fast:  # the vocabulary lacks a character, which the tokenizer dropped
                        (encoding,) = self.tokenize([text], False, offsets=True)
                    ranges = [tokens_by_offset(encoding, text, span) for span in spans]
                labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
                for first, stop in ranges:
                    labels[first:stop] = ids[first:stop]
                labels[: _common_prefix_length(before.get(index, []), encoding.ids)] = IGNORE_INDEX
                yield index, ids, labels

    def _label_texts(self, rows: list[tuple[int, Text]]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(index, ids, labels) of each text: everything is supervised, or what follows the prompt, or what the markers
        find. EOS is appended as text before tokenizing, as in TRL.

        Raises UserError if there is no EOS."""
        if rows and not self._markers and not self.text_end:
            raise UserError(
                f"The tokenizer {self._tokenizer.name_or_path!r} has no eos_token, which ends every row of text: "
                "without it, the model's answers would never end. Set eos_token in its tokenizer_config.json (in a "
                "script, `tokenizer.eos_token`) to one of its special tokens, or train on rows of messages, whose "
                "turns the chat template ends."
            )
        bos, end = self._tokenizer.special_tokens_map.get("bos_token"), "" if self._markers else self.text_end
        for with_bos in (True, False):  # text that begins with BOS was rendered by a chat template
            members = [(i, row) for i, row in rows if bool(bos and row.text.startswith(bos)) is with_bos]
            texts = [row.text if row.text.endswith(end) else row.text + end for _, row in members]
            prompts = [row.text[: row.supervised_from or 0] for _, row in members]
            encodings = self.tokenize(texts, not with_bos, offsets=False)
            before = self.tokenize(prompts, not with_bos, offsets=False)
            for (index, row), encoding, prompt in zip(members, encodings, before, strict=True):
                ids = np.array(encoding.ids, dtype=np.int32)
                if self._ends_once:
                    marks = reversed(encoding.special_tokens_mask)
                    added_at_the_end = next((n for n, added in enumerate(marks) if not added), 0)
                    ids = ids[: len(ids) - added_at_the_end]
                labels = ids.copy() if self._markers is None else self._markers.labels(ids)
                if row.supervised_from is not None and self._completion_only_loss is not False:
                    labels[: _common_prefix_length(prompt.ids, encoding.ids)] = IGNORE_INDEX
                yield index, ids, labels

    def tokenize(self, texts: list[str], add_special_tokens: bool, *, offsets: bool) -> list[Encoding]:
        """The tokens of each text; without `offsets`, the positions in the text are not computed.

        Raises:
            TokenizerError: the tokenizer gave up.
        """
        if not texts:
            return []
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()  # truncation stays enabled after an earlier call with it
        backend.no_padding()
        encode = backend.encode_batch if offsets else backend.encode_batch_fast
        try:
            return encode(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust: no Exception, and no module has its class
                raise
            raise TokenizerError(str(error)) from None

    def _pieces(self, ids: np.ndarray, labels: np.ndarray, notes: tuple[str, ...] = ()) -> list[Encoded]:
        length, limit = len(ids), self._max_length
        if limit is None or length <= limit:
            bounds = [(0, length)]
        elif self.over_length == "drop":
            raise RowError("over_length", f"{length} tokens; data.max_length is {limit}")
        elif self.over_length == "truncate":
            bounds = [(0, limit)]
        elif self.over_length == "keep_end":
            bounds = [(length - limit, length)]
        else:
            bounds = [(start, min(start + limit, length)) for start in range(0, length - 1, limit - 1)]
        pieces = []
        for start, stop in bounds:
            piece = labels[start:stop]
            if start and self.over_length == "split":
                piece = piece.copy()
                piece[0] = IGNORE_INDEX  # it was predicted at the end of the previous piece
            if (piece[1:] != IGNORE_INDEX).any():
                shortened, first = stop - start < length, () if pieces else notes
                pieces.append(Encoded(input_ids=ids[start:stop], labels=piece, shortened=shortened, notes=first))
        if not pieces:
            cut = ""
            if len(bounds) == 1 and limit is not None and length > limit:
                side = "last" if self.over_length == "keep_end" else "first"
                cut = f" in the {side} {limit} of {length} tokens"
            raise RowError("no_label", f"no token is supervised{cut}")
        return pieces

    # --- text and spans ---------------------------------------------------------------------------------------------

    def _rendered(self, row: Conversation) -> tuple[str, list[Span], str | None, tuple[str, ...]]:
        """The text of a conversation, its supervised spans, the text of its prompt if only the completion is
        supervised, and notes about what of the row the text lacks."""
        if self._finder is None:
            raise UserError(
                "The rows are conversations and there is no chat template. Set model.chat_template to "
                f"{', '.join(TEMPLATES)}, or the path of a Jinja file."
            )
        finder = self._finder.variant(row.variables) if row.variables else self._finder
        row = finder.opened(row)
        if self.assistant_only_loss and not finder.marked and "assistant" in self.train_on_roles:
            try:
                finder.shape()
            except RowError as error:
                raise self._refusal(error.detail) from error
        if self._completion_only_loss is False:
            row = replace(row, supervised_from=0)
        text, spans, notes = self._supervised_spans(row, finder)
        asked = any((row.supervised or ())[: row.supervised_from])  # the row marks a message of the prompt
        if asked and not self.assistant_only_loss:  # else all of the prompt would be supervised with it
            raise RowError(
                "invalid_weight", "a message of the prompt is marked `train: true`: set data.assistant_only_loss: true"
            )
        if not row.supervised_from or asked:
            return text, spans, None, notes
        return text, spans, finder.render(row.messages[: row.supervised_from], row.tools, prompt=True), notes

    def _supervised_spans(self, row: Conversation, finder: SpanFinder) -> tuple[str, list[Span], tuple[str, ...]]:
        """The rendered text, its supervised spans, and notes about what of the row it lacks."""
        if self.assistant_only_loss:
            text, found, notes = finder.find(row, self._supervised_messages(row), by_skeleton=True)
            notes += () if finder.ends_turns(row, text, found) else (END_UNMARKED if finder.marked else NO_END,)
            return text, [span for _, span in found], notes
        masked = [i for i, mark in enumerate(row.supervised or ()) if mark is False]  # all other text is supervised
        text, found, notes = finder.find(row, masked, by_skeleton=False)
        notes += () if len(row.messages) - 1 in masked or finder.ends_turns(row, text, None) else (NO_END,)
        return text, outside([span for _, span in found], len(text)), notes

    def _supervised_messages(self, row: Conversation) -> list[int]:
        """The indices of the supervised messages: a message's own mark decides, else its role and the settings."""
        roles, start, calls = self.train_on_roles, row.supervised_from, self._train_on_tool_calls
        turns = [
            i
            for i, message in enumerate(row.messages)
            if i >= start and message["role"] in roles and (calls or not message.get("tool_calls"))
        ]
        if row.supervised is not None:
            chosen = set(turns)
            turns = [i for i, mark in enumerate(row.supervised) if mark or (mark is None and i in chosen)]
        return turns[-1:] if self._last_turn_only else turns

    def _refusal(self, why: str) -> UserError:
        name = self._tokenizer.name_or_path or type(self._tokenizer).__name__
        start = " ".join((self._template or "").split())[:60]
        return UserError(
            f"data.assistant_only_loss cannot be exact with the chat template of {name!r} ({start!r}...): {why}. Put "
            "{% generation %} marks around the assistant's turns in the template, set model.chat_template to another "
            f"one ({', '.join(TEMPLATES)}), or set data.assistant_only_loss: false."
        )


def preview(encoded: Encoded, tokenizer: Tokenizer, *, color: bool = True) -> rich.text.Text:
    """The decoded tokens of one document, with supervised ones in bold green and the context dimmed. Without color (as
    in a log file), supervised tokens are enclosed in the brackets \u27e6 and \u27e7. A long document is shown without
    its middle."""
    import rich.text

    supervised = encoded.labels != IGNORE_INDEX
    supervised[:1] = False  # never predicted
    count = len(supervised)
    cut, resumed = (PREVIEW_START, count - PREVIEW_END) if count > PREVIEW_START + PREVIEW_END else (count, count)
    changes = (np.flatnonzero(supervised[1:] != supervised[:-1]) + 1).tolist()
    edges = sorted({0, *changes, cut, resumed, count})
    result = rich.text.Text()
    for start, stop in zip(edges, edges[1:], strict=False):
        if cut <= start < resumed:
            if start == cut:
                result.append(f" [... {resumed - cut:,} tokens ...] ")
            continue
        text = tokenizer.decode(encoded.input_ids[start:stop].tolist(), clean_up_tokenization_spaces=False)
        if not color:
            result.append(f"\u27e6{text}\u27e7" if supervised[start] else text)
        else:
            result.append(text, style="bold green" if supervised[start] else "dim")
    return result


def _check_characters(text: str) -> None:
    """Check that a text can be written. JSON may contain half of a character, such as an emoji that was cut in two."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half, before = text[error.start], text[max(0, error.start - 20) : error.start]
        raise RowError("not_text", f"half of a character, {half!a}, follows {before!r}") from None


def _common_prefix_length(ids: list[int], other_ids: list[int]) -> int:
    """Number of leading tokens that both have in common."""
    pairs = zip(ids, other_ids, strict=False)
    return next((i for i, (id, other) in enumerate(pairs) if id != other), min(len(ids), len(other_ids)))
