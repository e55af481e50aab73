"""Where the reasoning at the start of an assistant turn ends, for masking it from the loss."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from finetune.data.formats import Message, RowError

# Fields of a message for its reasoning: of Qwen3 and DeepSeek, of vLLM and OpenRouter, of gpt-oss.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# The tags of reasoning that is part of the content, or that a template writes around nothing.
OPEN, CLOSE = "<think>", "</think>"

_PROBE, _ANSWER = "zqx0xqz", "zqx1xqz"  # stand for the reasoning and the answer
_TAG_AT_END = re.compile(r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])\Z")
END_ALONE = re.compile(rf"(?<=\n){CLOSE}|{CLOSE}(?=\n)")
_LOOK_BACK = 256  # characters before a turn in which its prompt may open the reasoning


@dataclass(frozen=True, slots=True)
class _Tags:
    opening: str
    closing: str


class Reasoning:
    """Finds the reasoning in rendered assistant turns.

    Args:
        render: gives the text of messages, or raises RowError.
        token: regular expression that matches one added token of the tokenizer.
    """

    def __init__(self, render: Callable[[list[Message]], str], token: str) -> None:
        tags = {field: _infer_tags(field, render, token) for field in REASONING_FIELDS}
        self._tags = {field: found for field, found in tags.items() if found is not None}

    def end(self, message: Message, text: str, start: int, end: int) -> int:
        """Where the reasoning in the turn [start, end) of `text` ends, after its closing tag; `start` without one."""
        for field, tags in self._tags.items():
            if isinstance(reasoning := message.get(field), str) and reasoning.strip():
                at = _find_after(reasoning.strip(), tags.opening, text, start, end)
                if at is not None:
                    closing = text.find(tags.closing, at, end)
                    return _after_blocks(text, at if closing < 0 else closing + len(tags.closing), end)
        content = message.get("content") or ""
        opened = text[max(0, start - _LOOK_BACK) : start].rstrip().endswith(OPEN)
        # A template may write something between the start of a turn and its content (gpt-oss: the channel).
        first = text.find(OPEN, start, end) if content.lstrip().startswith(OPEN) and not opened else start
        if (after := _after_blocks(text, max(first, start), end, opened=opened)) > max(first, start):
            return after
        # The prompt that was answered may have opened it: a closing tag with a line of its own ends it.
        ends = list(END_ALONE.finditer(text, start, end)) if CLOSE in content else []
        return ends[-1].end() if ends else start


def _after_blocks(text: str, start: int, end: int, *, opened: bool = False) -> int:
    """Where the blocks of reasoning end that begin here, or before (`opened`). There may be two: Qwen3.8's template
    writes an empty one before that of the content. Reasoning that never ends is all of the turn."""
    while opened or text[start:end].lstrip().startswith(OPEN):
        closing, opened = text.find(CLOSE, start, end), False
        start = end if closing < 0 else closing + len(CLOSE)
    return start


def _infer_tags(field: str, render: Callable[[list[Message]], str], token: str) -> _Tags | None:
    """How the template encloses this field of a message, or None if it does not render it before the answer. Gemma 4
    renders it only before tool calls."""
    question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": _ANSWER, field: _PROBE}
    for calls in ({}, {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}):
        with contextlib.suppress(RowError):
            if tags := _tags_in(render([question, answer | calls]), token):
                return tags
    return None


def _tags_in(text: str, token: str) -> _Tags | None:
    before, _, rest = text.partition(_PROBE)
    between, answer, _ = rest.partition(_ANSWER)
    before = before.rstrip()
    if not answer or not before:
        return None
    opening = _TAG_AT_END.search(before)
    closing = re.search(rf"</[^<>\s]+>|\[/[^\[\]\s]+\]|{token}", between)
    return _Tags(
        opening.group() if opening else before.split()[-1],
        closing.group() if closing else between.rstrip(),
    )


def _find_after(part: str, opening: str, text: str, start: int, end: int) -> int | None:
    """Where `part` ends in text[start:end], at its first occurrence that directly follows `opening`."""
    at = text.find(part, start, end)
    while at >= 0:
        if text[max(0, at - _LOOK_BACK) : at].rstrip().endswith(opening):
            return at + len(part)
        at = text.find(part, at + 1, end)
    return None
