"""Detect which row format a file has, in TRL's order, and convert its rows to messages, text or token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np

from finetune.config.load import dump_setting
from finetune.data import IGNORE_INDEX
from finetune.data.arrow import Struct
from finetune.errors import UserError, cut, listed
from finetune.runtime.types import JsonObject

Message = JsonObject

ROLES = ("system", "developer", "user", "assistant", "tool")
TRAINED_ROLES = ("assistant",)  # the messages that are supervised by default

# ShareGPT files name the speakers in several ways. Other names are rejected as unknown roles, never guessed.
_SHAREGPT_ROLES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}

# For each format: the required fields and the optional fields.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("system", "tools", "chat_template_kwargs")),
    "sharegpt": (("conversations",), ("system", "tools", "chat_template_kwargs")),
    "alpaca": (("instruction", "output"), ("input", "system", "history", "chat_template_kwargs")),
    "prompt_completion": (("prompt", "completion"), ("system", "tools", "chat_template_kwargs")),
    "text": (("text",), ()),
    "tokenized": (("input_ids",), ("labels", "completion_mask", "assistant_masks", "seq_lengths")),
}
FORMATS = tuple(_FIELDS)
_ALL_FIELDS = {field for required, optional in _FIELDS.values() for field in required + optional}
MASKS = ("labels", "completion_mask", "assistant_masks")  # of rows of token ids
_OPTIONAL = {field for _, optional in _FIELDS.values() for field in optional}
# Formats of TRL in which it reads no column for the system prompt.
_WITHOUT_SYSTEM_IN_TRL = ("messages", "prompt_completion")

# The formats that TRL's SFTTrainer knows, in the order in which it looks for their columns; then the other ones. A list
# column under the other format's usual name (None: either name) is not TRL's, so it comes later.
_ORDER = (
    ("tokenized", "input_ids"),
    ("prompt_completion", "prompt"),
    ("sharegpt", "conversations"),
    ("messages", "messages"),
    ("text", "text"),
    ("messages", None),
    ("sharegpt", None),
    ("alpaca", "instruction"),
)

# Files use both names for both list formats; the keys of the items decide (role/content or from/value).
_LIST_COLUMNS = ("messages", "conversations")

# The two prompts of Stanford Alpaca (https://github.com/tatsu-lab/stanford_alpaca), as in the `text` column of the
# published dataset, for tokenizers without a chat template.
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


# Names of columns in other people's files, the likeliest first. They are suggested, never taken.
_ASKED = ("question", "prompt", "instruction", "query", "problem", "user", "human", "input", "source")
_ANSWERED = ("answer", "response", "completion", "output", "reply", "assistant", "solution", "target", "bot", "gpt")
_WRITTEN = ("text", "content", "body", "document", "article", "passage", "story")
_ROLES_OF_COLUMNS = {
    **dict.fromkeys(("instruction", "prompt"), _ASKED),
    **dict.fromkeys(("output", "completion"), _ANSWERED),
    "text": _WRITTEN,
}


class RowError(Exception):
    """A row that cannot be used. `reason` is a slug that the ledger counts, `detail` describes the fault of this row.

    Reasons raised here: missing_field, empty, unknown_role, roles_out_of_order, no_assistant, not_text, wrong_type,
    wrong_length, invalid_weight.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = cut(detail, 300)

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A row format, its columns (field of the format -> column of the file), and the evidence for choosing it.

    columns: of the required fields, of optional fields that the first rows have, and of all that are mapped. Each row
             is asked for the other optional fields, because rows of JSON may have columns that the first ones lack.
    of_text: prompts and completions are strings, which no chat template renders. `of` says so of one row.
    as_trl:  optional columns that TRL does not read are not read.
    """

    name: str
    columns: dict[str, str]
    evidence: str
    of_text: bool = False
    as_trl: bool = False

    def column(self, field: str) -> str:
        """The column of a field."""
        return self.columns.get(field, field)

    def of(self, row: Mapping[str, object]) -> Format:
        """The format of one row: prompts may be strings in some rows and messages in others."""
        prompt = row.get(self.column("prompt"))
        of_text = isinstance(prompt, str)
        if self.name != "prompt_completion" or of_text == self.of_text or not isinstance(prompt, str | list):
            return self
        was, now = ("of messages", "of text")[:: 1 if of_text else -1]
        return replace(self, of_text=of_text, evidence=self.evidence.replace(was, now, 1))

    def get(self, row: Mapping[str, object], field: str) -> Any:
        """The value of an optional field in a row, None if the row has none."""
        if field == "system" and self.as_trl and self.name in _WITHOUT_SYSTEM_IN_TRL:
            return None
        return row.get(self.column(field))

    def unread(self, row: Mapping[str, object], *, has_template: bool) -> set[str]:
        """The columns in which this row has a value that `to_conversation` does not read."""
        required, optional = _FIELDS[self.name]
        if self.of(row).of_text:
            optional = ()
        elif self.name == "tokenized":
            optional += ("prompt", "completion")  # they decide what a completion_mask means
        elif self.name == "alpaca" and not has_template:
            optional = ("input", "system", "history")
        elif self.as_trl and self.name in _WITHOUT_SYSTEM_IN_TRL:
            optional = tuple(field for field in optional if field != "system")
        found = row.keys() - {self.column(field) for field in required + optional}
        return {column for column in found if _has_value(row[column])}


def _has_value(value: object) -> bool:
    return bool(value) if isinstance(value, str | list | dict) else value is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages for a chat template. Messages of the trained roles at index `supervised_from` or later are supervised;
    those before it are the prompt of a prompt/completion row.

    variables:  values for the chat template, from the row's `chat_template_kwargs`
    supervised: the row's own mark for each message, which overrides its role and index: True, False, or None for a
                message without a mark. None if no message has one.
    notes:      what of the row is not in the messages
    """

    messages: list[Message]
    tools: list[JsonObject] | None = None
    supervised_from: int = 0
    variables: JsonObject | None = None
    supervised: tuple[bool | None, ...] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Plain text. Its first `supervised_from` characters are the prompt; None if it has no prompt."""

    text: str
    supervised_from: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """Token ids made by someone else, int32 [length].

    labels: int32 [length] with IGNORE_INDEX for unsupervised tokens, after the row's assistant_masks.
    completion_mask: bool [length]; applies only with completion-only loss.
    by_default: completion-only loss is on unless it is set to False, because the rows also have prompts.
    lengths: tokens of each document that the row packs; one number if it is a single document.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    completion_mask: np.ndarray | None
    by_default: bool
    lengths: list[int]


