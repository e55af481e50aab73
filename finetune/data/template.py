"""Convert conversations to token ids and labels, with an exact loss mask for any chat template.

The whole conversation is rendered once and tokenized once. The supervised part of that text is one span per assistant
turn: from the end of the generation prompt to the end-of-turn token, inclusive. Spans are found in one of these ways,
in this order:

1. By the template's own `{% generation %}` marks.
2. From the *skeleton* of the conversation's roles: the template is rendered once with placeholders for the contents and
   split at the placeholders. If the row's contents inserted into the skeleton give exactly the rendered text, the
   skeleton gives the spans.
3. Turn by turn: the conversation before the turn, rendered with the generation prompt, must be a prefix of the whole
   text, and the conversation including the turn gives the end. If a template rewrites earlier turns (Qwen3 drops their
   thinking), the whole conversation is rendered with a placeholder for this turn; the text before and after the
   placeholder must also stand before and after the turn.

If none of them is conclusive, the template is refused when the encoder is built, or the row is dropped with
RowError("mask_ambiguous").
"""

from __future__ import annotations

import copy
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError

from finetune.data import IGNORE_INDEX
from finetune.data.formats import Conversation, Message, Row, RowError, Text, Tokens
from finetune.data.markers import Markers
from finetune.data.render import check_syntax, render
from finetune.errors import UserError

if TYPE_CHECKING:
    import rich.text
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

OverLength = Literal["truncate", "keep_end", "drop", "split"]
Span = tuple[int, int]
_Rendered = tuple[int, str, list[Span]]  # index of the row, its text, its supervised spans

