"""Which tokens of a plain text are supervised, by the markers that open its turns.

The rule of Unsloth's `train_on_responses_only`, so that a text gets the labels that it had in a notebook: a response
goes from behind a response marker to the end-of-sequence token (supervised, too), or to what opens the next turn (not
supervised), or to the end of the text. Here the rule is applied to the whole text, and a text that is too long is cut
afterwards, so that a marker that the cut would halve is never supervised.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from os.path import commonprefix
from typing import Any

import numpy as np
from jinja2 import TemplateError

from finetune.data.render import render
from finetune.errors import UserError

# What may stand beside a marker and melt into its outer tokens, as "user" + "s" do in one tokenizer and not in another.
_NEIGHBOURS = "aA1" + string.punctuation


@dataclass(frozen=True, kw_only=True, slots=True)
class _Marker:
    """Token ids of a marker: `core` is always there, `left` and `right` only where nothing has melted into them."""

    core: tuple[int, ...]
    left: tuple[int, ...] = ()
    right: tuple[int, ...] = ()

    def begins(self, ids: np.ndarray, place: int) -> bool:
        return _begins(ids, place, self.core)

    def end(self, ids: np.ndarray, place: int) -> int:
        """Where a marker whose core begins at `place` ends."""
        place += len(self.core)
        for token in self.right:
            if place == len(ids) or ids[place] != token:
                break
            place += 1
        return place

    def start(self, ids: np.ndarray, place: int) -> int:
        """Where a marker whose core begins at `place` begins itself."""
        for token in reversed(self.left):
            if place == 0 or ids[place - 1] != token:
                break
            place -= 1
        return place


class Markers:
    """The labels of tokenized texts.

    Args:
        response: text that opens a turn to learn.
        instruction: text that opens a turn not to learn; None where the end-of-sequence token closes every response.
        last_only: learn the last response alone.

    Raises:
        UserError: a marker has no token, or both markers are the same.
    """

    def __init__(
        self, tokenizer: Any, response: str, instruction: str | None = None, *, last_only: bool = False
    ) -> None:
        self._response = _marker(tokenizer, response, "data.response_part")
        self._instruction = None if instruction is None else _marker(tokenizer, instruction, "data.instruction_part")
        self._opening: tuple[int, ...] = ()  # what opens a turn of any role
        if self._instruction is not None:
            self._response, self._instruction = _told_apart(self._response, self._instruction)
            if self._response.core == self._instruction.core:
                raise UserError(
                    f"data.instruction_part {instruction!r} and data.response_part {response!r} are the same tokens to "
                    f"{tokenizer.name_or_path!r}; give two markers that differ"
                )
            self._opening = _opening(tokenizer, self._response.core, self._instruction.core)
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._last_only = last_only
        first = {self._response.core[0], self._bos, self._eos, *self._opening[:1]}
        first |= {self._instruction.core[0]} if self._instruction else set()
        self._events = np.array(sorted(token for token in first if token is not None), dtype=np.int32)

    def spans(self, ids: np.ndarray) -> list[tuple[int, int]]:
        """[first, stop) of each response in the token ids of one text, int32 [length]."""
        found: list[tuple[int, int]] = []
        start: int | None = None  # of the response that is open
        resume = 0
        for place in np.flatnonzero(np.isin(ids, self._events)).tolist():
            if place < resume:
                continue
            if start is not None:
                if ids[place] == self._eos:
                    found.append((start, place + 1))
                    start = None
                    continue
                if self._opens_a_turn(ids, place):
                    found.append((start, place))
                    start = None
                elif self._instruction is not None and self._instruction.begins(ids, place):
                    found.append((start, max(start, self._instruction.start(ids, place))))
                    start, resume = None, self._instruction.end(ids, place)
                    continue
            if start is None and self._response.begins(ids, place):
                start = resume = self._response.end(ids, place)
        if start is not None and start < len(ids):
            found.append((start, len(ids)))
        return found[-1:] if self._last_only else found

    def labels(self, ids: np.ndarray, ignore: int) -> np.ndarray:
        """int32 [length]: the ids where they are supervised, else `ignore`."""
        labels = np.full(len(ids), ignore, dtype=np.int32)
        for first, stop in self.spans(ids):
            labels[first:stop] = ids[first:stop]
        return labels

    def _opens_a_turn(self, ids: np.ndarray, place: int) -> bool:
        if ids[place] == self._bos or self._response.begins(ids, place):
            return True
        return bool(self._opening) and _begins(ids, place, self._opening)


def _begins(ids: np.ndarray, place: int, tokens: Sequence[int]) -> bool:
    return tuple(ids[place : place + len(tokens)].tolist()) == tuple(tokens)


def _marker(tokenizer: Any, text: str, key: str) -> _Marker:
    """The marker in the tokens of this tokenizer.

    At an edge of plain text, tokens may differ with what stands beside the marker. These are optional, but only where
    a special token remains: without one, "Q:" would shrink to the "Q" that any text holds.
    """
    ids = _tokenise(tokenizer, text)
    if not ids:
        raise UserError(f"{key} is {text!r}, which is not a token of {tokenizer.name_or_path!r}; give another marker")
    start, stop = 0, len(ids)
    for neighbour in _NEIGHBOURS:
        stop = min(stop, len(commonprefix([ids, _tokenise(tokenizer, text + neighbour)])))
        before = _tokenise(tokenizer, neighbour + text)
        start = max(start, len(ids) - len(commonprefix([ids[::-1], before[::-1]])))
    added = tokenizer.added_tokens_decoder
    if any(token in added and added[token].content.strip() for token in ids[start:stop]):
        return _Marker(core=tuple(ids[start:stop]), left=tuple(ids[:start]), right=tuple(ids[stop:]))
    return _Marker(core=tuple(ids))


def _told_apart(one: _Marker, other: _Marker) -> tuple[_Marker, _Marker]:
    """The two with whole right edges where one would otherwise be found wherever the other is."""
    if one.right and one.core == other.core[: len(one.core)]:
        one = _Marker(core=one.core + one.right, left=one.left)
    if other.right and other.core == one.core[: len(other.core)]:
        other = _Marker(core=other.core + other.right, left=other.left)
    return one, other


def _opening(tokenizer: Any, one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """What both begin with, if it is of special tokens: every role's turns then begin so. Else nothing, as plain text
    may also stand inside a response."""
    shared = commonprefix([one, other])
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}
    visible = any(token in added and added[token].content.strip() for token in shared)
    return tuple(shared) if visible and all(token in special for token in shared) else ()


def _tokenise(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


# --- the markers of a chat template -----------------------------------------------------------------------------------

# What is said in the probe: plain words, which every tokenizer has and no template looks for.
_QUESTIONS = ("Quorvix one", "Quorvix two", "Quorvix three")
_ANSWERS = ("Zelmund one", "Zelmund two", "Zelmund three")
_THOUGHTS = ("Wexlorn one", "Wexlorn two", "Wexlorn three")


def of_template(tokenizer: Any, template: str | None) -> tuple[str, str]:
    """(instruction, response): what a chat template writes before the words of the user and of the assistant.

    Read off a rendered conversation of three exchanges. What closes the turn before is cut off, and so is what not all
    of the assistant's turns open with (an empty thinking block). Then the markers must do on this conversation what
    they are for: learn the three answers and nothing that was asked.

    Raises:
        UserError: there is no template, it refuses the conversation, or its markers cannot be determined.
    """
    probe = _Probe(tokenizer, template)
    text = probe.render(_messages(_ANSWERS))
    before_answers, before_questions, tail = probe.between(text)
    response = _shared_start([*before_answers, *probe.before_thoughts()], probe.tokens)
    shown = [response, *before_questions]
    end = probe.end_of_question(response)
    response = response[len(end) :]
    instruction = _shared_end(before_questions, probe.tokens)
    # gpt-oss closes an earlier answer as it closes a question, and the last one otherwise: only that end is supervised.
    if tail.startswith(end):
        instruction = instruction.removeprefix(end)
    instruction, response = probe.stripped(instruction), probe.stripped(response)
    # Without special tokens, what a marker is to SentencePiece depends on what stands before it.
    for one, other in product(("", " ", "\n"), repeat=2):
        if instruction and response and probe.is_learnt(text, one + instruction, other + response):
            return one + instruction, other + response
    raise probe.refuse(f"an answer cannot be distinguished from a question or its surroundings in {shown}")


def _messages(answers: Sequence[str]) -> list[dict[str, str]]:
    messages = []
    for question, answer in zip(_QUESTIONS, answers, strict=True):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


class _Probe:
    """A conversation rendered by one template, and what is asked of it."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        if template is None:
            raise self.refuse("there is none")
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self.tokens = "|".join(re.escape(content) for content in sorted(added, key=len, reverse=True)) or "(?!)"

    def render(self, messages: list[dict[str, str]], *, prompt: bool = False) -> str:
        assert self._template is not None
        special = dict(self._tokenizer.special_tokens_map)
        try:
            return render(self._template, messages, add_generation_prompt=prompt, **special)[0]
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise self.refuse(f"it refuses a conversation of {len(messages)} messages: {error}") from error

    def between(self, text: str) -> tuple[list[str], list[str], str]:
        """What stands before each answer, before each question but the first, and after the last answer."""
        said = [message["content"] for message in _messages(_ANSWERS)]
        if re.findall("|".join(said), text) != said:
            raise self.refuse("it does not write each message once and in order")
        _, *gaps = re.split("|".join(said), text)
        return gaps[:-1:2], gaps[1:-1:2], gaps[-1]

    def before_thoughts(self) -> list[str]:
        """What stands before answers that begin with a thought; nothing where the template does not go with one."""
        pairs = zip(_THOUGHTS, _ANSWERS, strict=True)
        answers = [f"<think>\n{thought}\n</think>\n\n{words}" for thought, words in pairs]
        try:
            gaps, _, _ = self.between(self.render(_messages(answers)))
        except UserError:
            return []
        return [re.split(rf"(?:<think>\s*)?{thought}", gap)[0] for thought, gap in zip(_THOUGHTS, gaps, strict=True)]

    def end_of_question(self, opening: str) -> str:
        """What of `opening` closes the question: the part that is there before an answer is asked for. Nothing where
        a template never asks (Mistral: what closes the question opens the answer)."""
        asked, not_asked = (self.render(_messages(_ANSWERS)[:-1], prompt=prompt) for prompt in (True, False))
        end = _shared_start([not_asked.rpartition(_QUESTIONS[-1])[2], opening], self.tokens)
        return end if asked != not_asked and opening[len(end) :].strip() else ""

    def stripped(self, marker: str) -> str:
        """Without spaces around it, and without the end-of-sequence token before it, which closes a response itself."""
        eos = re.escape(self._tokenizer.eos_token or " ")
        return re.sub(rf"\A(?:[ \t]|{eos})+|[ \t]+\Z", "", marker)

    def is_learnt(self, text: str, instruction: str, response: str) -> bool:
        """Whether these markers learn the answers of `text`, and none of its questions."""
        try:
            markers = Markers(self._tokenizer, response, instruction)
        except UserError:
            return False
        ids = np.array(_tokenise(self._tokenizer, text), dtype=np.int32)
        supervised = [self._tokenizer.decode(ids[first:stop].tolist()) for first, stop in markers.spans(ids)]
        return len(supervised) == len(_ANSWERS) and all(
            answer in words and not any(question in words for question in _QUESTIONS)
            for answer, words in zip(_ANSWERS, supervised, strict=True)
        )

    def refuse(self, why: str) -> UserError:
        return UserError(
            f"data.response_part is auto, and the chat template of {self._tokenizer.name_or_path!r} does not tell "
            f"what opens a turn: {why}. Give both data.instruction_part and data.response_part, as they stand in the "
            "rows, such as '<|im_start|>user\\n' and '<|im_start|>assistant\\n'."
        )


def _shared_start(texts: Iterable[str], tokens: str) -> str:
    """What all begin with, in whole words, whitespaces and special tokens."""
    return "".join(commonprefix([re.split(rf"({tokens}|\s+)", text) for text in texts]))


def _shared_end(texts: Iterable[str], tokens: str) -> str:
    parts = [re.split(rf"({tokens}|\s+)", text)[::-1] for text in texts]
    return "".join(commonprefix(parts)[::-1])