Row = Conversation | Text | Tokens


# --- detection ------------------------------------------------------------------------------------------------------


def detect(
    columns: Iterable[str],
    sample_rows: Sequence[Mapping[str, object]],
    wanted: str = "auto",
    mapping: Mapping[str, str] | None = None,
    *,
    as_trl: bool = False,
) -> Format:
    """Detect the format of rows with these columns.

    Args:
        wanted: one of FORMATS, or "auto".
        mapping: field of the format -> column of the file; only formats that have these fields are considered. Columns
            of optional fields may be in later rows only: see `check_mapping`.
        as_trl: read no optional column that TRL does not read.

    If several formats match, the first one in TRL's order is chosen.

    Raises:
        UserError: an unknown format, field or column; or no format matches (with the columns each needs).
    """
    columns, mapping = list(columns), dict(mapping or {})
    present = f"the columns are {listed(columns) or 'none'}"
    candidates = _candidates(columns, wanted, mapping)
    known = [(name, column) for name, column in _ORDER if name in candidates]

    def matches(mapping: dict[str, str]) -> list[Format]:
        return [match for key in known if (match := _match(*key, columns, sample_rows, mapping, wanted))]

    if found := matches(mapping):
        later = ", ".join(dict.fromkeys(match.name for match in found if match.name != found[0].name))
        evidence = f"{found[0].evidence}; before {later}, as in TRL" if later else found[0].evidence
        return replace(found[0], evidence=evidence, as_trl=as_trl)
    for key in known if sample_rows else ():
        if (near := _columns_of(*key, columns, mapping)) is not None:
            raise UserError(_wrong_type(key[0], near, sample_rows[0]))
    needs = "; ".join(f"{name} needs {_needs(name)}" for name in candidates)
    if {"chosen", "rejected"} <= set(columns):
        raise UserError(
            f"no row format matches: {present}. This is preference data (DPO, ORPO), which supervised fine-tuning does "
            "not use. To train on the chosen answers, write them to a file of messages or of prompts and completions."
        )
    guess = suggested(columns, sample_rows)
    if guess is not None and wanted == "prompt_completion":
        guess = {{"instruction": "prompt", "output": "completion"}.get(field, field): c for field, c in guess.items()}
    if guess is not None and any(match.columns.items() >= guess.items() for match in matches(guess)):
        template = " They are then put into the model's chat template." if "instruction" in guess else ""
        raise UserError(
            f"no row format matches: {present}. If these are what their names say, set {_as_setting(guess)}.{template} "
            "Other formats: docs/data.md."
        )
    raise UserError(
        f"no row format matches: {present}; {needs}. Map your columns with data.columns: {{field: column}}, such as "
        "{instruction: COLUMN, output: COLUMN} for questions and answers in the model's chat template."
    )


