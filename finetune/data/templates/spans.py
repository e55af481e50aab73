"""Finds the messages of a conversation in its rendered text, for any chat template.

The whole conversation is rendered once and tokenized once. The supervised part of that text is one span per supervised
message, by default each assistant turn: from the end of the generation prompt to the end-of-turn token, inclusive. The
span of a message of another role is its content and the end-of-turn token after it. If a template ends a turn only by
what begins the next one (GLM-4), that token is the end of an assistant turn, and the token that begins a user's turn is
appended to the last one. Spans are found in one of these ways, in this order:

1. By the template's own `{% generation %}` marks, which it has for assistant turns only.
2. From the *skeleton* of the conversation's roles: the template is rendered once with placeholders for the contents and
   split at the placeholders. If the row's contents inserted into the skeleton give exactly the rendered text, the
   skeleton gives the spans. These are the spans of the third way, found once for all rows with these roles: it only
   saves time.
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

import functools
import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix

from jinja2 import TemplateError

from finetune.data.formats import Conversation, Message, RowError
from finetune.data.templates.dropped_by_template import DroppedByTemplate
from finetune.data.templates.reasoning import CLOSE, END_ALONE, OPEN, Reasoning
from finetune.data.templates.render import render
from finetune.data.templates.token_ranges import Span
from finetune.errors import UserError
from finetune.runtime.types import JsonObject, Tokenizer

_RENDERS_TOOLS = "model.chat_template: chatml_tools does, or give a Jinja file"
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
LONG = 64  # messages; a longer conversation is looked at in windows
_WINDOW_TURNS = 8
_REACH = 16  # messages around the turns of a window in which its parts may be joined
_MAX_VARIANTS = 64  # encoders for different chat_template_kwargs of rows
_MAX_SKELETONS = 4096  # one per sequence of roles; bounds memory for files with very many different sequences


class SpanFinder:
    """Renders conversations with one chat template and finds the messages in the text. Picklable.

    marked: whether the template has `{% generation %}` marks.

    Args:
        variables: for the template: the tokenizer's special tokens, and those of the configuration.
        added_token: regular expression that matches one added token of the tokenizer, see `added_token_pattern`.
        masks_reasoning: leave the reasoning at the start of assistant turns out of their spans.
    """

    def __init__(
        self, template: str, variables: Mapping[str, object], added_token: str, *, masks_reasoning: bool = False
    ) -> None:
        self._template, self._variables = template, dict(variables)
        self._added_token, self._added_tokens = re.compile(added_token), re.compile(f"(?:{added_token})+")
        self._end_token, self._end_of_turn = re.compile(rf"\s*(?:{added_token})"), re.compile(rf"\s*(?:{added_token})+")
        self._edge = re.compile(f"{added_token}|{OPEN}|{CLOSE}")  # tags of reasoning may be plain text
        self._masks_reasoning = masks_reasoning
        self._reasoning = Reasoning(self.render, added_token) if masks_reasoning else None
        self._dropped = DroppedByTemplate()
        self._skeletons: dict[tuple[str, ...], _Skeleton | RowError | None] = {}
        self._shape: TurnShape | None = None
        self._variants: dict[str, SpanFinder] = {}  # by the rows' chat_template_kwargs
        self.marked = bool(_GENERATION_MARK.search(template))

    def variant(self, variables: JsonObject) -> SpanFinder:
        """The finder whose template also gets these variables, which may change how it writes turns."""
        key = json.dumps(variables, sort_keys=True, default=repr)
        if key not in self._variants:
            if len(self._variants) >= _MAX_VARIANTS:
                self._variants.clear()
            self._variants[key] = SpanFinder(
                self._template,
                {**self._variables, **variables},
                self._added_token.pattern,
                masks_reasoning=self._masks_reasoning,
            )
        return self._variants[key]

    def shape(self) -> TurnShape:
        """How the template writes an assistant turn, inferred once.

        Raises:
            RowError: turns cannot be found exactly.
        """
        if self._shape is None:
            self._shape = self._infer_shape()
        return self._shape

    def opened(self, row: Conversation) -> Conversation:
        """The row with an opening tag before reasoning that only ends (the prompt that was answered had opened it), if
        the template knows the tags: some templates write it only if the answer has both."""
        if CLOSE not in self._template:
            return row
        contents = [str(message.get("content") or "") for message in row.messages]
        bare = {
            i
            for i, content in enumerate(contents)
            if row.messages[i]["role"] == "assistant"
            and (close := END_ALONE.search(content))
            and OPEN not in content[: close.start()]
        }
        messages = [
            message | {"content": f"{OPEN}\n{contents[i].lstrip()}"} if i in bare else message
            for i, message in enumerate(row.messages)
        ]
        return replace(row, messages=messages) if bare else row

    def find(
        self, row: Conversation, turns: list[int], *, by_skeleton: bool
    ) -> tuple[str, list[tuple[int, Span]], tuple[str, ...]]:
        """The rendered text, (message, its span) for these messages, and notes about what of the row the text lacks. An
        assistant turn may have several spans, of the template's own marks.

        Args:
            by_skeleton: try the skeleton first.

        Raises:
            RowError: the template fails, leaves out a message, or hides where one is.
        """
        if self.marked and turns:
            text, marks = self._render_marked(row.messages, row.tools)
        else:
            text, marks = self.render(row.messages, row.tools), []
        skeleton = self._skeleton(row) if by_skeleton and turns and not self.marked else None
        begins = skeleton.begins(row.messages, text) if skeleton else None
        if skeleton and begins:
            exact = functools.partial(self._skeleton_span, skeleton, begins, row, text)
            spans = self._each_span(row, text, turns, exact)
            notes = ()  # every content is in the text, and the row has nothing else
        else:
            spans = self._spans(row, text, turns, marks)
            notes = self._dropped.notes(row, self.render)
        if self._reasoning is not None:
            answers = {i: message for i, message in enumerate(row.messages) if message["role"] == "assistant"}
            begin = self._reasoning.end
            spans = [(i, (begin(answers[i], text, *span), span[1]) if i in answers else span) for i, span in spans]
        if by_skeleton and not self.marked:
            text, spans = self._with_ends(row, text, spans)
        return text, spans, notes

    def _with_ends(
        self, row: Conversation, text: str, spans: list[tuple[int, Span]]
    ) -> tuple[str, list[tuple[int, Span]]]:
        """The text and spans with the token that begins the next turn as the end of an answer, if nothing else is."""
        turns = [turn for turn, _ in spans if row.messages[turn]["role"] == "assistant"]
        if not turns or not (begins_next := self.shape().begins_next):
            return text, spans
        if turns[-1] == len(row.messages) - 1:
            text += begins_next
        ends = {turn: self._end_token.match(text, end) for turn, (_, end) in spans if turn in turns}
        return text, [
            (turn, (start, found.end()) if (found := ends.get(turn)) else (start, end)) for turn, (start, end) in spans
        ]

    def ends_turns(self, row: Conversation, text: str, spans: list[tuple[int, Span]] | None) -> bool:
        """Whether the last answer among the spans (None: of the text) ends in what a model can learn to stop at. True
        without an answer."""
        last = len(row.messages) - 1
        if spans is not None:
            last, (_, stop) = spans[-1] if spans else (last, (0, 0))
            text = text[:stop]
        if not text or row.messages[last]["role"] != "assistant" or self._ends_in_token(text.rstrip()):
            return True
        try:
            end = self.shape().end.strip()
        except RowError:
            return False
        return bool(end) and (spans is None or not self.marked or text.rstrip().endswith(end))

    def render(self, messages: list[Message], tools: list[JsonObject] | None = None, prompt: bool = False) -> str:
        """The text of these messages, with `prompt` up to where the next answer begins. Raises RowError."""
        return self._render_marked(messages, tools, prompt=prompt, marks=False)[0]

    def _render_marked(
        self, messages: list[Message], tools: list[JsonObject] | None, *, prompt: bool = False, marks: bool = True
    ) -> tuple[str, list[Span]]:
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
        if self.marked and self._reasoning is None and set(turns).issuperset(assistants):
            marked = dict.fromkeys(assistants, []) | {i: marks for i in assistants[:1]}  # all, whichever turn has them
        elif self.marked and not set(turns).isdisjoint(assistants):
            marked = self._marked_spans(row, text, assistants, marks)
        found = [(turn, span) for turn in turns for span in marked.get(turn, ())]
        others = [turn for turn in turns if not self.marked or row.messages[turn]["role"] != "assistant"]
        exact = functools.partial(self._span_of_any_role, row, text)
        return found + self._each_span(row, text, others, exact)

    def _each_span(
        self, row: Conversation, text: str, turns: list[int], exact: Callable[[int], Span]
    ) -> list[tuple[int, Span]]:
        """(message, its span) for these messages. `exact` finds one in time that grows with the conversation; in a long
        one, it is used only for the messages whose spans no window gives."""
        if len(row.messages) <= LONG:
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
                inner = self.render(messages, part.tools)
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
        # A turn may have no mark, or several: those that the conversation up to it has in the same places. That one may
        # have one more, such as for the end token.
        counts = [0]
        for i in assistants:
            own = self._render_marked(row.messages[: i + 1], row.tools)[1]
            alike = itertools.takewhile(lambda pair: pair[0][0] == pair[1][0], zip(own, marks, strict=False))
            counts.append(len(list(alike)))
            if counts[-1] == counts[-2] < len(own):
                raise _ambiguous(i, "its {% generation %} marks depend on what follows")
        if sorted(counts) != counts or counts[-1] != len(marks):
            raise _ambiguous(assistants[-1], "the number of {% generation %} marks before it depends on what follows")
        return {i: marks[start:stop] for i, start, stop in zip(assistants, counts, counts[1:], strict=False)}

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
        text = self.render(messages)
        parts = _MARK.split(text)  # literal, index, literal, index, ..., literal
        order = [int(index) for index in parts[1::2]]
        if left_out := sorted(set(range(len(roles))) - set(order)):
            which = f"message {left_out[0] + 1} (the roles are {', '.join(roles)})"
            remedy = f"; {_RENDERS_TOOLS}" if roles[left_out[0]] == "tool" else ""
            raise RowError("not_rendered", f"the chat template does not render {which}{remedy}")
        # Contents with whitespace around them show which ones the template trims.
        padded = self.render([{"role": role, "content": f" \n{_mark(i)}\n "} for i, role in enumerate(roles)])
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
        messages, shape = row.messages, self.shape()
        last = turn == len(messages) - 1
        around: tuple[str, str] | None = None

        # The start: a model that is asked begins to write after the generation prompt. If the whole text begins with
        # the conversation up to there, this is the place. Otherwise the template writes earlier turns differently once
        # others follow; a placeholder then shows where this turn's content begins in the whole, and the two texts must
        # agree up to the turn's header. If they part earlier, the content has changed what stands before it, and there
        # is no right place.
        prompt = self.render(messages[:turn], row.tools, prompt=True) if turn else ""
        if prompt and text.startswith(prompt):
            start = len(prompt)
        else:
            around = self._around(row, text, turn)
            opening = around[0][: self._start(around[0], turn)]
            start = len(self._shared_start(opening, text))
            if len(opening) - start > len(shape.header):
                raise _ambiguous(turn, "its content changes the text rendered before it")

        # The end: the conversation up to this turn, as if it were the last one, is the beginning of the whole but for
        # how the turn is closed (`tail` at the end of a conversation, `closing` here). If the template wrote this turn
        # differently because others follow, the text after the placeholder must begin with the closing.
        closing = shape.end if last else shape.inner_end
        until = text if last else self.render(messages[: turn + 1], row.tools)
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
        # ending here also has are the end of this one.
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
                whole = self.render([*row.messages[:turn], marked, *row.messages[turn + 1 :]], row.tools)
            except RowError as error:
                raise _ambiguous(turn, f"with a placeholder as its content, {error.detail}") from error
        before, mark, after = whole.partition(_mark(turn))
        if not mark or _mark(turn) in after:
            raise _ambiguous(turn, "its content is not rendered exactly once")
        return before, after

    def _start(self, before: str, turn: int) -> int:
        """Where a turn starts, given the whole text before its content."""
        header, extra = self.shape().header, self.shape().extra
        if before.endswith(header + extra):
            return len(before) - len(extra)
        # An earlier turn may lack the extra, and the part of the header that opens the thinking.
        edges = [edge for token in self._edge.finditer(header) for edge in token.span() if edge > 0]
        for edge in (len(header), *sorted(edges, reverse=True)):
            if before.endswith(header[:edge]):
                return len(before)
        raise _ambiguous(turn, f"it does not start with {header!r}")

    def _ends_in_token(self, text: str) -> bool:
        tail = text[-64:]
        return any(token.end() == len(tail) for token in self._added_token.finditer(tail))

    def _infer_shape(self) -> TurnShape:
        """How this template starts and ends an assistant turn, inferred from conversations of placeholders.

        Raises RowError if turns cannot be found exactly.
        """
        user, assistant = {"role": "user", "content": _mark(0)}, {"role": "assistant", "content": _mark(1)}
        more = [{"role": "user", "content": _mark(2)}, {"role": "assistant", "content": _mark(3)}]
        try:
            prompt, text = self.render([user], prompt=True), self.render([user, assistant])
        except RowError as error:
            raise _unknown_turns(f"it cannot render a user and an assistant message: {error.detail}") from error
        before, mark, tail = text.partition(_mark(1))
        if not mark or _mark(1) in tail:
            raise _unknown_turns("it does not render the assistant's content exactly once")

        try:
            without_prompt = self.render([user])
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

        begins_next = ""
        try:
            inner = self.render([user, assistant, *more]).partition(_mark(1))[2]
        except RowError:
            inner = tail  # the template supports only one exchange
        shared = commonprefix([tail, inner])
        if tokens := self._added_tokens.search(shared):
            end = inner_end = shared[: tokens.end()]
        elif shared == tail:
            end = inner_end = tail.rstrip()
            following = None if end else self._end_token.match(inner[len(shared) :])
            begins_next = following[0].strip() if following else ""
        else:  # the last turn ends in another token than earlier ones (gpt-oss: <|return|> and <|end|>)
            last, earlier = (self._added_token.search(closing) for closing in (tail, inner))
            if not last or not earlier or tail[: last.start()].strip() or inner[: earlier.start()].strip():
                raise _unknown_turns(f"it ends the last turn with {tail!r} and an earlier one with {inner!r}")
            end, inner_end = tail[: last.end()], inner[: earlier.end()]
        return TurnShape(header=header, extra=extra, tail=tail, end=end, inner_end=inner_end, begins_next=begins_next)

    def _shared_start(self, prompt: str, before: str) -> str:
        """`prompt` if `before` starts with it; else their common prefix, cut to the edge of a special token or tag."""
        if before.startswith(prompt):
            return prompt
        shared = len(commonprefix([prompt, before]))
        edges = (edge for token in self._edge.finditer(prompt) for edge in token.span() if edge <= shared)
        return prompt[: max(edges, default=0)]


def template_variables(tokenizer: Tokenizer, given: Mapping[str, object] | None) -> dict[str, object]:
    """Variables for a chat template: the tokenizer's special tokens (bos_token and the like), and those given."""
    return {**tokenizer.special_tokens_map, **(given or {})}