# The published templates, without tools and images. They refuse unknown roles.
TEMPLATES = {
    "chatml": r"""
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "llama3": r"""
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
    "gemma": r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('Gemma has no system role, and roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('user' if message.role == 'user' else 'model') + '\n' }}
    {{- message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}""",
    "mistral": r"""
{{- bos_token }}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for message in messages[1 if system else 0:] %}
    {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant/user/...') }}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "phi": r"""
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('Only the roles system, user and assistant are supported') }}
    {%- endif %}
    {{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}""",
}

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MAX_VARIANTS = 64  # encoders for different chat_template_kwargs of rows
_MAX_SKELETONS = 4096  # one per sequence of roles; bounds memory for files with very many different sequences


def load_template(tokenizer: Any, name_or_path: str | None = None) -> str | None:
    """Load a chat template: by default the tokenizer's (None if it has none); else one of TEMPLATES by name, a Jinja
    file, or None for "none". Raises UserError for an unknown name, an unreadable file or invalid Jinja."""
    if name_or_path is None:
        template, source = tokenizer.chat_template, f"of the tokenizer {tokenizer.name_or_path!r}"
        if isinstance(template, dict):  # some tokenizers have several, by purpose
            if "default" not in template:
                raise UserError(
                    f"The chat template {source} has several variants and no 'default': {', '.join(sorted(template))}. "
                    "Set model.chat_template to a Jinja file."
                )
            template = template["default"]
    elif name_or_path == "none":
        return None
    elif name_or_path in TEMPLATES:
        return TEMPLATES[name_or_path]
    elif Path(name_or_path).is_file():
        source = f"in {name_or_path}"
        try:
            template = Path(name_or_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"The chat template {source} cannot be read: {error}. Set model.chat_template to a Jinja file in UTF-8."
            ) from error
    else:
        raise UserError(
            f"model.chat_template is neither a known name nor a file: {name_or_path!r}. Set it to "
            f"{', '.join(TEMPLATES)}, none, or the path of a Jinja file."
        )
    if template is not None:
        try:
            check_syntax(template)
        except TemplateSyntaxError as error:
            raise UserError(
                f"The chat template {source} is invalid Jinja: line {error.lineno}: {error.message}. Correct it, or "
                "set model.chat_template to another one."
            ) from error
    return template


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoded:
    """One document. `input_ids` and `labels` are int32 of equal length. A label is IGNORE_INDEX if its token is not
    supervised. The label of the first token is kept as TRL builds it, but nothing precedes that token, so it is never
    predicted and not counted. `shortened`: the row was longer than max_length."""

    input_ids: np.ndarray
    labels: np.ndarray
    shortened: bool = False

    @property
    def label_tokens(self) -> int:
        """Supervised tokens, without the first token."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


class Encoder:
    """Tokenizes and labels conversations and texts. Picklable, so that it can be sent to worker processes.

    assistant_only_loss: of a conversation, supervise only assistant turns, each including its end-of-turn token but not
        the whitespace after it. If False, supervise everything.
    completion_only_loss: of a prompt and its completion, supervise only the completion. It begins where the token ids
        of the prompt (of messages: with the generation prompt) and those of the whole differ, as in TRL. None is True,
        but of token ids only if the rows also have the columns prompt and completion.
    last_turn_only: supervise only the last assistant turn.
    markers: supervise the responses that these markers find in a Text. No EOS is appended to such a text.
    max_length: in tokens; None for no limit. Longer rows are cut at the end ("truncate") or at the start ("keep_end"),
        dropped ("drop"), or cut into pieces ("split"): each piece but the first begins with the last token of the piece
        before it, as context, so that every label is predicted exactly once. Pieces without labels are dropped.

    A text gets the tokenizer's special tokens, and EOS unless it ends with it. A text that begins with BOS gets no
    second one.

    A token that extends beyond a span is supervised if the part outside is only whitespace (" Hello" after
    "Assistant:" + " " keeps its first word), and masked otherwise.

    Raises UserError if the tokenizer is not a fast one, or, with the first conversation, if the template cannot be
    masked exactly.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        chat_template: str | None,
        *,
        max_length: int | None = None,
        over_length: OverLength = "truncate",
        assistant_only_loss: bool = True,
        completion_only_loss: bool | None = None,
        last_turn_only: bool = False,
        markers: Markers | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"The tokenizer {tokenizer.name_or_path!r} ({type(tokenizer).__name__}) does not report the positions "
                "of tokens in the text. Use a fast tokenizer (one with a tokenizer.json)."
            )
        if last_turn_only and not assistant_only_loss:
            raise UserError(
                "data.last_turn_only requires data.assistant_only_loss. Set data.assistant_only_loss: true."
            )
        if max_length is not None and max_length < 2:
            raise UserError(
                f"data.max_length is {max_length}. Set it to at least 2, because the first token is never supervised."
            )
        self._tokenizer = tokenizer
        self._eos = cast("int | None", tokenizer.eos_token_id)
        self._template = chat_template
        self._max_length = max_length
        self._over_length = over_length
        self._assistant_only_loss = assistant_only_loss
        self._completion_only_loss = completion_only_loss
        self._last_turn_only = last_turn_only
        self._markers = markers
        self._special: dict[str, Any] = dict(tokenizer.special_tokens_map)  # bos_token and the like, for the template
        self._marked = chat_template is not None and bool(_GENERATION_MARK.search(chat_template))
        self._skeletons: dict[tuple[str, ...], _Skeleton | RowError | None] = {}
        added = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.content.strip()), key=len)
        token = "|".join(re.escape(content) for content in reversed(added)) or "(?!)"
        self._byte_lengths = _byte_lengths(tokenizer)
        self._added_token, self._added_tokens = re.compile(token), re.compile(f"(?:{token})+")
        self._shape: _Shape | None = None  # unused if the template marks the turns or everything is supervised
        self._variants: dict[str, Encoder] = {}  # by the rows' chat_template_kwargs

    def encode_batch(self, rows: Sequence[Row]) -> list[list[Encoded] | RowError]:
        """For each row, its pieces (one, unless split) or the RowError that excludes it (reasons: template_error,
        mask_ambiguous, not_rendered, over_length, no_label). Each row is tokenized once, and each prompt of a
        prompt/completion row once more."""
        results: dict[int, list[Encoded] | RowError] = {}
        rendered: list[_Rendered] = []
        prompts: dict[int, str] = {}  # what precedes the completion, by row
        plain: list[tuple[int, Text]] = []
        documents: list[tuple[int, np.ndarray, np.ndarray]] = []
        for index, row in enumerate(rows):
            try:
                if isinstance(row, Tokens):
                    results[index] = self._given(row)
                elif isinstance(row, Text):
                    plain.append((index, row))
                else:
                    text, spans, prompt = self._rendered(row)
                    rendered.append((index, text, spans))
                    if prompt is not None:
                        prompts[index] = prompt
            except RowError as error:
                results[index] = error.with_traceback(None)
        documents += self._label(rendered, prompts)
        documents += self._label_texts(plain)
        for index, ids, labels in documents:
            try:
                results[index] = self._pieces(ids, labels)
            except RowError as error:
                results[index] = error.with_traceback(None)
        return [results[index] for index in range(len(rows))]

    # --- tokens and labels ------------------------------------------------------------------------------------------

    def _given(self, row: Tokens) -> list[Encoded]:
        """The documents of a row of token ids."""
        labels = row.labels
        completion = row.by_default if self._completion_only_loss is None else self._completion_only_loss
        if completion and row.completion_mask is not None:
            labels = np.where(row.completion_mask, labels, np.int32(IGNORE_INDEX))
        stops = np.cumsum(row.lengths).tolist()
        bounds = list(zip([0, *stops[:-1]], stops, strict=True))
        if len(bounds) > 1:  # nothing is predicted in a document without labels
            bounds = [(a, b) for a, b in bounds if (labels[a + 1 : b] != IGNORE_INDEX).any()] or bounds[:1]
        return [piece for a, b in bounds for piece in self._pieces(row.input_ids[a:b], labels[a:b])]

    def _label(self, group: list[_Rendered], prompts: dict[int, str]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(index, ids, labels) of each rendered conversation. After a prompt, only what follows it is supervised."""
        places = list(prompts)
        encodings = self._tokenize([prompts[index] for index in places], False, offsets=False)
        before = {index: encoding.ids for index, encoding in zip(places, encodings, strict=True)}
        by_length = [self._byte_lengths is not None and text.isascii() for _, text, _ in group]
        for fast in (True, False):
            members = [entry for entry, is_fast in zip(group, by_length, strict=True) if is_fast is fast]
            encodings = self._tokenize([text for _, text, _ in members], False, offsets=not fast)
            for (index, text, spans), encoding in zip(members, encodings, strict=True):
                ids = np.array(encoding.ids, dtype=np.int32)
                ends = self._byte_lengths[ids].cumsum() if fast and self._byte_lengths is not None else None
                if ends is not None and len(ends) and ends[-1] == len(text):
                    ranges = [_tokens_by_length(ends, text, span) for span in spans]
                else:
                    if fast:  # the vocabulary lacks a character, which the tokenizer dropped
                        (encoding,) = self._tokenize([text], False, offsets=True)
                    ranges = [_tokens_by_offset(encoding, text, span) for span in spans]
                labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
                for first, stop in ranges:
                    labels[first:stop] = ids[first:stop]
                labels[: _common_prefix_length(before.get(index, []), encoding.ids)] = IGNORE_INDEX
                yield index, ids, labels

    def _label_texts(self, rows: list[tuple[int, Text]]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(index, ids, labels) of each text: everything is supervised, or what follows the prompt, or what the markers
        find. EOS is appended as text before tokenizing, as in TRL."""
        bos, eos = self._special.get("bos_token"), self._special.get("eos_token")
        end = "" if self._markers else cast("str", eos or "")
        for with_bos in (True, False):  # text that begins with BOS was rendered by a chat template
            members = [(i, row) for i, row in rows if bool(bos and row.text.startswith(bos)) is with_bos]
            texts = [row.text if row.text.endswith(end) else row.text + end for _, row in members]
            prompts = [row.text[: row.supervised_from or 0] for _, row in members]
            encodings = self._tokenize(texts, not with_bos, offsets=False)
            before = self._tokenize(prompts, not with_bos, offsets=False)
            for (index, row), encoding, prompt in zip(members, encodings, before, strict=True):
                ids = np.array(encoding.ids, dtype=np.int32)
                labels = ids.copy() if self._markers is None else self._markers.labels(ids)
                if row.supervised_from is not None and self._completion_only_loss is not False:
                    labels[: _common_prefix_length(prompt.ids, encoding.ids)] = IGNORE_INDEX
                yield index, ids, labels

    def _tokenize(self, texts: list[str], add_special_tokens: bool, *, offsets: bool) -> list[Encoding]:
        if not texts:
            return []
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()  # truncation stays enabled after an earlier call with it
        backend.no_padding()
        encode = backend.encode_batch if offsets else backend.encode_batch_fast
        return encode(texts, add_special_tokens=add_special_tokens)

    def _pieces(self, ids: np.ndarray, labels: np.ndarray) -> list[Encoded]:
        length, limit = len(ids), self._max_length
        if limit is None or length <= limit:
            bounds = [(0, length)]
        elif self._over_length == "drop":
            raise RowError("over_length", f"{length} tokens; data.max_length is {limit}")
        elif self._over_length == "truncate":
            bounds = [(0, limit)]
        elif self._over_length == "keep_end":
            bounds = [(length - limit, length)]
        else:
            bounds = [(start, min(start + limit, length)) for start in range(0, length - 1, limit - 1)]
        pieces = []
        for start, stop in bounds:
            piece = labels[start:stop]
            if start and self._over_length == "split":
                piece = piece.copy()
                piece[0] = IGNORE_INDEX  # it was predicted at the end of the previous piece
            if (piece[1:] != IGNORE_INDEX).any():
                pieces.append(Encoded(input_ids=ids[start:stop], labels=piece, shortened=stop - start < length))
        if not pieces:
            cut = ""
            if len(bounds) == 1 and limit is not None and length > limit:
                side = "last" if self._over_length == "keep_end" else "first"
                cut = f" in the {side} {limit} of {length} tokens"
            raise RowError("no_label", f"no token is supervised{cut}")
        return pieces

    # --- text and spans ---------------------------------------------------------------------------------------------

    def _rendered(self, row: Conversation) -> tuple[str, list[Span], str | None]:
        """The text of a conversation, its supervised spans, and the text of its prompt if only the completion is
        supervised."""
        encoder = self._variant(row.variables) if row.variables else self
        if self._template is not None and self._assistant_only_loss and not self._marked and encoder._shape is None:
            encoder._shape = encoder._infer_shape()
        if self._completion_only_loss is False:
            row = replace(row, supervised_from=0)
        text, spans = encoder._render_with_spans(row)
        if not row.supervised_from:
            return text, spans, None
        return text, spans, encoder._render(row.messages[: row.supervised_from], row.tools, prompt=True)

    def _variant(self, variables: dict[str, Any]) -> Encoder:
        """An encoder whose template also gets these variables, which may change how it writes turns."""
        key = json.dumps(variables, sort_keys=True, default=repr)
        if key not in self._variants:
            if len(self._variants) >= _MAX_VARIANTS:
                self._variants.clear()
            variant = copy.copy(self)
            variant._special = {**self._special, **variables}
            variant._skeletons, variant._shape, variant._variants = {}, None, {}
            self._variants[key] = variant
        return self._variants[key]

    def _render_with_spans(self, row: Conversation) -> tuple[str, list[Span]]:
        if self._template is None:
            raise UserError(
                "The rows are conversations and there is no chat template. Set model.chat_template to "
                f"{', '.join(TEMPLATES)}, or the path of a Jinja file."
            )
        if not self._assistant_only_loss:
            text = self._render(row.messages, row.tools)
            return text, [(0, len(text))]
        turns = [
            i for i, message in enumerate(row.messages) if message["role"] == "assistant" and i >= row.supervised_from
        ]
        turns = turns[-1:] if self._last_turn_only else turns
        if not turns:
            return self._render(row.messages, row.tools), []
        if self._marked:
            return self._marked_spans(row, turns[0])
        text = self._render(row.messages, row.tools)
        skeleton = self._skeleton(row)
        spans = skeleton.spans(row.messages, turns, text) if skeleton else None
        return text, spans or [self._span(row, text, turn) for turn in turns]

    def _render(self, messages: list[Message], tools: list | None = None, prompt: bool = False) -> str:
        return self._render_marked(messages, tools, prompt=prompt, marks=False)[0]

    def _render_marked(
        self, messages: list[Message], tools: list | None, *, prompt: bool = False, marks: bool = True
    ) -> tuple[str, list[Span]]:
        assert self._template is not None
        try:
            return render(
                self._template, messages, tools=tools, add_generation_prompt=prompt, marks=marks, **self._special
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RowError("template_error", f"the chat template failed: {error}") from error

    def _marked_spans(self, row: Conversation, first_turn: int) -> tuple[str, list[Span]]:
        """The rendered text and the template's own `{% generation %}` spans from message `first_turn` on, unchanged."""
        text, spans = self._render_marked(row.messages, row.tools)
        earlier = any(message["role"] == "assistant" for message in row.messages[:first_turn])
        skip = len(self._render_marked(row.messages[:first_turn], row.tools)[1]) if earlier else 0
        return text, spans[skip:]

    def _skeleton(self, row: Conversation) -> _Skeleton | None:
        """The skeleton for these roles, or None if messages have more than contents (tools, thinking)."""
        if row.tools or any(
            len(message) != 2 or not isinstance(message.get("content"), str) for message in row.messages
        ):
            return None
        roles = tuple(message["role"] for message in row.messages)
        if roles not in self._skeletons:
            if len(self._skeletons) >= _MAX_SKELETONS:
                self._skeletons.clear()
            try:
                self._skeletons[roles] = self._build_skeleton(roles)
            except RowError as error:
                # A template that drops a message by its role does so in every such row. Other errors may come from the
                # placeholders; the mask may still be unambiguous for the real contents.
                self._skeletons[roles] = error if error.reason == "not_rendered" else None
        skeleton = self._skeletons[roles]
        if isinstance(skeleton, RowError):
            raise RowError(skeleton.reason, skeleton.detail)  # a new object: a raised exception keeps its traceback
        return skeleton

    def _build_skeleton(self, roles: tuple[str, ...]) -> _Skeleton:
        messages = [{"role": role, "content": _mark(i)} for i, role in enumerate(roles)]
        text = self._render(messages)
        parts = _MARK.split(text)  # literal, index, literal, index, ..., literal
        order = [int(index) for index in parts[1::2]]
        if left_out := sorted(set(range(len(roles))) - set(order)):
            which = f"message {left_out[0] + 1} (the roles are {', '.join(roles)})"
            raise RowError("not_rendered", f"the chat template does not render {which}")
        begins, position = [0], 0  # where the literals begin in `text`
        for literal, index in zip(parts[::2], order, strict=False):
            position += len(literal) + len(_mark(index))
            begins.append(position)

        def relative(position: int) -> tuple[int, int]:
            number = bisect_right(begins, position) - 1
            return number, position - begins[number]

        row = Conversation(messages=messages)
        spans = {i: self._span(row, text, i) for i, role in enumerate(roles) if role == "assistant"}
        # Contents with whitespace around them show which ones the template trims.
        padded = self._render([{"role": role, "content": f" \n{_mark(i)}\n "} for i, role in enumerate(roles)])
        return _Skeleton(
            literals=parts[::2],
            contents=[(index, f" \n{_mark(index)}\n " not in padded) for index in order],
            turns={i: (*relative(start), *relative(end)) for i, (start, end) in spans.items()},
        )

    def _span(self, row: Conversation, text: str, turn: int) -> Span:
        """[start, end) of one assistant turn in `text`, the rendering of all messages."""
        messages, shape = row.messages, self._shape
        assert shape is not None
        last = turn == len(messages) - 1
        around: tuple[str, str] | None = None

        prompt = self._render(messages[:turn], row.tools, prompt=True) if turn else ""
        if prompt and text.startswith(prompt):
            start = len(prompt)
        else:
            around = self._around(row, text, turn)
            opening = around[0][: self._start(around[0], turn)]
            start = len(self._shared_start(opening, text))
            if len(opening) - start > len(shape.header):
                raise _ambiguous(turn, "its content changes the text rendered before it")

        closing = shape.end if last else shape.inner_end
        until = text if last else self._render(messages[: turn + 1], row.tools)
        closed = until.removesuffix(shape.tail) + closing
        if until.endswith(shape.tail) and text.startswith(closed):
            end = len(closed)
        elif text.startswith(until) and self._ends_in_token(until.rstrip()):  # a tool call may end differently
            end = len(until.rstrip())
        else:
            after = (around or self._around(row, text, turn))[1]
            if not (text.endswith(after) and after.startswith(closing)):
                raise _ambiguous(turn, f"it does not end with {closing!r}, or changes the text rendered after it")
            end = len(text) - len(after) + len(closing)

        if end < start:
            raise _ambiguous(turn, "its end comes before its start")
        for call in messages[turn].get("tool_calls", ()):
            name = (call.get("function") or call).get("name")
            if name and name not in text[start:end]:
                raise RowError(
                    "not_rendered", f"the chat template does not render the tool calls of message {turn + 1}"
                )
        return start, end

    def _around(self, row: Conversation, text: str, turn: int) -> tuple[str, str]:
        """The text before and after the turn's content, found by rendering a placeholder instead of the content."""
        marked = {"role": "assistant", "content": _mark(turn)}
        if marked == row.messages[turn]:
            whole = text
        else:
            try:
                whole = self._render([*row.messages[:turn], marked, *row.messages[turn + 1 :]], row.tools)
            except RowError as error:
                raise _ambiguous(turn, f"with a placeholder as its content, {error.detail}") from error
        before, mark, after = whole.partition(_mark(turn))
        if not mark or _mark(turn) in after:
            raise _ambiguous(turn, "its content is not rendered exactly once")
        return before, after

    def _start(self, before: str, turn: int) -> int:
        """Where a turn starts, given the whole text before its content."""
        assert self._shape is not None
        header, extra = self._shape.header, self._shape.extra
        if before.endswith(header + extra):
            return len(before) - len(extra)
        # An earlier turn may lack the extra, and the part of the header that opens the thinking.
        edges = [edge for token in self._added_token.finditer(header) for edge in token.span() if edge > 0]
        for edge in (len(header), *sorted(edges, reverse=True)):
            if before.endswith(header[:edge]):
                return len(before)
        raise _ambiguous(turn, f"it does not start with {header!r}")

    def _ends_in_token(self, text: str) -> bool:
        tail = text[-64:]
        return any(token.end() == len(tail) for token in self._added_token.finditer(tail))

    def _infer_shape(self) -> _Shape:
        """How this template starts and ends an assistant turn, inferred from conversations of placeholders."""
        user, assistant = {"role": "user", "content": _mark(0)}, {"role": "assistant", "content": _mark(1)}
        more = [{"role": "user", "content": _mark(2)}, {"role": "assistant", "content": _mark(3)}]
        try:
            prompt, text = self._render([user], prompt=True), self._render([user, assistant])
        except RowError as error:
            raise self._refusal(f"it cannot render a user and an assistant message: {error.detail}") from error
        before, mark, tail = text.partition(_mark(1))
        if not mark or _mark(1) in tail:
            raise self._refusal("it does not render the assistant's content exactly once")

        try:
            without_prompt = self._render([user])
        except RowError:
            without_prompt = ""
        after_user = prompt.rpartition(_mark(0))[2]
        header = after_user.removeprefix(without_prompt.rpartition(_mark(0))[2]) or after_user
        if prompt == without_prompt and before.startswith(prompt) and before.removeprefix(prompt).strip():
            opening = before.removeprefix(prompt)
            raise self._refusal(
                f"it has no generation prompt, so {opening!r} may belong to the prompt or the assistant"
            )
        # A prompt may reach into the turn (DeepSeek-R1, Qwen3.5 open <think>): keep what past turns share with it.
        given = self._shared_start(prompt, before)
        header = header[: max(0, len(header) - (len(prompt) - len(given)))]
        if not before.startswith(prompt) and not self._added_token.search(header):
            raise self._refusal(f"its generation prompt {after_user!r} differs from how it starts an assistant turn")
        extra = before.removeprefix(given)

        try:
            inner = self._render([user, assistant, *more]).partition(_mark(1))[2]
        except RowError:
            inner = tail  # the template supports only one exchange
        shared = commonprefix([tail, inner])
        if tokens := self._added_tokens.search(shared):
            end = inner_end = shared[: tokens.end()]
        elif shared == tail:
            end = inner_end = tail.rstrip()
        else:  # the last turn ends in another token than earlier ones (gpt-oss: <|return|> and <|end|>)
            last, earlier = (self._added_token.search(closing) for closing in (tail, inner))
            if not last or not earlier or tail[: last.start()].strip() or inner[: earlier.start()].strip():
                raise self._refusal(f"it ends the last turn with {tail!r} and an earlier one with {inner!r}")
            end, inner_end = tail[: last.end()], inner[: earlier.end()]
        return _Shape(header=header, extra=extra, tail=tail, end=end, inner_end=inner_end)

    def _shared_start(self, prompt: str, before: str) -> str:
        """`prompt` if `before` starts with it; else their common prefix, cut back to the edge of a special token."""
        if before.startswith(prompt):
            return prompt
        shared = len(commonprefix([prompt, before]))
        edges = (edge for token in self._added_token.finditer(prompt) for edge in token.span() if edge <= shared)
        return prompt[: max(edges, default=0)]

    def _refusal(self, why: str) -> UserError:
        name = self._tokenizer.name_or_path or type(self._tokenizer).__name__
        start = " ".join((self._template or "").split())[:60]
        return UserError(
            f"data.assistant_only_loss cannot be exact with the chat template of {name!r} ({start!r}...): {why}. Put "
            "{% generation %} marks around the assistant's turns in the template, set model.chat_template to another "
            f"one ({', '.join(TEMPLATES)}), or set data.assistant_only_loss: false."
        )


def preview(encoded: Encoded, tokenizer: Any, *, color: bool = True) -> rich.text.Text:
    """The decoded tokens of one document, with supervised ones in bold green and the context dimmed. Without color (as
    in a log file), supervised tokens are enclosed in the brackets \u27e6 and \u27e7."""
    import rich.text

    supervised = encoded.labels != IGNORE_INDEX
    supervised[:1] = False  # never predicted
    edges = [0, *(np.flatnonzero(supervised[1:] != supervised[:-1]) + 1).tolist(), len(supervised)]
    result = rich.text.Text()
    for start, stop in zip(edges, edges[1:], strict=False):
        text = tokenizer.decode(encoded.input_ids[start:stop].tolist(), clean_up_tokenization_spaces=False)
        if not color:
            result.append(f"\u27e6{text}\u27e7" if supervised[start] else text)
        else:
            result.append(text, style="bold green" if supervised[start] else "dim")
    return result


# --- helpers --------------------------------------------------------------------------------------------------------


_MARK = re.compile("\ue000([0-9]+)\ue001")


def _mark(index: int) -> str:
    """A placeholder for the content of message `index`, made of private-use characters that no template looks for."""
    return f"\ue000{index}\ue001"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """How a template writes an assistant turn: `header` (masked), `extra` (supervised; Qwen3's empty thinking block),
    the content, `end` (supervised; `inner_end` if messages follow). `tail` is all text after the last content."""

    header: str
    extra: str
    tail: str
    end: str
    inner_end: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Skeleton:
    """The text of a conversation with given roles: literals[0] contents[0] literals[1] ..."""

    literals: list[str]
    contents: list[tuple[int, bool]]  # message index, whether its content is trimmed
    turns: dict[int, tuple[int, int, int, int]]  # per assistant message: literal and offset of start, of end

    def spans(self, messages: list[Message], turns: list[int], text: str) -> list[Span] | None:
        """The spans of these turns in `text`, or None if the skeleton with the messages' contents differs from it."""
        parts, begins, position = [self.literals[0]], [0], len(self.literals[0])
        for (index, trimmed), literal in zip(self.contents, self.literals[1:], strict=True):
            content = messages[index]["content"].strip() if trimmed else messages[index]["content"]
            begins.append(position + len(content))
            position += len(content) + len(literal)
            parts += (content, literal)
        if position != len(text) or "".join(parts) != text:
            return None
        places = (self.turns[turn] for turn in turns)
        return [(begins[a] + start, begins[b] + end) for a, start, b, end in places]


def _common_prefix_length(ids: list[int], other_ids: list[int]) -> int:
    """Number of leading tokens that both have in common."""
    pairs = zip(ids, other_ids, strict=False)
    return next((i for i, (id, other) in enumerate(pairs) if id != other), min(len(ids), len(other_ids)))


def _byte_lengths(tokenizer: PreTrainedTokenizerFast) -> np.ndarray | None:
    """Length in bytes of every token, int32 [vocabulary], or None if lengths do not determine positions in ASCII text.

    Computing offsets takes a quarter of the tokenizer's time. A byte-level tokenizer (GPT-2, Llama 3, Qwen) does not
    need them: its tokens concatenate to the bytes of the text, and Unicode normalization does not change ASCII.
    """
    from tokenizers import decoders, normalizers

    backend = tokenizer.backend_tokenizer
    unicode = (normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD)
    if not isinstance(backend.decoder, decoders.ByteLevel):  # pyright: ignore[reportAttributeAccessIssue]
        return None
    if backend.normalizer is not None and not isinstance(backend.normalizer, unicode):
        return None
    tokens = backend.get_vocab(with_added_tokens=False)  # each character is one byte
    added = backend.get_added_tokens_decoder()
    if any(token.lstrip or token.rstrip for token in added.values()):  # these absorb adjacent whitespace
        return None
    lengths = np.zeros(max([*tokens.values(), *added], default=-1) + 1, dtype=np.int32)
    for token, index in tokens.items():
        lengths[index] = len(token)
    for index, token in added.items():
        lengths[index] = len(token.content.encode())
    probe = "Hello,  you!\n\n\t 12 words'll do;\r\n"
    ids = backend.encode(probe, add_special_tokens=False).ids
    return lengths if int(lengths[ids].sum()) == len(probe) else None


def _ambiguous(turn: int, why: str) -> RowError:
    return RowError(
        "mask_ambiguous", f"message {turn + 1} cannot be distinguished from its context in the rendered text: {why}"
    )


# The two functions below map a span of the text to tokens [first, stop). A token that extends beyond the span is
# included if its part outside is only whitespace.


def _tokens_by_length(ends: np.ndarray, text: str, span: Span) -> tuple[int, int]:
    """From the position in the text where each token ends."""
    start, end = span
    if start >= end:
        return 0, 0
    first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(ends, end, side="left")
    begin = ends[first - 1] if first else 0
    outside_before, outside_after = text[begin:start], text[end : ends[last]]
    return int(first) + bool(outside_before.strip()), int(last) + 1 - bool(outside_after.strip())


def _tokens_by_offset(encoding: Encoding, text: str, span: Span) -> tuple[int, int]:
    """From the tokenizer's offsets, looked up only at the edges of the span."""
    start, end = span
    # A character may have no token (a trimmed space): search inward from both edges.
    first = next((t for i in range(start, end) if (t := encoding.char_to_token(i)) is not None), None)
    if first is None:
        return 0, 0
    last = next(t for i in range(end - 1, start - 1, -1) if (t := encoding.char_to_token(i)) is not None)
    while first > 0 and (chars := encoding.token_to_chars(first - 1)) and chars[0] >= start:
        first -= 1  # a token of trimmed whitespace covers no character
    while last + 1 < len(encoding) and (chars := encoding.token_to_chars(last + 1)) and chars[0] < end:
        last += 1  # a character of several bytes, such as an emoji, may have several tokens
    outside_before = text[encoding.token_to_chars(first)[0] : start]  # pyright: ignore[reportOptionalSubscript]
    outside_after = text[end : encoding.token_to_chars(last)[1]]  # pyright: ignore[reportOptionalSubscript]
    return first + bool(outside_before.strip()), last + 1 - bool(outside_after.strip())