def suggested(columns: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """The mapping that reads rows of no known format, as far as the names and values of their columns show one."""
    for column in columns:
        for field, key in (("messages", "role"), ("conversations", "from")):
            if any(_is_list_of(row.get(column), key) for row in rows):
                return {field: column}
    texts = [column for column in columns if any(isinstance(row.get(column), str) for row in rows)]
    asked, answered, written = (_likeliest(texts, names) for names in (_ASKED, _ANSWERED, _WRITTEN))
    if asked and answered and asked != answered:
        return {"instruction": asked, "output": answered}
    if written or len(texts) == 1:
        return {"text": written or texts[0]}
    return {"instruction": texts[0], "output": texts[1]} if len(texts) == 2 else None


def _likeliest(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """The first column that has one of these names; else that has one as a word, such as `user_question`."""
    for name in names:
        for column in columns:
            if column.lower() == name:
                return column
    for name in names:
        for column in columns:
            if name in re.findall("[a-z]+", re.sub("([a-z])([A-Z])", r"\1 \2", column).lower()):
                return column
    return None


def _as_setting(mapping: Mapping[str, str]) -> str:
    return f"data.{dump_setting('columns', dict(mapping))}"


def check_mapping(mapping: Mapping[str, str], columns: Iterable[str]) -> None:
    """Check that every mapped column is one of the columns of all rows. Raises UserError."""
    columns = list(columns)
    if absent := [column for column in mapping.values() if column not in columns]:
        raise _absent_columns(absent, mapping, columns)


def _absent_columns(absent: list[str], mapping: Mapping[str, str], columns: list[str]) -> UserError:
    """What is wrong with mapped columns that no row has, and the mapping that was meant."""
    present = f"the columns are {listed(columns) or 'none'}"
    is_reversed = any(column in _ALL_FIELDS and field in columns for field, column in mapping.items())
    meant, set_it = _meant(mapping, columns), "It is {field: column}: set" if is_reversed else "Set"
    remedy = "Correct them" if meant is None else f"{set_it} {_as_setting(meant)}"
    return UserError(f"data.columns names columns that the rows lack: {listed(absent)}; {present}. {remedy}.")


def _meant(mapping: Mapping[str, str], columns: list[str]) -> dict[str, str] | None:
    """The mapping with its columns corrected: written the wrong way round, misspelled, or known by their names."""
    found: dict[str, str] = {}
    for field, column in mapping.items():
        if column in columns:
            found[field] = column
        elif column in _ALL_FIELDS and field in columns:
            found[column] = field
        else:
            near = get_close_matches(column, columns, n=1)
            known = _likeliest(columns, _ROLES_OF_COLUMNS.get(field, ()))
            if not near and known is None:
                return None
            found[field] = near[0] if near else str(known)
    return found if len(found) == len(mapping) == len(set(found.values())) else None


def text_column(columns: Iterable[str], field: str, wanted: str = "auto") -> dict[str, str]:
    """The mapping of columns for TRL's `dataset_text_field`: it counts only if TRL reads text, so not alongside
    messages, prompts or token ids.

    Args:
        field: the column.
        wanted: one of FORMATS, or "auto".
    """
    columns = set(columns)
    if field == "text" or field not in columns or wanted not in ("auto", "text"):
        return {}
    first = {"input_ids", "prompt", "messages", "conversations"} if wanted == "auto" else set()
    return {} if first & columns else {"text": field}


def describe(
    format: Format,
    *,
    has_template: bool,
    assistant_only_loss: bool,
    completion_only_loss: bool | None,
    last_turn_only: bool = False,
    markers: bool = False,
) -> str:
    """How rows of this format are read, why, and which tokens are supervised with these settings, in one line."""
    name = format.name.replace("_", "/")
    completion = completion_only_loss is not False
    turns = f"the assistant's {'last turn' if last_turn_only else 'turns'}"
    if format.name == "tokenized":
        masks = [f for f in ("labels", "assistant_masks") if f in format.columns][:1]
        by_default = "prompt" in format.columns if completion_only_loss is None else completion_only_loss
        if "completion_mask" in format.columns and by_default and masks != ["labels"]:
            masks.insert(0, "completion_mask")
        on = f"the tokens of {' and '.join(masks)}" if masks else "all tokens"
    elif format.name == "text":
        on = "the responses after the markers" if markers else "all tokens"
    elif format.of_text or (format.name == "alpaca" and not has_template):
        on = "the completion" if completion else "all tokens"
    elif format.name == "prompt_completion" and completion:
        on = f"{turns} in the completion" if assistant_only_loss else "the completion"
    else:
        on = turns if assistant_only_loss else "all tokens"
    return f"{name} ({format.evidence}), loss on {on}"


def _candidates(columns: list[str], wanted: str, mapping: dict[str, str]) -> list[str]:
    if wanted != "auto" and wanted not in _FIELDS:
        near = get_close_matches(wanted, FORMATS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UserError(f"data.format is unknown: {wanted!r}{hint}. Set it to auto, {', '.join(FORMATS)}.")
    required = (column for field, column in mapping.items() if field not in _OPTIONAL)
    if absent := [column for column in required if column not in columns]:
        raise _absent_columns(absent, mapping, columns)
    names = list(FORMATS) if wanted == "auto" else [wanted]
    fitting = [name for name in names if set(mapping) <= set(_FIELDS[name][0] + _FIELDS[name][1])]
    if not fitting:
        fields = "; ".join(f"{name}: {', '.join(_FIELDS[name][0] + _FIELDS[name][1])}" for name in names)
        raise UserError(
            f"data.columns maps fields that no single format has: {listed(sorted(mapping))}. Choose the fields of "
            f"one format ({fields})."
        )
    return fitting


def _match(
    name: str,
    first: str | None,
    columns: list[str],
    rows: Sequence[Mapping[str, object]],
    mapping: dict[str, str],
    wanted: str,
) -> Format | None:
    """The format with its columns. `first`: as in `_columns_of`."""
    found = _columns_of(name, first, columns, mapping)
    if found is None:
        return None
    evidence = _evidence(name, found, rows)
    if evidence is None and wanted != name and not mapping:
        return None  # the columns exist, but their values have other types
    if name == "tokenized":  # TRL then applies a completion_mask by default
        found |= {f: f for f in ("prompt", "completion") if {"prompt", "completion"} <= set(columns)}
    of_text = name == "prompt_completion" and any(isinstance(row.get(found["prompt"]), str) for row in rows)
    return Format(name=name, columns=found, evidence=evidence or "as configured", of_text=of_text)


def _columns_of(name: str, first: str | None, columns: list[str], mapping: dict[str, str]) -> dict[str, str] | None:
    """The columns of a format's fields; None if a required one is not there. `first`: the name of the first required
    column unless mapped; None: either name."""
    required, optional = _FIELDS[name]
    names = {f: mapping.get(f, f) for f in required + optional}
    if required[0] in _LIST_COLUMNS and required[0] not in mapping:
        names[required[0]] = first or _LIST_COLUMNS[1 - _LIST_COLUMNS.index(required[0])]
    found = {f: names[f] for f in required + optional if names[f] in columns or (f in mapping and f in optional)}
    return found if all(f in found for f in required) else None


def _wrong_type(name: str, columns: dict[str, str], row: Mapping[str, object]) -> str:
    """What is wrong with a row that has the columns of a format, and no values that fit it."""
    required = [columns[f] for f in _FIELDS[name][0]]
    kind, what = str, "text"
    if name in ("messages", "sharegpt"):
        kind, what = dict, f"a list of {'role/content' if name == 'messages' else 'from/value'} objects"
    elif name == "prompt_completion" and isinstance(row.get(required[0]), list):
        kind, what = list, "a list of messages, as the prompt is"
    column = next((column for column in required if not isinstance(row.get(column), kind)), required[-1])
    value = row.get(column)
    given = "null" if value is None else "another list" if isinstance(value, list) and kind is dict else None
    return (
        f"no row has the types of the format {name}: the column {column!r} must be {what}, not "
        f"{given or type(value).__name__}. Convert its values, or map other columns with data.columns: "
        "{field: column}."
    )


def _evidence(name: str, columns: dict[str, str], rows: Sequence[Mapping[str, object]]) -> str | None:
    """The evidence for a format in the sample rows, or None if no row has values of the right types."""
    required = [columns[f] for f in _FIELDS[name][0]]
    named = f"column{'s' if len(required) > 1 else ''} {' and '.join(repr(column) for column in required)}"
    if name == "tokenized":
        return f"{named} of token ids"
    if name in ("messages", "sharegpt"):
        keys = ("role", "content") if name == "messages" else ("from", "value")
        fits = [row for row in rows if _is_list_of(row.get(required[0]), keys[0])]
        return f"{named} has lists of {keys[0]}/{keys[1]} objects" if fits else None
    for kind, what in ((str, "text"), *([(list, "messages")] if name == "prompt_completion" else [])):
        if any(all(isinstance(row.get(column), kind) for column in required) for row in rows):
            return f"{named} of {what}"
    return None


def _is_list_of(value: object, key: str) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and key in item for item in value)


def _needs(name: str) -> str:
    described = {
        "messages": "'messages' (a list of role/content objects)",
        "sharegpt": "'conversations' (a list of from/value objects)",
        "tokenized": "'input_ids' (a list of token ids)",
    }
    return described.get(name) or " and ".join(repr(f) for f in _FIELDS[name][0])


# --- one row --------------------------------------------------------------------------------------------------------


def to_conversation(
    row: Mapping[str, object],
    format: Format,
    *,
    system_prompt: str | None = None,
    has_template: bool = True,
    train_on_roles: Sequence[str] | None = TRAINED_ROLES,
    keep_empty: bool = False,
) -> Row:
    """Convert one row to a conversation; to text if its format has no messages; or to its own token ids.

    Prompts and completions that are strings are joined as they are, as in TRL. Rows of Alpaca's format become
    conversations, or text if there is no chat template. `system_prompt` is added to conversations without a system
    message. A conversation needs a message of one of the roles `train_on_roles`, or one that the row marks to be
    trained, and roles in a sensible order; None asks for neither, since then all of it is trained. Raises RowError if
    the row cannot be used: one with an empty message or text only with `keep_empty`.
    """
    if format.name == "tokenized":
        return _tokens(row, format)
    if format.name == "alpaca":
        return _alpaca(row, format, system_prompt, has_template, keep_empty)
    if format.name == "text" or (format.name == "prompt_completion" and isinstance(_value(row, format, "prompt"), str)):
        if system_prompt:
            raise UserError(
                "data.system_prompt cannot be used with rows of plain text. Remove it, or set another data.format."
            )
        if format.name == "text":
            return Text(text=_string(row, format, "text", keep_empty))
        prompt = str(row[format.columns["prompt"]])
        return Text(text=prompt + _string(row, format, "completion", keep_empty), supervised_from=len(prompt))
    first = {"sharegpt": "conversations", "messages": "messages"}.get(format.name, "prompt")
    items = _list(row, format, first)
    notes = _notes(row, format, items)
    read = _sharegpt if format.name == "sharegpt" else _openai
    messages = _with_system(read(items, keep_empty), _optional_string(row, format, "system") or system_prompt)
    supervised_from = 0
    if format.name == "prompt_completion":
        supervised_from = len(messages)
        items = _list(row, format, "completion")
        completion = _openai(items, keep_empty)
        notes += _null_arguments(items)
        if train_on_roles is not None and not any(message.get("train") for message in messages):
            _check_trained(completion, train_on_roles, " in the completion")
        messages += completion
    if train_on_roles is not None:
        check(messages, train_on_roles)
    marks = tuple(message.pop("train", None) for message in messages)  # a chat template may render any key
    return Conversation(
        messages=messages,
        tools=_tools(row, format),
        supervised_from=supervised_from,
        variables=_variables(row, format),
        supervised=marks if any(mark is not None for mark in marks) else None,
        notes=tuple(dict.fromkeys(notes)),
    )


def _notes(row: Mapping[str, object], format: Format, items: list) -> list[str]:
    """What of a conversation is not in its messages."""
    notes = _null_arguments(items)
    first = items[0] if isinstance(items[0], dict) else {}
    given = format.get(row, "system")
    if given and (first.get("role") or first.get("from")) in ("system", "developer"):
        if given not in (first.get("content"), first.get("value")):
            column = format.column("system")
            notes.append(f"the column {column!r} is not read: the messages begin with a system message")
    if format.name == "sharegpt":
        keys = {key for item in items if isinstance(item, dict) for key in item if item[key] is not None}
        if unread := sorted(keys - {"from", "value", "train", "weight"}):
            notes.append(f"keys of from/value messages that are not read: {listed(map(repr, unread))}")
    return notes


def _null_arguments(items: list) -> list[str]:
    given = [item.get("tool_calls") for item in items if isinstance(item, dict)]
    calls = (call for found in given if isinstance(found, list) for call in found)
    if any(isinstance(call, Struct) and _has_null(call.get("function", call)) for call in calls):
        return ["nulls in the arguments of tool calls are left out: Arrow adds them for keys that a call lacks"]
    return []


def _has_null(function: object) -> bool:
    """Whether an object from Arrow has a null anywhere in its arguments."""
    pending = [function.get("arguments")] if isinstance(function, dict) else []
    while pending:
        value = pending.pop()
        if isinstance(value, Struct):
            if None in value.values():
                return True
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return False


def check(messages: list[Message], train_on_roles: Sequence[str] = TRAINED_ROLES) -> None:
    """Check the order of roles: at least one turn to train on; a system (or developer) message only at the start; a
    user before the first assistant turn; tool results only after an assistant turn or another tool result. Strict
    alternation is left to the chat template. Raises RowError.
    """
    _check_trained(messages, train_on_roles, "")
    before = "start"
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role in ("system", "developer"):
            fits = number == 1
        elif role == "tool":
            fits = before in ("assistant", "tool")
        elif role == "assistant":
            fits = before not in ("start", "system", "developer")
        else:
            fits = True
        if not fits:
            raise RowError("roles_out_of_order", f"message {number} has the role {role!r} after {before!r}")
        before = role


def _alpaca(
    row: Mapping[str, object], format: Format, system_prompt: str | None, has_template: bool, keep_empty: bool
) -> Conversation | Text:
    instruction, given = _string(row, format, "instruction", keep_empty), _optional_string(row, format, "input")
    answer = _string(row, format, "output", keep_empty)
    system = _optional_string(row, format, "system") or system_prompt
    history = _history(row, format, keep_empty)
    if has_template:
        prompt = f"{instruction}\n\n{given}" if given else instruction
        turns = [
            {"role": role, "content": content}
            for pair in [*history, (prompt, answer)]
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]
        return Conversation(messages=_with_system(turns, system), variables=_variables(row, format))
    published = _ALPACA_WITH_INPUT if given else _ALPACA_WITHOUT_INPUT
    plain = "".join(f"{_ALPACA_WITHOUT_INPUT.format(instruction=asked)}{said}\n\n" for asked, said in history)
    plain += published.format(instruction=instruction, input=given)
    plain = f"{system}\n\n{plain}" if system else plain
    return Text(text=plain + answer, supervised_from=len(plain))


def _history(row: Mapping[str, object], format: Format, keep_empty: bool) -> list[tuple[str, str]]:
    """Earlier turns of an Alpaca row: a list of [question, answer], as in LLaMA-Factory, or the list as JSON text."""
    column, value = format.column("history"), _from_json(format.get(row, "history"), format.column("history"))
    if not value:
        return []
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in value
    ):
        raise RowError("wrong_type", f"the column {column!r} must be a list of [question, answer]")
    if not keep_empty and not all(part.strip() for pair in value for part in pair):
        raise RowError("empty", f"the column {column!r} has an empty question or answer; {_KEPT}")
    return [(asked, said) for asked, said in value]


_KEPT = "data.keep_empty: true keeps such rows"


def _check_trained(messages: list[Message], train_on_roles: Sequence[str], where: str) -> None:
    if not any(message["role"] in train_on_roles or message.get("train") for message in messages):
        turn = "assistant turn" if tuple(train_on_roles) == TRAINED_ROLES else f"turn of {', '.join(train_on_roles)}"
        raise RowError("no_assistant", f"no {turn}{where}, so no token is supervised")


def _tokens(row: Mapping[str, object], format: Format) -> Tokens:
    """A row of token ids, with the labels as they are given, or made from assistant_masks."""
    ids = _integers(row, format, "input_ids")
    if not len(ids):
        raise RowError("empty", f"the column {format.columns['input_ids']!r} is an empty list")
    # A null is a gap in the data: to train on all tokens of the row would be a guess.
    given = {f: _integers(row, format, f) for f in (*MASKS, "seq_lengths") if format.column(f) in row}
    for field in MASKS:
        if field in given and len(given[field]) != len(ids):
            counts = f"{len(given[field])} values for {len(ids)} token ids"
            raise RowError("wrong_length", f"the column {format.column(field)!r} has {counts}")
    labels, lengths = given.get("labels"), given.get("seq_lengths", np.array([len(ids)])).tolist()
    if sum(lengths) != len(ids) or min(lengths, default=0) < 1:
        counts = f"lengths that add up to {sum(lengths)} instead of {len(ids)} tokens, or a length below 1"
        raise RowError("wrong_length", f"the column {format.column('seq_lengths')!r} has {counts}")
    if ids.min() < 0 or (labels is not None and labels[labels != IGNORE_INDEX].min(initial=0) < 0):
        raise RowError("wrong_type", f"a token id is negative, or a label is neither a token id nor {IGNORE_INDEX}")
    completion = given["completion_mask"] != 0 if "completion_mask" in given else None
    if labels is None:
        labels = np.where(given.get("assistant_masks", np.ones_like(ids)) != 0, ids, np.int32(IGNORE_INDEX))
    else:
        completion = None  # labels are taken as they are, as in TRL
    by_default = "prompt" in format.columns or {"prompt", "completion"} <= row.keys()
    return Tokens(input_ids=ids, labels=labels, completion_mask=completion, by_default=by_default, lengths=lengths)


def _integers(row: Mapping[str, object], format: Format, name: str) -> np.ndarray:
    value = _value(row, format, name)
    if not isinstance(value, list):
        raise RowError("wrong_type", f"the column {format.column(name)!r} must be a list, not {type(value).__name__}")
    try:
        found = np.asarray(value)
    except (ValueError, OverflowError):  # lists of different lengths
        found = np.empty(0, dtype=object)
    largest = np.iinfo(np.int32).max
    if found.ndim == 1 and (
        not len(value) or (found.dtype.kind in "iub" and -largest < found.min() <= found.max() < largest)
    ):
        return found.astype(np.int32)
    raise RowError("wrong_type", f"the column {format.column(name)!r} must be a list of integers")


def _openai(items: list, keep_empty: bool) -> list[Message]:
    messages = []
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict) or not isinstance(item.get("role"), str):
            raise RowError("missing_field", f"message {number} has no 'role'")
        if item["role"] not in ROLES:
            raise RowError(
                "unknown_role", f"message {number} has the unknown role {item['role']!r}; known: {', '.join(ROLES)}"
            )
        # Arrow gives every message the keys of all messages, with None for those it lacked.
        message = {key: _without_none(value) for key, value in item.items() if value is not None}
        calls = message.get("tool_calls")
        if not calls:
            message.pop("tool_calls", None)
        elif isinstance(calls, list):
            message["tool_calls"] = [_tool_call(call, number) for call in calls]
        else:
            kind = type(calls).__name__
            raise RowError("wrong_type", f"the tool calls of message {number} must be a list, not {kind}")
        message["content"] = _content(message, number, keep_empty)
        _read_marks(message, item, number)
        messages.append(message)
    return messages


