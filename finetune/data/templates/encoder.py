"""Convert conversations to token ids and labels, with an exact loss mask for any chat template.

The whole conversation is rendered once and tokenized once. The supervised part of that text is one span per supervised
message, by default each assistant turn: from the end of the generation prompt to the end-of-turn token, inclusive. The
span of a message of another role is its content and the end-of-turn token after it. Spans are found in one of these
ways, in this order:

1. By the template's own `{% generation %}` marks, which it has for assistant turns only.
2. From the *skeleton* of the conversation's roles: the template is rendered once with placeholders for the contents and
   split at the placeholders. If the row's contents inserted into the skeleton give exactly the rendered text, the
   skeleton gives the spans.
3. Turn by turn: the conversation before the turn, rendered with the generation prompt, must be a prefix of the whole
   text, and the conversation including the turn gives the end. If a template rewrites earlier turns (Qwen3 drops their
   thinking), the whole conversation is rendered with a placeholder for this turn; the text before and after the
   placeholder must also stand before and after the turn.

   The text around the placeholder is also what gives the span of a message of another role.

   In a long conversation this would take quadratic time. There it is done in *windows*: shorter conversations of the
   first messages, some turns with what surrounds them, and the last messages. A window counts only if its text equals
   that of the whole from the turn before its turns to the end of the last one.

If none of them is conclusive, the template is refused when the encoder is built, or the row is dropped with
RowError("mask_ambiguous").
"""

from __future__ import annotations

import copy
import functools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError

from finetune.data import IGNORE_INDEX
from finetune.data.formats import TRAINED_ROLES, Conversation, Message, Row, RowError, Text, Tokens
from finetune.data.templates.dropped_by_template import Unrendered
from finetune.data.templates.markers import Markers
from finetune.data.templates.reasoning import Reasoning
from finetune.data.templates.render import check_syntax, render
from finetune.errors import UserError
from finetune.runtime import files

if TYPE_CHECKING:
    import rich.text
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

OverLength = Literal["truncate", "keep_end", "drop", "split"]
Span = tuple[int, int]
_Rendered = tuple[int, str, list[Span]]  # index of the row, its text, its supervised spans

