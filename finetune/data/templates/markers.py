"""Supervise the responses in plain text, found by the markers that start its turns.

The rule is that of Unsloth's `train_on_responses_only`, so that a text gets the same labels as in a notebook: a
response begins after a response marker and ends with the end-of-sequence token (supervised), before the start of the
next turn, or at the end of the text. The rule is applied to the whole text before it is truncated, so that a marker cut
in half is never supervised.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from os.path import commonprefix

import numpy as np
from jinja2 import TemplateError

from finetune.data import IGNORE_INDEX
from finetune.data.templates.render import render
from finetune.data.templates.spans import added_token_pattern
from finetune.errors import UserError
from finetune.runtime.types import Tokenizer

# Characters that, next to a marker, may merge with its outer tokens: some tokenizers merge "user" + "s", others do not.
_NEIGHBOURS = "aA1" + string.punctuation


@dataclass(frozen=True, kw_only=True, slots=True)
class _Marker:
    """Token ids of a marker: `core` always occurs, `left` and `right` only if adjacent text did not merge with them."""

    core: tuple[int, ...]
    left: tuple[int, ...] = ()
    right: tuple[int, ...] = ()

    def occurs(self, ids: np.ndarray, index: int) -> bool:
        """Whether the core begins at `index`."""
        return _occurs(self.core, ids, index)

    def end(self, ids: np.ndarray, index: int) -> int:
        """End of the marker whose core begins at `index`."""
        index += len(self.core)
        for token in self.right:
            if index == len(ids) or ids[index] != token:
                break
            index += 1
        return index

    def start(self, ids: np.ndarray, index: int) -> int:
        """Start of the marker whose core begins at `index`."""
        for token in reversed(self.left):
            if index == 0 or ids[index - 1] != token:
                break
            index -= 1
        return index


class Markers:
    """Finds the responses in tokenized texts and labels them.

    Args:
        response: text that starts a supervised turn.
        instruction: text that starts a masked turn; None if the end-of-sequence token ends every response.
        last_only: supervise only the last response.

    Raises:
        UserError: a marker has no tokens, or both markers have the same.
    """

    def __init__(
        self, tokenizer: Tokenizer, response: str, instruction: str | None = None, *, last_only: bool = False
    ) -> None:
        self._response = _marker(tokenizer, response, "data.response_part")
        self._instruction = None if instruction is None else _marker(tokenizer, instruction, "data.instruction_part")
        self._opening: tuple[int, ...] = ()  # start of a turn of any role
        if self._instruction is not None:
            self._response, self._instruction = _disambiguated(self._response, self._instruction)
            if self._response.core == self._instruction.core:
                raise UserError(
                    f"data.instruction_part {instruction!r} and data.response_part {response!r} are the same tokens in "
                    f"the tokenizer {tokenizer.name_or_path!r}. Set two different markers."
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
        start: int | None = None  # of the current response
        resume = 0
        for index in np.flatnonzero(np.isin(ids, self._events)).tolist():
            if index < resume:
                continue
            if start is not None:
                if ids[index] == self._eos:
                    found.append((start, index + 1))
                    start = None
                    continue
                opens = bool(self._opening) and _occurs(self._opening, ids, index)
                if opens or ids[index] == self._bos or self._response.occurs(ids, index):
                    found.append((start, index))
                    start = None
                elif self._instruction is not None and self._instruction.occurs(ids, index):
                    found.append((start, max(start, self._instruction.start(ids, index))))
                    start, resume = None, self._instruction.end(ids, index)
                    continue
            if start is None and self._response.occurs(ids, index):
                start = resume = self._response.end(ids, index)
        if start is not None and start < len(ids):
            found.append((start, len(ids)))
        return found[-1:] if self._last_only else found

    def labels(self, ids: np.ndarray) -> np.ndarray:
        """int32 [length]: the id of each supervised token, IGNORE_INDEX for the others."""
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
        for first, stop in self.spans(ids):
            labels[first:stop] = ids[first:stop]
        return labels


def _occurs(tokens: Sequence[int], ids: np.ndarray, index: int) -> bool:
    return tuple(ids[index : index + len(tokens)].tolist()) == tuple(tokens)


def _marker(tokenizer: Tokenizer, text: str, key: str) -> _Marker:
    """The marker's tokens in this tokenizer.

    The outer tokens may depend on the adjacent text. They become optional, but only if a special token remains in the
    core: otherwise "Q:" would shrink to "Q", which occurs in any text.
    """
    ids = _tokenize(tokenizer, text)
    if not ids:
        raise UserError(
            f"{key} is {text!r}, which tokenizes to nothing with {tokenizer.name_or_path!r}. Set another marker."
        )
    start, stop = 0, len(ids)
    for neighbour in _NEIGHBOURS:
        stop = min(stop, len(commonprefix([ids, _tokenize(tokenizer, text + neighbour)])))
        before = _tokenize(tokenizer, neighbour + text)
        start = max(start, len(ids) - len(commonprefix([ids[::-1], before[::-1]])))
    added = tokenizer.added_tokens_decoder
    if any(token in added and added[token].content.strip() for token in ids[start:stop]):
        return _Marker(core=tuple(ids[start:stop]), left=tuple(ids[:start]), right=tuple(ids[stop:]))
    return _Marker(core=tuple(ids))


def _disambiguated(one: _Marker, other: _Marker) -> tuple[_Marker, _Marker]:
    """The two markers, with `right` made part of the core if one would otherwise match wherever the other does."""
    if one.right and one.core == other.core[: len(one.core)]:
        one = _Marker(core=one.core + one.right, left=one.left)
    if other.right and other.core == one.core[: len(other.core)]:
        other = _Marker(core=other.core + other.right, left=other.left)
    return one, other


def _opening(tokenizer: Tokenizer, one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The common prefix of both markers if it consists of special tokens, which then start turns of every role.
    Otherwise empty: plain text may also occur inside a response."""
    shared = commonprefix([one, other])
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}
    visible = any(token in added and added[token].content.strip() for token in shared)
    return tuple(shared) if visible and all(token in special for token in shared) else ()