def _sharegpt(items: list, keep_empty: bool) -> list[Message]:
    messages = []
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict) or not isinstance(item.get("from"), str):
            raise RowError("missing_field", f"message {number} has no 'from'")
        role = _SHAREGPT_ROLES.get(item["from"].lower())
        if role is None:
            known = ", ".join(_SHAREGPT_ROLES)
            raise RowError("unknown_role", f"message {number} is from {item['from']!r}; known: {known}")
        message = {"role": role, "content": item.get("value")}
        if item.get("train") is not None:
            message["train"] = item["train"]
        message["content"] = _content(message, number, keep_empty)
        _read_marks(message, item, number)
        messages.append(message)
    return messages


def _read_marks(message: Message, item: Mapping[str, object], number: int) -> None:
    """Leave one mark in `message`: `train`, true or false, or none if the role decides.

    axolotl's `train` decides for any role. OpenAI's `weight` is 1 by default, which leaves the decision to the role.
    """
    message.pop("weight", None)
    train, weight = item.get("train"), item.get("weight")
    if train is not None and not isinstance(train, bool):
        raise RowError("wrong_type", f"'train' of message {number} must be true or false, not {train!r}")
    if weight is None:
        return
    if isinstance(weight, str) or weight not in (0, 1):
        raise RowError("invalid_weight", f"message {number} has the weight {weight!r}; only 0 and 1 are supported")
    if train is not None and train != bool(weight):
        raise RowError("invalid_weight", f"message {number} has train: {str(train).lower()} and weight: {weight}")
    if not weight:
        message["train"] = False