def added_token_pattern(tokenizer: Tokenizer) -> str:
    """A regular expression that matches one added token, the longest first; it matches nothing if there is none."""
    added = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.content.strip()), key=len)
    return "|".join(re.escape(content) for content in reversed(added)) or "(?!)"


def end_of_turn(tokenizer: Tokenizer, template: str, variables: Mapping[str, object] | None = None) -> str | None:
    """The text that a chat template ends the last assistant turn with, such as "<|im_end|>", or if nothing does, the
    token that begins the next one; None if it cannot be inferred, or if there is neither."""
    try:
        shape = SpanFinder(template, template_variables(tokenizer, variables), added_token_pattern(tokenizer)).shape()
    except (RowError, UserError):
        return None
    return shape.end.strip() or shape.begins_next or None


_MARK = re.compile("\ue000([0-9]+)\ue001")


def _mark(index: int) -> str:
    """A placeholder for the content of message `index`, made of private-use characters that no template looks for."""
    return f"\ue000{index}\ue001"


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnShape:
    """How a template writes an assistant turn: `header` (masked), `extra` (supervised; Qwen3's empty thinking block),
    the content, `end` (supervised; `inner_end` if messages follow). `tail` is all text after the last content.
    `begins_next`: the token that a user's turn begins with, if nothing else ends the turn before it; else empty."""

    header: str
    extra: str
    tail: str
    end: str
    inner_end: str
    begins_next: str


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


def outside(spans: list[Span], length: int) -> list[Span]:
    """What of [0, length) is in none of the spans."""
    edges = [0, *(edge for span in sorted(spans) for edge in span), length]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def _unknown_turns(why: str) -> RowError:
    return RowError("mask_ambiguous", why)


def _ambiguous(turn: int, why: str) -> RowError:
    return RowError(
        "mask_ambiguous", f"message {turn + 1} cannot be distinguished from its context in the rendered text: {why}"
    )