# The published templates, without tools and images, and ChatML with tools as Qwen2.5 and Hermes write them (without a
# system prompt of their own). They refuse unknown roles.
TEMPLATES = {
    "chatml": r"""
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "chatml_tools": r"""
{%- set system = messages[0].content if messages[0].role in ('system', 'developer') else '' %}
{%- if tools %}
    {{- '<|im_start|>system\n' + (system + '\n\n' if system else '') }}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role in ('system', 'developer') %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>' + message.role + ('\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls %}
            {%- set function = call.function or call %}
            {{- '\n<tool_call>\n{"name": ' + function.name | tojson + ', "arguments": ' }}
            {{- (function.arguments if function.arguments is defined else {}) | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role in ('user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif not loop.first %}
        {{- '<|im_start|>system\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
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

_RENDERS_TOOLS = "model.chat_template: chatml_tools does, or give a Jinja file"
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_LONG = 64  # messages; a longer conversation is looked at in windows
_WINDOW_TURNS = 8
_REACH = 16  # messages around the turns of a window in which its parts may be joined
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
            template = files.read_text(Path(name_or_path))
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
        train_on_roles: Sequence[str] | None = None,
        train_on_tool_calls: bool = True,
        train_on_thinking: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        markers: Markers | None = None,
        text_end: str | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"The tokenizer {tokenizer.name_or_path!r} ({type(tokenizer).__name__}) does not report the positions "
                "of tokens in the text. Use a fast tokenizer (one with a tokenizer.json)."
            )
        chosen = {
            "last_turn_only": last_turn_only,
            "train_on_roles": train_on_roles is not None,
            "train_on_tool_calls": not train_on_tool_calls,
            "train_on_thinking": not train_on_thinking,
        }
        for name in (name for name, given in chosen.items() if given and not assistant_only_loss):
            raise UserError(f"data.{name} requires data.assistant_only_loss. Set data.assistant_only_loss: true.")
        if max_length is not None and max_length < 2:
            raise UserError(
                f"data.max_length is {max_length}. Set it to at least 2, because the first token is never supervised."
            )
        self._tokenizer = tokenizer
        self._eos = cast("int | None", tokenizer.eos_token_id)
        self._template = chat_template
        self._max_length = max_length
        self.over_length = over_length
        self.assistant_only_loss = assistant_only_loss
        self._completion_only_loss = completion_only_loss
        self._last_turn_only = last_turn_only
        self._markers = markers
        self.text_end = cast("str", tokenizer.eos_token or "") if text_end is None else text_end
        self._ends_once = text_end is not None
        self.train_on_roles = TRAINED_ROLES if train_on_roles is None else tuple(train_on_roles)
        self._train_on_tool_calls = train_on_tool_calls
        self._special: dict[str, Any] = dict(tokenizer.special_tokens_map)  # bos_token and the like, for the template
        self._variables = {**self._special, **(chat_template_kwargs or {})}
        self._marked = chat_template is not None and bool(_GENERATION_MARK.search(chat_template))
        self._skeletons: dict[tuple[str, ...], _Skeleton | RowError | None] = {}
        self._unrendered = Unrendered()
        added = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.content.strip()), key=len)
        token = "|".join(re.escape(content) for content in reversed(added)) or "(?!)"
        self._byte_lengths = _byte_lengths(tokenizer)
        self._added_token, self._added_tokens = re.compile(token), re.compile(f"(?:{token})+")
        self._end_token, self._end_of_turn = re.compile(rf"\s*(?:{token})"), re.compile(rf"\s*(?:{token})+")
        self._shape: _Shape | None = None  # of assistant turns; inferred when it is needed
        self._variants: dict[str, Encoder] = {}  # by the rows' chat_template_kwargs
        self._masks_reasoning = not train_on_thinking
        self._reasoning = self._new_reasoning()

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
            "data.train_on_thinking": self._masks_reasoning,
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
        if self._tokenizer.convert_ids_to_tokens(max(int(row.input_ids.max()), int(labels.max()))) is None:
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
        find. EOS is appended as text before tokenizing, as in TRL.

        Raises UserError if there is no EOS."""
        if rows and not self._markers and not self.text_end:
            raise UserError(
                f"The tokenizer {self._tokenizer.name_or_path!r} has no eos_token, which ends every row of text: "
                "without it, the model's answers would never end. Set eos_token in its tokenizer_config.json (in a "
                "script, `tokenizer.eos_token`) to one of its special tokens, or train on rows of messages, whose "
                "turns the chat template ends."
            )
        bos, end = self._special.get("bos_token"), "" if self._markers else self.text_end
        for with_bos in (True, False):  # text that begins with BOS was rendered by a chat template
            members = [(i, row) for i, row in rows if bool(bos and row.text.startswith(bos)) is with_bos]
            texts = [row.text if row.text.endswith(end) else row.text + end for _, row in members]
            prompts = [row.text[: row.supervised_from or 0] for _, row in members]
            encodings = self._tokenize(texts, not with_bos, offsets=False)
            before = self._tokenize(prompts, not with_bos, offsets=False)
            for (index, row), encoding, prompt in zip(members, encodings, before, strict=True):
                ids = np.array(encoding.ids, dtype=np.int32)
                if self._ends_once:
                    ids = ids[: len(ids) - _added_at_the_end(encoding)]
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
        encoder = self._variant(row.variables) if row.variables else self
        needs_shape = self.assistant_only_loss and not self._marked and "assistant" in self.train_on_roles
        if needs_shape and self._template is not None and encoder._shape is None:
            try:
                encoder._shape = encoder._infer_shape()
            except RowError as error:
                raise self._refusal(error.detail) from error
        if self._completion_only_loss is False:
            row = replace(row, supervised_from=0)
        text, spans, notes = encoder._render_with_spans(row)
        asked = any((row.supervised or ())[: row.supervised_from])  # the row marks a message of the prompt
        if asked and not self.assistant_only_loss:  # else all of the prompt would be supervised with it
            raise RowError(
                "invalid_weight", "a message of the prompt is marked `train: true`: set data.assistant_only_loss: true"
            )
        if not row.supervised_from or asked:
            return text, spans, None, notes
        return text, spans, encoder._render(row.messages[: row.supervised_from], row.tools, prompt=True), notes

    def _variant(self, variables: dict[str, Any]) -> Encoder:
        """An encoder whose template also gets these variables, which may change how it writes turns."""
        key = json.dumps(variables, sort_keys=True, default=repr)
        if key not in self._variants:
            if len(self._variants) >= _MAX_VARIANTS:
                self._variants.clear()
            variant = copy.copy(self)
            variant._variables = {**self._variables, **variables}
            variant._skeletons, variant._shape, variant._variants = {}, None, {}
            variant._unrendered, variant._reasoning = Unrendered(), variant._new_reasoning()
            self._variants[key] = variant
        return self._variants[key]

    def _new_reasoning(self) -> Reasoning | None:
        if not self._masks_reasoning or self._template is None:
            return None
        return Reasoning(self._render, self._added_token.pattern)

    def _render_with_spans(self, row: Conversation) -> tuple[str, list[Span], tuple[str, ...]]:
        """The rendered text, its supervised spans, and notes about what of the row it lacks."""
        if self._template is None:
            raise UserError(
                "The rows are conversations and there is no chat template. Set model.chat_template to "
                f"{', '.join(TEMPLATES)}, or the path of a Jinja file."
            )
        turns, masks = self._supervised_messages(row), self.assistant_only_loss
        if not masks:  # all text is supervised but these
            turns = [i for i, mark in enumerate(row.supervised or ()) if mark is False]
        if self._marked and turns:
            text, marks = self._render_marked(row.messages, row.tools)
        else:
            text, marks = self._render(row.messages, row.tools), []
        skeleton = self._skeleton(row) if masks and turns and not self._marked else None
        begins = skeleton.begins(row.messages, text) if skeleton else None
        if skeleton and begins:
            exact = functools.partial(self._skeleton_span, skeleton, begins, row, text)
            spans = self._each_span(row, text, turns, exact)
            notes = ()  # every content is in the text, and the row has nothing else
        else:
            spans = self._spans(row, text, turns, marks)
            notes = self._unrendered.notes(row, self._render)
        if not masks:
            return text, _outside([span for _, span in spans], len(text)), notes
        if self._reasoning is not None:
            spans = [(turn, self._without_reasoning(row.messages[turn], text, span)) for turn, span in spans]
        return text, [span for _, span in spans], notes

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

    def _render(self, messages: list[Message], tools: list | None = None, prompt: bool = False) -> str:
        return self._render_marked(messages, tools, prompt=prompt, marks=False)[0]

    def _render_marked(
        self, messages: list[Message], tools: list | None, *, prompt: bool = False, marks: bool = True
    ) -> tuple[str, list[Span]]:
        assert self._template is not None
        try:
            return render(
                self._template, messages, tools=tools, add_generation_prompt=prompt, marks=marks, **self._variables
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RowError("template_error", f"the chat template failed: {error}") from error

    def _spans(self, row: Conversation, text: str, turns: list[int], marks: list[Span]) -> list[tuple[int, Span]]:
        """(message, its span) for these messages; an assistant turn may have several of a template's own `marks`."""
        assistants = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        marked: dict[int, list[Span]] = {}
        if self._marked and self._reasoning is None and set(turns).issuperset(assistants):
            marked = dict.fromkeys(assistants, []) | {i: marks for i in assistants[:1]}  # all, whichever turn has them
        elif self._marked and not set(turns).isdisjoint(assistants):
            marked = self._marked_spans(row, text, assistants, marks)
        found = [(turn, span) for turn in turns for span in marked.get(turn, ())]
        others = [turn for turn in turns if not self._marked or row.messages[turn]["role"] != "assistant"]
        exact = functools.partial(self._span_of_any_role, row, text)
        return found + self._each_span(row, text, others, exact)

    def _each_span(
        self, row: Conversation, text: str, turns: list[int], exact: Callable[[int], Span]
    ) -> list[tuple[int, Span]]:
        """(message, its span) for these messages. `exact` finds one in time that grows with the conversation; in a long
        one, it is used only for the messages whose spans no window gives."""
        if len(row.messages) <= _LONG:
            return [(turn, exact(turn)) for turn in turns]
        found: dict[int, Span] = {}
        roles = [message["role"] for message in row.messages]
        for first in range(0, len(turns), _WINDOW_TURNS):
            before, group = turns[max(0, first - 1) : first], turns[first : first + _WINDOW_TURNS]
            window = _window(roles, before[0] if before else None, group[-1])
            given = self._spans_in_window(row, text, window, before + group, found) if window else None
            found |= given or {turn: exact(turn) for turn in group}
        return list(found.items())

    def _spans_in_window(
        self, row: Conversation, text: str, window: list[int], turns: list[int], found: dict[int, Span]
    ) -> dict[int, Span] | None:
        """The spans of `turns` in `text`, from a conversation of the messages with the indices `window` only. None if
        its text is another one there. `found` has the first of the turns, unless the window begins with the text."""
        messages = [row.messages[index] for index in window]
        place = {index: number for number, index in enumerate(window)}
        known = found.get(turns[0])
        # Descriptions of tools are long, and come before all turns.
        for tools in dict.fromkeys([known is None, True]) if row.tools else [True]:
            part = Conversation(messages=messages, tools=row.tools if tools else None)
            try:
                inner = self._render(messages, part.tools)
                spans = {turn: self._span_of_any_role(part, inner, place[turn]) for turn in turns}
            except RowError:
                continue
            start, stop = (0 if known is None else spans[turns[0]][0]), spans[turns[-1]][1]
            shift = 0 if known is None else known[0] - start
            if inner[start:stop] == text[start + shift : stop + shift]:
                return {turn: (begin + shift, end + shift) for turn, (begin, end) in spans.items()}
        return None

    def _span_of_any_role(self, row: Conversation, text: str, turn: int) -> Span:
        find = self._span if row.messages[turn]["role"] == "assistant" else self._content_span
        return find(row, text, turn)

    def _marked_spans(
        self, row: Conversation, text: str, assistants: list[int], marks: list[Span]
    ) -> dict[int, list[Span]]:
        """The template's own `{% generation %}` spans of each assistant turn, unchanged."""
        contents = [row.messages[turn].get("content") or "" for turn in assistants]
        if len(marks) == len(assistants) and all(
            content.strip() in text[start:end] for content, (start, end) in zip(contents, marks, strict=True)
        ):
            return {turn: [mark] for turn, mark in zip(assistants, marks, strict=True)}
        # A turn may have no mark, or several: count those of the conversation up to each turn.
        counts = [len(self._render_marked(row.messages[: i + 1], row.tools)[1]) for i in assistants]
        if sorted(counts) != counts or counts[-1] != len(marks):
            raise _ambiguous(assistants[-1], "the number of {% generation %} marks before it depends on what follows")
        return {i: marks[start:stop] for i, start, stop in zip(assistants, [0, *counts], counts, strict=False)}

    def _without_reasoning(self, message: Message, text: str, span: Span) -> Span:
        if self._reasoning is None or message["role"] != "assistant":
            return span
        return self._reasoning.end(message, text, *span), span[1]

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
            remedy = f"; {_RENDERS_TOOLS}" if roles[left_out[0]] == "tool" else ""
            raise RowError("not_rendered", f"the chat template does not render {which}{remedy}")
        # Contents with whitespace around them show which ones the template trims.
        padded = self._render([{"role": role, "content": f" \n{_mark(i)}\n "} for i, role in enumerate(roles)])
        return _Skeleton(
            row=Conversation(messages=messages),
            text=text,
            literals=parts[::2],
            contents=[(index, f" \n{_mark(index)}\n " not in padded) for index in order],
        )

    def _skeleton_span(self, skeleton: _Skeleton, begins: list[int], row: Conversation, text: str, turn: int) -> Span:
        """The span of a message in `text`, which equals the skeleton with the row's contents."""
        if turn not in skeleton.turns:
            try:
                skeleton.turns[turn] = skeleton.relative(self._span_of_any_role(skeleton.row, skeleton.text, turn))
            except RowError:  # caused by the placeholders; the real contents may be unambiguous
                skeleton.turns[turn] = None
        place = skeleton.turns[turn]
        if place is None:
            return self._span_of_any_role(row, text, turn)
        return begins[place[0]] + place[1], begins[place[2]] + place[3]

    def _span(self, row: Conversation, text: str, turn: int) -> Span:
        """[start, end) of one assistant turn in `text`, the rendering of all messages."""
        if self._shape is None:
            self._shape = self._infer_shape()
        messages, shape = row.messages, self._shape
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
            function = call.get("function") or call
            name = function.get("name") if isinstance(function, dict) else function
            if isinstance(name, str) and name not in text[start:end]:
                what = f"the tool calls of message {turn + 1}"
                raise RowError("not_rendered", f"the chat template does not render {what}; {_RENDERS_TOOLS}")
        return start, end

    def _content_span(self, row: Conversation, text: str, turn: int) -> Span:
        """[start, end) in `text` of the content of one message, of any role, and of the end-of-turn token after it."""
        before, after = self._around(row, text, turn)
        start, end = len(before), len(text) - len(after)
        if start > end or not (text.startswith(before) and text.endswith(after)):
            raise _ambiguous(turn, "its content changes the text rendered around it")
        # Added tokens may also start the next message (Phi 4: <|im_end|><|im_start|>): only those that a conversation
        # ending here has, too, are the end of this one.
        upto = Conversation(messages=row.messages[: turn + 1], tools=row.tools)
        try:
            closing = commonprefix([after, self._around(upto, None, turn)[1]])
            tokens = self._end_of_turn.match(closing)
        except RowError:
            tokens = self._end_token.match(after)
        return start, end + (tokens.end() if tokens else 0)

    def _around(self, row: Conversation, text: str | None, turn: int) -> tuple[str, str]:
        """The text before and after the message's content, found by rendering a placeholder instead of the content.

        `text` is the rendering of the row, or None.
        """
        own = row.messages[turn]
        marked = ({} if own["role"] == "assistant" else own) | {"role": own["role"], "content": _mark(turn)}
        if text is not None and marked == row.messages[turn]:
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
        """How this template starts and ends an assistant turn, inferred from conversations of placeholders.

        Raises RowError if turns cannot be found exactly.
        """
        user, assistant = {"role": "user", "content": _mark(0)}, {"role": "assistant", "content": _mark(1)}
        more = [{"role": "user", "content": _mark(2)}, {"role": "assistant", "content": _mark(3)}]
        try:
            prompt, text = self._render([user], prompt=True), self._render([user, assistant])
        except RowError as error:
            raise _unknown_turns(f"it cannot render a user and an assistant message: {error.detail}") from error
        before, mark, tail = text.partition(_mark(1))
        if not mark or _mark(1) in tail:
            raise _unknown_turns("it does not render the assistant's content exactly once")

        try:
            without_prompt = self._render([user])
        except RowError:
            without_prompt = ""
        after_user = prompt.rpartition(_mark(0))[2]
        header = after_user.removeprefix(without_prompt.rpartition(_mark(0))[2]) or after_user
        if prompt == without_prompt and before.startswith(prompt) and before.removeprefix(prompt).strip():
            opening = before.removeprefix(prompt)
            raise _unknown_turns(
                f"it has no generation prompt, so {opening!r} may belong to the prompt or the assistant"
            )
        # A prompt may reach into the turn (DeepSeek-R1, Qwen3.5 open <think>): keep what past turns share with it.
        given = self._shared_start(prompt, before)
        header = header[: max(0, len(header) - (len(prompt) - len(given)))]
        if not before.startswith(prompt) and not self._added_token.search(header):
            raise _unknown_turns(f"its generation prompt {after_user!r} differs from how it starts an assistant turn")
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
                raise _unknown_turns(f"it ends the last turn with {tail!r} and an earlier one with {inner!r}")
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


def end_of_turn(tokenizer: Any, template: str, variables: Mapping[str, Any] | None = None) -> str | None:
    """The text that a chat template ends the last assistant turn with, such as "<|im_end|>"; None if it cannot be
    inferred, or if nothing but white space ends it."""
    try:
        end = Encoder(tokenizer, template, chat_template_kwargs=variables)._infer_shape().end
    except (RowError, UserError):
        return None
    return end.strip() or None


# Tokens that end documents in the pretraining of GPT-2, Qwen, SmolLM and Phi; Llama 3 and Granite; Gemma; Llama 2 and
# Mistral.
_DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")


def document_end(tokenizer: Any) -> str:
    """The token that ended documents in the model's pretraining. It is EOS, but the EOS of a chat model may be the end
    of a turn (Qwen's <|im_end|>); then it is another of its special tokens."""
    if tokenizer.eos_token in _DOCUMENT_ENDS:
        return tokenizer.eos_token
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return next((end for end in _DOCUMENT_ENDS if end in added), tokenizer.eos_token or "")


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


def _check_characters(text: str) -> None:
    """Check that a text can be written. JSON may contain half of a character, such as an emoji that was cut in two."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half, before = text[error.start], text[max(0, error.start - 20) : error.start]
        raise RowError("not_text", f"half of a character, {half!a}, follows {before!r}") from None


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


@dataclass(kw_only=True, slots=True)
class _Skeleton:
    """The text of a conversation with given roles: literals[0] contents[0] literals[1] ..."""

    row: Conversation  # of placeholders
    text: str  # its rendering
    literals: list[str]
    contents: list[tuple[int, bool]]  # message index, whether its content is trimmed
    # By message, filled when one is first supervised: literal and offset of the span's start and of its end. None if
    # the placeholders do not show it.
    turns: dict[int, tuple[int, int, int, int] | None] = field(default_factory=dict)

    def begins(self, messages: list[Message], text: str) -> list[int] | None:
        """Where the literals begin in `text`, or None if the skeleton with the messages' contents differs from it."""
        parts, begins, position = [self.literals[0]], [0], len(self.literals[0])
        for (index, trimmed), literal in zip(self.contents, self.literals[1:], strict=True):
            content = messages[index]["content"].strip() if trimmed else messages[index]["content"]
            begins.append(position + len(content))
            position += len(content) + len(literal)
            parts += (content, literal)
        return begins if position == len(text) and "".join(parts) == text else None

    def relative(self, span: Span) -> tuple[int, int, int, int]:
        """A span of the skeleton's own text as literal and offset of its start and of its end."""
        begins = self.begins(self.row.messages, self.text)
        assert begins is not None
        start, end = (bisect_right(begins, position) - 1 for position in span)
        return start, span[0] - begins[start], end, span[1] - begins[end]


def _window(roles: Sequence[str], before: int | None, last: int) -> list[int] | None:
    """The messages of a short conversation, as indices, that renders a part of a long one as the whole does.

    They are the first messages, those from message `before` (None: the first) to after message `last`, and the last
    messages; or instead of these the last question and its answer, because templates drop thinking before it. Where
    parts are joined, the roles on both sides are those of the whole, as are even and odd positions, because templates
    look at them. None if there is no such place near.
    """
    opening = roles.index("user") + 1 if "user" in roles else 1
    question = max((index for index, role in enumerate(roles) if role == "user"), default=0)
    count = len(roles) if last >= question else min(question + 2, len(roles))

    def joins(left: int, right: int) -> bool:
        return (right - left) % 2 == 0 and roles[left - 1 : left + 1] == roles[right - 1 : right + 1]

    starts = (
        (o, s) for s in range(before or 0, max(0, (before or 0) - _REACH), -1) for o in range(opening, opening + _REACH)
    )
    stops = ((e, z) for e in range(last + 2, last + 2 + _REACH) for z in range(count - _REACH // 2, count))
    start, stop = (0, 0), (count, count)
    if before is not None and before > opening + _REACH:
        start = next((pair for pair in starts if pair[0] < pair[1] and joins(*pair)), None)
    if last + _REACH < count:
        stop = next((pair for pair in stops if pair[0] <= pair[1] and joins(*pair)), None)
    if start is None or stop is None:
        return None
    return [*range(start[0]), *range(start[1], stop[0]), *range(stop[1], count)]


def _added_at_the_end(encoding: Encoding) -> int:
    """Tokens that the tokenizer adds after a text."""
    return next((n for n, added in enumerate(reversed(encoding.special_tokens_mask)) if not added), 0)


def _outside(spans: list[Span], length: int) -> list[Span]:
    """What of [0, length) is in none of the spans."""
    edges = [0, *(edge for span in sorted(spans) for edge in span), length]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


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


def _unknown_turns(why: str) -> RowError:
    return RowError("mask_ambiguous", why)


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