def _content(message: Message, number: int, keep_empty: bool) -> str | None:
    content, role = message.get("content"), message["role"]
    if isinstance(content, list):  # OpenAI's list of parts
        content = "".join(_part(part, number) for part in content)
    if content is None:
        if not message.get("tool_calls"):
            raise RowError("missing_field", f"message {number} ({role}) has no content")
        return None  # not "": a template without tool calls then fails instead of rendering an empty turn
    if not isinstance(content, str):
        raise RowError(
            "wrong_type", f"the content of message {number} ({role}) must be text, not {type(content).__name__}"
        )
    # An empty system prompt is meaningful (it replaces a template's default), and so is an empty tool result.
    if not content.strip() and role in ("user", "assistant") and not message.get("tool_calls") and not keep_empty:
        raise RowError("empty", f"message {number} ({role}) is empty; {_KEPT}")
    return content


def _part(part: object, number: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RowError("not_text", f"message {number} has a part of type {kind!r}; only text is supported")


def _tool_call(call: object, number: int) -> JsonObject:
    """A tool call with its arguments as an object, as chat templates expect; OpenAI's files have them as JSON text."""
    if not isinstance(call, dict):
        raise RowError("wrong_type", f"a tool call of message {number} must be an object, not {type(call).__name__}")
    call = {key: value for key, value in call.items() if value is not None}
    function = call.get("function", call)
    if not isinstance(function, dict):
        return call
    function = {key: value for key, value in function.items() if value is not None}
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except json.JSONDecodeError as error:
            raise RowError("wrong_type", f"the tool-call arguments of message {number} are not valid JSON") from error
    return call | {"function": function} if "function" in call else function


def _without_none(value: object) -> Any:
    """The value without the nulls that Arrow added to its objects. A null that somebody wrote means something."""
    if isinstance(value, Struct):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items()}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _from_json(value: object, column: str) -> Any:
    """The value of a column that may hold JSON text, as CSV files do; None for a blank one."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except json.JSONDecodeError as error:
        raise RowError("wrong_type", f"the column {column!r} is not valid JSON") from error


def _tools(row: Mapping[str, object], format: Format) -> list[JsonObject] | None:
    """The tools of a row. None for an empty list, as in TRL: a template may ask only whether tools are none."""
    column = format.column("tools")
    tools = _from_json(format.get(row, "tools"), column)
    if not tools and isinstance(tools, list | None):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("wrong_type", f"the column {column!r} must be a list of tool descriptions")
    return _without_none(tools)


def _variables(row: Mapping[str, object], format: Format) -> JsonObject | None:
    """The row's own variables for the chat template, as they are."""
    column = format.column("chat_template_kwargs")
    given = _from_json(format.get(row, "chat_template_kwargs"), column)
    if given is None:
        return None
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise RowError("wrong_type", f"the column {column!r} must be an object of names and values")
    if reserved := sorted({"chat_template", "messages", "tools", "documents", "add_generation_prompt"} & set(given)):
        raise RowError("wrong_type", f"the column {column!r} cannot set {', '.join(reserved)}")
    return _without_none(given)


