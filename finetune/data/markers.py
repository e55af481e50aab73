"""Which tokens of a plain text are learnt, told from the markers that open its turns.

The rule of Unsloth's `train_on_responses_only`, so that a text gets the labels that it had in a notebook: a response
goes from behind a response marker to the end-of-sequence token (learnt, too), or to what opens the next turn (not
learnt), or to the end of the text. Here the rule is applied to the whole text, and a text that is too long is cut
afterwards, so that a marker that the cut would halve is never learnt.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import numpy as np

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
    """The labels of tokenised texts.

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
        """int32 [length]: the ids where they are learnt, else `ignore`."""
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
        raise UserError(f"{key} is {text!r}, which is no token to {tokenizer.name_or_path!r}; give another marker")
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