def _tokenize(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# --- the markers of a chat template -----------------------------------------------------------------------------------

# Contents of the probe conversation: plain words that any tokenizer can encode and no template looks for.
_QUESTIONS = ("Quorvix one", "Quorvix two", "Quorvix three")
_ANSWERS = ("Zelmund one", "Zelmund two", "Zelmund three")
_THOUGHTS = ("Wexlorn one", "Wexlorn two", "Wexlorn three")


def derive_markers(tokenizer: Tokenizer, template: str | None) -> tuple[str, str]:
    """(instruction, response): the text that a chat template writes before user and assistant contents.

    Derived from a rendered conversation of three exchanges. Text that ends the previous turn is removed, as is text
    that does not start every assistant turn (an empty thinking block). As a check, the markers must then supervise the
    three answers of this conversation and none of its questions.

    Raises:
        UserError: there is no template, it refuses the conversation, or no markers can be derived.
    """
    probe = _Probe(tokenizer, template)
    text = probe.render(_messages(_ANSWERS))
    before_answers, before_questions, tail = probe.between(text)
    response = _shared([*before_answers, *probe.before_thoughts()], probe.tokens)
    candidates = [response, *before_questions]
    end = probe.end_of_question(response)
    response = response[len(end) :]
    instruction = _shared(before_questions, probe.tokens, -1)
    # gpt-oss ends earlier answers like questions, and the last one differently: only the last end is supervised.
    if tail.startswith(end):
        instruction = instruction.removeprefix(end)
    instruction, response = probe.stripped(instruction), probe.stripped(response)
    # Without special tokens, SentencePiece tokenizes a marker differently after different characters.
    for one, other in product(("", " ", "\n"), repeat=2):
        if instruction and response and probe.supervises_answers(text, one + instruction, other + response):
            return one + instruction, other + response
    raise probe.refusal(f"an answer cannot be distinguished from a question or its surroundings in {candidates}")


def _messages(answers: Sequence[str]) -> list[dict[str, str]]:
    messages = []
    for question, answer in zip(_QUESTIONS, answers, strict=True):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


class _Probe:
    """Renders probe conversations with one template and compares their parts."""

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        if template is None:
            raise self.refusal("there is none")
        self.tokens = added_token_pattern(tokenizer)

    def render(self, messages: list[dict[str, str]], *, prompt: bool = False) -> str:
        assert self._template is not None
        special = dict(self._tokenizer.special_tokens_map)
        try:
            return render(self._template, messages, add_generation_prompt=prompt, **special)[0]
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise self.refusal(f"it refuses a conversation of {len(messages)} messages: {error}") from error

    def between(self, text: str) -> tuple[list[str], list[str], str]:
        """The text before each answer, before each question but the first, and after the last answer."""
        contents = [message["content"] for message in _messages(_ANSWERS)]
        if re.findall("|".join(contents), text) != contents:
            raise self.refusal("it does not write each message once and in order")
        _, *gaps = re.split("|".join(contents), text)
        return gaps[:-1:2], gaps[1:-1:2], gaps[-1]

    def before_thoughts(self) -> list[str]:
        """The text before answers that begin with a thought; empty if the template does not support thoughts."""
        pairs = zip(_THOUGHTS, _ANSWERS, strict=True)
        answers = [f"<think>\n{thought}\n</think>\n\n{answer}" for thought, answer in pairs]
        try:
            gaps, _, _ = self.between(self.render(_messages(answers)))
        except UserError:
            return []
        return [re.split(rf"(?:<think>\s*)?{thought}", gap)[0] for thought, gap in zip(_THOUGHTS, gaps, strict=True)]

    def end_of_question(self, opening: str) -> str:
        """The part of `opening` that ends the question: what is rendered even without the generation prompt. Empty if
        the template has no generation prompt (Mistral: the end of the question starts the answer)."""
        prompted, unprompted = (self.render(_messages(_ANSWERS)[:-1], prompt=prompt) for prompt in (True, False))
        end = _shared([unprompted.rpartition(_QUESTIONS[-1])[2], opening], self.tokens)
        return end if prompted != unprompted and opening[len(end) :].strip() else ""

    def stripped(self, marker: str) -> str:
        """The marker without surrounding spaces and without a leading EOS, which itself ends a response."""
        eos = re.escape(self._tokenizer.eos_token or " ")
        return re.sub(rf"\A(?:[ \t]|{eos})+|[ \t]+\Z", "", marker)

    def supervises_answers(self, text: str, instruction: str, response: str) -> bool:
        """Whether these markers supervise all answers of `text` and none of its questions."""
        try:
            markers = Markers(self._tokenizer, response, instruction)
        except UserError:
            return False
        ids = np.array(_tokenize(self._tokenizer, text), dtype=np.int32)
        supervised = [self._tokenizer.decode(ids[first:stop].tolist()) for first, stop in markers.spans(ids)]
        return len(supervised) == len(_ANSWERS) and all(
            answer in span and not any(question in span for question in _QUESTIONS)
            for answer, span in zip(_ANSWERS, supervised, strict=True)
        )

    def refusal(self, why: str) -> UserError:
        return UserError(
            f"data.response_part is auto, but no markers can be derived from the chat template of "
            f"{self._tokenizer.name_or_path!r}: {why}. Set data.instruction_part and data.response_part as they occur "
            "in the rows, such as '<|im_start|>user\\n' and '<|im_start|>assistant\\n'."
        )


def _shared(texts: Iterable[str], tokens: str, step: int = 1) -> str:
    """The common prefix of all texts, or with a step of -1 their common suffix, cut only between words, whitespace and
    special tokens."""
    parts = [re.split(rf"({tokens}|\s+)", text)[::step] for text in texts]
    return "".join(commonprefix(parts)[::step])
