"""What of a conversation a chat template leaves out: thinking, tool calls, tools, names, whole messages."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from finetune.data.formats import Conversation, Message, RowError
from finetune.data.templates.reasoning import CLOSE, OPEN, REASONING_FIELDS
from finetune.runtime.types import JsonObject

Render = Callable[[list[Message], list[JsonObject] | None], str]

_MARK = re.compile("zqx[0-9]+xqz")
_MAX_STRUCTURES = 4096  # bounds memory for files in which nearly every row has another structure


class DroppedByTemplate:
    """Notes about the parts of rows that the template leaves out.

    What a template renders depends on the structure of a row: the roles, and which of its messages have thinking, tool
    calls or a name. A conversation of the same structure is rendered once, with a placeholder for each part; the
    placeholders that are missing from the text are the parts that the template leaves out in every such row.
    """

    def __init__(self) -> None:
        self._notes: dict[Any, tuple[str, ...]] = {}

    def notes(self, row: Conversation, render: Render) -> tuple[str, ...]:
        """One sentence for each kind of part that the template leaves out of this row."""
        structure = (tuple(map(_structure, row.messages)), len(row.tools or ()))
        if structure not in self._notes:
            if len(self._notes) >= _MAX_STRUCTURES:
                self._notes.clear()
            self._notes[structure] = _find_dropped(row, render)
        return self._notes[structure]


def _structure(message: Message) -> Any:
    thinks = message["role"] == "assistant" and CLOSE in (message.get("content") or "")
    if len(message) == 2 and not thinks:
        return message["role"]
    calls = len(message.get("tool_calls") or ())
    return (message["role"], thinks, message.get("content") is None, calls, *sorted(message))


def _find_dropped(row: Conversation, render: Render) -> tuple[str, ...]:
    # One copy of each: a message that is in the row twice needs two placeholders.
    messages = [copy.deepcopy(message) for message in row.messages]
    tools = None if row.tools is None else [copy.deepcopy(tool) for tool in row.tools]
    parts: dict[str, str] = {}  # placeholder -> what it stands for

    def placeholder(what: str) -> str:
        mark = f"zqx{len(parts)}xqz"  # letters and digits, which no escaping changes
        parts[mark] = what
        return mark

    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    for index, message in enumerate(messages):
        _replace_parts(message, placeholder, "the last turn" if index == last else "earlier turns")
    for tool in tools or ():
        _replace_name(tool, placeholder, "the descriptions of the tools")
    try:
        text = render(messages, tools)
    except RowError:
        return ()  # the template refuses the placeholders, so nothing is known
    present = set(_MARK.findall(text))
    missing = dict.fromkeys(what for mark, what in parts.items() if mark not in present)
    return tuple(f"the chat template leaves out {what}" for what in missing)


def _replace_parts(message: Message, placeholder: Callable[[str], str], turn: str) -> None:
    """Replace the parts of a message by placeholders, in place."""
    role = message["role"]
    whole = "the system message" if role in ("system", "developer") else f"messages of the role {role}"
    if isinstance(content := message.get("content"), str):
        message["content"] = placeholder(whole)
        if role == "assistant" and CLOSE in content:
            opening = f"{OPEN}\n" if OPEN in content else ""
            message["content"] = f"{opening}{placeholder(f'the thinking of {turn}')}\n{CLOSE}\n\n{message['content']}"
    for field in REASONING_FIELDS:
        if isinstance(message.get(field), str):
            message[field] = placeholder(f"the thinking of {turn}" if turn == "earlier turns" else f"{field} of {turn}")
    for call in message.get("tool_calls") or ():
        _replace_name(call, placeholder, "tool calls")
    if isinstance(message.get("name"), str):
        message["name"] = placeholder(f"the name of {role} messages")


def _replace_name(entry: JsonObject, placeholder: Callable[[str], str], what: str) -> None:
    """Replace the name of a tool, or of the tool that a call is for."""
    function = entry.get("function", entry)
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        function["name"] = placeholder(what)