def _with_system(messages: list[Message], system: str | None) -> list[Message]:
    if not system or (messages and messages[0]["role"] in ("system", "developer")):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _value(row: Mapping[str, object], format: Format, name: str) -> Any:
    value = row.get(format.column(name))
    if value is None:
        raise RowError("missing_field", f"the column {format.column(name)!r} has no value")
    return value


def _string(row: Mapping[str, object], format: Format, name: str, keep_empty: bool) -> str:
    value = _text(_value(row, format, name), format, name)
    if not value.strip() and not keep_empty:
        raise RowError("empty", f"the column {format.column(name)!r} is empty; {_KEPT}")
    return value


def _optional_string(row: Mapping[str, object], format: Format, name: str) -> str:
    value = format.get(row, name)
    return "" if value is None else _text(value, format, name)


def _text(value: object, format: Format, name: str) -> str:
    if not isinstance(value, str):
        raise RowError("wrong_type", f"the column {format.column(name)!r} must be text, not {type(value).__name__}")
    return value


def _list(row: Mapping[str, object], format: Format, name: str) -> list:
    value = _value(row, format, name)
    if not isinstance(value, list):
        raise RowError("wrong_type", f"the column {format.columns[name]!r} must be a list, not {type(value).__name__}")
    if not value:
        raise RowError("empty", f"the column {format.columns[name]!r} is an empty list")
    return value
