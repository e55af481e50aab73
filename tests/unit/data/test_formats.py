"""Row formats: detection, and conversion of rows to conversations or to counted errors."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import yaml

from finetune.data import formats
from finetune.data.arrow import Struct
from finetune.data.formats import FORMATS, Conversation, Format, RowError, Text, describe, detect, to_conversation
from finetune.errors import UserError

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]

ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": MESSAGES},
    "sharegpt": {"conversations": SHAREGPT, "id": "1"},
    "alpaca": {"instruction": "Greet.", "input": "", "output": "Hello"},
    "prompt_completion": {"prompt": "Hi", "completion": "Hello"},
    "text": {"text": "Once upon a time"},
    "tokenized": {"input_ids": [5, 6, 7]},
}


def detected(row: dict[str, Any], **options: Any) -> Format:
    return detect(list(row), [row], **options)


def convert(row: dict[str, Any], wanted: str = "auto", **options: Any) -> Conversation | Text:
    return to_conversation(row, detected(row, wanted=wanted), **options)


def messages_of(row: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    conversation = convert(row, **options)
    assert isinstance(conversation, Conversation)
    return conversation.messages


def reason(row: dict[str, Any], wanted: str = "auto") -> str:
    with pytest.raises(RowError) as caught:
        convert(row, wanted)
    assert caught.value.detail and caught.value.reason in str(caught.value)
    return caught.value.reason


# --- detection --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_detected_with_evidence(name: str) -> None:
    found = detected(ROWS[name])
    assert found.name == name
    assert next(iter(found.columns.values())) in found.evidence


def test_the_items_decide_and_not_the_name_of_the_column() -> None:
    assert detected({"conversations": MESSAGES}) == Format(
        name="messages",
        columns={"messages": "conversations"},
        evidence="column 'conversations' has lists of role/content objects",
    )
    assert messages_of({"conversations": MESSAGES}) == MESSAGES
    assert detected({"messages": SHAREGPT}).name == "sharegpt"
    assert messages_of({"messages": SHAREGPT}) == MESSAGES


def test_columns_of_several_formats_are_read_in_the_order_of_trl() -> None:
    row = {**ROWS["alpaca"], "text": "Below is an instruction"}
    found = detected(row)
    assert (found.name, found.evidence) == ("text", "column 'text' of text; before alpaca, as in TRL")
    assert detected(row, wanted="alpaca").name == "alpaca"
    everything = {**row, **ROWS["messages"], **ROWS["sharegpt"], **ROWS["prompt_completion"], **ROWS["tokenized"]}
    for name in ("tokenized", "prompt_completion", "sharegpt", "messages", "text", "alpaca"):
        assert detected(everything).name == name
        del everything[next(iter(ROWS[name]))]
    assert detected({"conversations": MESSAGES, "text": "Hi"}).name == "text"  # TRL reads from/value there
    assert detected(row, mapping={"instruction": "instruction"}).name == "alpaca"


def test_values_of_another_type_are_not_evidence() -> None:
    assert detected({"messages": MESSAGES, "text": 7}).name == "messages"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "Add.", "output": 5}, "alpaca: the column 'output' must be text, not int"),
        ({"instruction": None, "output": "5"}, "alpaca: the column 'instruction' must be text, not null"),
        ({"prompt": "Add.", "completion": 5.5}, "prompt_completion: the column 'completion' must be text, not float"),
        ({"prompt": MESSAGES, "completion": "2"}, "column 'completion' must be a list of messages, as the prompt is"),
        ({"text": 7}, "text: the column 'text' must be text, not int"),
        ({"messages": "a string"}, "the column 'messages' must be a list of role/content objects, not str"),
        ({"messages": [{"text": "a"}]}, "must be a list of role/content objects, not another list"),
        ({"conversations": {}}, "the column 'conversations' must be a list of from/value objects, not dict"),
    ],
)
def test_columns_of_a_format_with_values_of_another_type(row: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        detected(row)
    assert expected in str(caught.value) and "data.columns" in str(caught.value)


def test_no_match_lists_the_columns_and_the_needs() -> None:
    with pytest.raises(UserError) as caught:
        detected({"a": "1 + 1?", "b": "2", "c": "3"})
    for part in ("a, b, c", "text needs 'text'", "alpaca needs 'instruction' and 'output'", "data.columns"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("row", "setting"),
    [
        ({"question": "a", "answer": "b"}, "data.columns: {instruction: question, output: answer}"),
        ({"id": "1", "user_query": "a", "botReply": "b"}, "data.columns: {instruction: user_query, output: botReply}"),
        ({"frage": "a", "antwort": "b"}, "data.columns: {instruction: frage, output: antwort}"),
        ({"title": "a", "content": "b", "url": "c"}, "data.columns: {text: content}"),
        ({"n": 1, "poem": "b"}, "data.columns: {text: poem}"),
        ({"yes": "a", "chat: 1": [{"role": "user", "content": "a"}]}, "data.columns: {messages: 'chat: 1'}"),
        ({"dialog": [{"from": "human", "value": "a"}]}, "data.columns: {conversations: dialog}"),
    ],
)
def test_no_match_names_the_mapping_that_works(row: dict[str, Any], setting: str) -> None:
    with pytest.raises(UserError) as caught:
        detected(row)
    assert f"If these are what their names say, set {setting}." in str(caught.value)
    assert len(str(caught.value)) < 300
    found = detected(row, mapping=yaml.safe_load(setting.removeprefix("data.columns: ")))
    assert found.evidence != "as configured"


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        (
            {"question": "prompt", "answer": "completion"},
            "It is {field: column}: set data.columns: {prompt: question, ",
        ),
        ({"question": "instruction", "output": "answer"}, "set data.columns: {instruction: question, output: answer}."),
        ({"prompt": "qestion", "completion": "answer"}, "Set data.columns: {prompt: question, completion: answer}."),
        ({"instruction": "frage", "output": "antwort"}, "Set data.columns: {instruction: question, output: answer}."),
        ({"text": "absent"}, "Correct them."),
        ({"instruction": "answer", "output": "anwser"}, "Correct them."),  # never one column for both
    ],
)
def test_wrong_columns_get_the_mapping_that_was_meant(given: dict[str, str], setting: str) -> None:
    with pytest.raises(UserError, match="columns that the rows lack: .*; the columns are question, answer") as caught:
        detected({"question": "a", "answer": "b"}, mapping=given)
    assert setting in str(caught.value)


def test_a_mapping_decides_the_format() -> None:
    row = {"question": "1 + 1?", "answer": "2", "text": "1 + 1 = 2"}
    found = detected(row, mapping={"prompt": "question", "completion": "answer"})
    assert (found.name, found.columns) == ("prompt_completion", {"prompt": "question", "completion": "answer"})
    assert to_conversation(row, found) == Text(text="1 + 1?2", supervised_from=6)
    assert detected(row, mapping={"text": "answer"}).columns == {"text": "answer"}


def test_invalid_format_and_mapping() -> None:
    row = {"question": "1 + 1?", "answer": "2"}
    with pytest.raises(UserError, match="the rows lack: reply; the columns are question, answer"):
        detected(row, mapping={"prompt": "question", "completion": "reply"})
    with pytest.raises(UserError, match="no single format has: promt.*prompt_completion: prompt, completion"):
        detected(row, mapping={"promt": "question"})
    with pytest.raises(UserError, match="'sharegtp' .did you mean 'sharegpt'.*Set it to auto, messages"):
        detected(row, wanted="sharegtp")
    with pytest.raises(
        UserError, match=r"question, answer.* set data.columns: {instruction: question, output: answer}\."
    ):
        detected(row, wanted="alpaca")


# --- rows -------------------------------------------------------------------------------------------------------------


def test_sharegpt_speakers_and_system_column() -> None:
    row = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "GPT", "value": "Let me look."},
            {"from": "tool", "value": ""},
            {"from": "assistant", "value": "Hello"},
        ],
    }
    assert [(m["role"], m["content"]) for m in messages_of(row)] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Let me look."),
        ("tool", ""),
        ("assistant", "Hello"),
    ]


def test_alpaca() -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "You add."}
    assert [m["content"] for m in messages_of(row)] == ["You add.", "Add.\n\n1 2", "3"]
    assert [m["content"] for m in messages_of(ROWS["alpaca"])] == ["Greet.", "Hello"]

    text = convert(row, has_template=False)
    assert isinstance(text, Text)
    assert text.text == (
        "You add.\n\n"
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3"
    )
    assert text.text[text.supervised_from :] == "3"
    bare = convert(ROWS["alpaca"] | {"instruction": "Print {braces}."}, has_template=False)
    assert isinstance(bare, Text)
    assert "Print {braces}." in bare.text and "### Input" not in bare.text


def test_prompt_completion() -> None:
    row = {"prompt": "1 + 1 =", "completion": " 2"}
    assert convert(row) == convert(row, has_template=False) == Text(text="1 + 1 = 2", supervised_from=7)
    assert convert({"prompt": "", "completion": "2"}) == Text(text="2", supervised_from=0)
    with pytest.raises(UserError, match="system_prompt"):
        convert(row, system_prompt="Be brief.")

    lists = {"prompt": [*MESSAGES, {"role": "user", "content": "and?"}], "completion": [MESSAGES[1]]}
    assert convert(lists, system_prompt="Be brief.") == Conversation(
        messages=[{"role": "system", "content": "Be brief."}, *lists["prompt"], MESSAGES[1]], supervised_from=4
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input_ids": []}, "empty"),
        ({"input_ids": "12"}, "wrong_type"),
        ({"input_ids": [1.5, 2.0]}, "wrong_type"),
        ({"input_ids": [1, -2]}, "wrong_type"),
        ({"input_ids": [1, 2**40]}, "wrong_type"),
        ({"input_ids": [[1], [2, 3]]}, "wrong_type"),
        ({"input_ids": [1, 2], "labels": [1, -7]}, "wrong_type"),
        ({"input_ids": [1, 2], "labels": [1]}, "wrong_length"),
        ({"input_ids": [1, 2], "completion_mask": [1, 0, 1]}, "wrong_length"),
        ({"input_ids": [1, 2], "assistant_masks": []}, "wrong_length"),
        ({"input_ids": [1, 2], "seq_lengths": [1]}, "wrong_length"),
        ({"input_ids": [1, 2], "seq_lengths": [2, 0]}, "wrong_length"),
        ({"input_ids": None}, "missing_field"),
    ],
)
def test_invalid_token_ids(row: dict[str, Any], expected: str) -> None:
    assert reason(row) == expected


def test_variables_of_the_chat_template() -> None:
    row = {**ROWS["messages"], "chat_template_kwargs": {"enable_thinking": False}}
    found = convert(row)
    assert isinstance(found, Conversation) and found.variables == {"enable_thinking": False}
    assert reason(ROWS["messages"] | {"chat_template_kwargs": {"tools": []}}) == "wrong_type"
    assert reason(ROWS["messages"] | {"chat_template_kwargs": ["enable_thinking"]}) == "wrong_type"


def test_one_line_says_how_rows_are_read() -> None:
    settings: dict[str, Any] = {"has_template": True, "assistant_only_loss": True, "completion_only_loss": None}
    strings, lists = ROWS["prompt_completion"], {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}
    masked = {"input_ids": [1, 2], "completion_mask": [0, 1], "assistant_masks": [1, 1]}
    for row, changed, expected in [
        (strings, {}, "prompt/completion (columns 'prompt' and 'completion' of text), loss on the completion"),
        (strings, {"completion_only_loss": False}, "loss on all tokens"),
        (lists, {}, "of messages), loss on the assistant's turns in the completion"),
        (lists, {"assistant_only_loss": False}, "loss on the completion"),
        (lists, {"completion_only_loss": False}, "loss on the assistant's turns"),
        (ROWS["messages"], {"last_turn_only": True}, "loss on the assistant's last turn"),
        (ROWS["sharegpt"], {"assistant_only_loss": False}, "loss on all tokens"),
        (ROWS["alpaca"], {}, "loss on the assistant's turns"),
        (ROWS["alpaca"], {"has_template": False}, "loss on the completion"),
        (ROWS["text"], {}, "text (column 'text' of text), loss on all tokens"),
        (ROWS["text"], {"markers": True}, "loss on the responses after the markers"),
        (ROWS["tokenized"], {}, "tokenized (column 'input_ids' of token ids), loss on all tokens"),
        (masked, {}, "loss on the tokens of assistant_masks"),
        (masked, {"completion_only_loss": True}, "loss on the tokens of completion_mask and assistant_masks"),
        (masked | {"labels": [1, 2]}, {"completion_only_loss": True}, "loss on the tokens of labels"),
    ]:  # fmt: skip
        assert describe(detected(row), **{**settings, **changed}).endswith(expected)


def test_text() -> None:
    assert convert(ROWS["text"]) == Text(text="Once upon a time")
    with pytest.raises(UserError, match="system_prompt"):
        convert(ROWS["text"], system_prompt="Be brief.")


def test_the_system_prompt_never_replaces_that_of_a_row() -> None:
    own = {"messages": [{"role": "system", "content": ""}, *MESSAGES]}
    assert messages_of(own, system_prompt="Be brief.") == own["messages"]
    assert messages_of(ROWS["messages"], system_prompt="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    assert ROWS["messages"]["messages"] == MESSAGES and len(MESSAGES) == 2  # the row itself is unchanged


def test_openai_details() -> None:
    """Content parts, tool calls with arguments as JSON text, and the None that Arrow writes for missing keys."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}, "x": None}
    row = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}],
                "name": None,
            },
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "1", "tool_calls": None},
            {"role": "assistant", "content": "2", "tool_calls": []},
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "add"}}]),
    }
    conversation = convert(row)
    assert isinstance(conversation, Conversation)
    assert conversation.tools == [{"type": "function", "function": {"name": "add"}}]
    user, calling, result, answer = conversation.messages
    assert user == {"role": "user", "content": "1 + 1?"}
    assert calling["content"] is None
    assert calling["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}
    assert "x" not in calling["tool_calls"][0]
    assert result == {"role": "tool", "content": "2", "tool_call_id": "1"}
    assert answer == {"role": "assistant", "content": "2"}


def turns(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


@pytest.mark.parametrize(
    ("row", "slug"),
    [
        (turns("user"), "no_assistant"),
        (turns("system", "user", "user"), "no_assistant"),
        (turns("assistant", "user", "assistant"), "roles_out_of_order"),
        (turns("system", "assistant"), "roles_out_of_order"),
        (turns("system", "system", "user", "assistant"), "roles_out_of_order"),
        (turns("user", "system", "assistant"), "roles_out_of_order"),
        (turns("user", "tool", "assistant"), "roles_out_of_order"),
        (turns("user", "narrator", "assistant"), "unknown_role"),
        ({"messages": []}, "empty"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "content": " \n"}]}, "empty"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "content": None}]}, "missing_field"),
        ({"messages": [MESSAGES[0], {"content": "x"}]}, "missing_field"),
        ({"messages": [MESSAGES[0], "x"]}, "missing_field"),
        ({"messages": None}, "missing_field"),
        ({"messages": "x"}, "wrong_type"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "content": 7}]}, "wrong_type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, MESSAGES[1]]}, "not_text"),
        (
            {"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "wrong_type",
        ),
        *[
            ({"messages": [MESSAGES[0], {**MESSAGES[1], "tool_calls": calls}]}, "wrong_type")
            for calls in (5, True, 0.5, "look", {"name": "look"}, [5])
        ],
        ({"messages": MESSAGES, "tools": "not json"}, "wrong_type"),
    ],
)
def test_unusable_messages(row: dict[str, Any], slug: str) -> None:
    fmt = Format(name="messages", columns={"messages": "messages", "tools": "tools"}, evidence="")
    with pytest.raises(RowError) as caught:
        to_conversation(row, fmt)
    assert caught.value.reason == slug


@pytest.mark.parametrize("roles", [("user", "user", "assistant"), ("user", "assistant", "assistant", "user")])
def test_alternation_is_left_to_the_template(roles: tuple[str, ...]) -> None:
    assert [m["role"] for m in messages_of(turns(*roles))] == list(roles)
    assert [m["role"] for m in messages_of(turns("developer", *roles))] == ["developer", *roles]


def test_unusable_rows_of_other_formats() -> None:
    sharegpt = [{"from": "human", "value": "Hi"}]
    assert reason({"conversations": [*sharegpt, {"from": "narrator", "value": "x"}]}) == "unknown_role"
    assert reason({"conversations": [*sharegpt, {"from": "gpt"}]}) == "missing_field"
    assert reason({"conversations": sharegpt}) == "no_assistant"
    assert reason({"instruction": "Add.", "output": ""}) == "empty"
    assert reason({"instruction": "Add.", "output": "3", "history": [["Hi", " "]]}) == "empty"
    assert reason({"instruction": "Add.", "output": "3", "history": [["", "Hello"]]}) == "empty"
    assert reason({"instruction": None, "output": "3"}, "alpaca") == "missing_field"
    assert reason({"prompt": "x", "completion": 7}, "prompt_completion") == "wrong_type"
    assert reason({"prompt": MESSAGES, "completion": [MESSAGES[0]]}) == "no_assistant"
    assert reason({"text": "  "}) == "empty"
    # Mixed formats in one file: rows of the other format are dropped, not fatal.
    with pytest.raises(RowError, match="missing_field"):
        to_conversation(ROWS["alpaca"], detected(ROWS["messages"]))


def test_a_row_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(RowError("empty", "message 2 is empty")))
    assert (error.reason, error.detail) == ("empty", "message 2 is empty")


CALL = {"type": "function", "function": {"name": "look", "arguments": {"a": 1}}}


def test_each_row_is_asked_for_its_optional_columns() -> None:
    first = {"instruction": "Add.", "output": "2"}
    found = formats.detect(list(first), [first])
    later = first | {"input": "1 + 1", "system": "Be brief.", "history": [["Hi", "Hello"]]}
    assert formats.to_conversation(later, found) == Conversation(
        messages=[
            {"role": "system", "content": "Be brief."},
            *[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
            *[{"role": "user", "content": "Add.\n\n1 + 1"}, {"role": "assistant", "content": "2"}],
        ]
    )
    as_text = first | {"history": '[["Hi", "Hello"]]'}  # of a CSV file
    assert len(formats.to_conversation(as_text, found).messages) == 4  # type: ignore[union-attr]
    for history in ([], None, "", "null"):
        assert len(formats.to_conversation(first | {"history": history}, found).messages) == 2  # type: ignore[union-attr]
    for history in (["Hi", "Hello"], [["Hi"]], [["Hi", None]], "[", {"Hi": "Hello"}):
        with pytest.raises(RowError, match="wrong_type: the column 'history'"):
            formats.to_conversation(first | {"history": history}, found)


def test_a_mapped_optional_column_may_begin_late() -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    found = formats.detect(["messages"], [row], mapping={"system": "persona"})
    assert formats.to_conversation(row | {"persona": "Be brief."}, found).messages[0]["role"] == "system"  # type: ignore
    formats.check_mapping({"system": "persona"}, ["messages", "persona"])
    with pytest.raises(UserError, match="columns that the rows lack: persona; the columns are messages"):
        formats.check_mapping({"system": "persona"}, ["messages"])


@pytest.mark.parametrize(
    "row, unread, as_trl, has_template",
    [
        ({"text": "a", "id": 0, "none": None, "blank": "", "empty": []}, {"id"}, False, True),
        ({"prompt": "a", "completion": "b", "system": "c", "tools": [CALL]}, {"system", "tools"}, False, True),
        ({"instruction": "a", "output": "b", "tools": [CALL], "system": "c"}, {"tools"}, False, True),
        ({"instruction": "a", "output": "b", "chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs"}, False, False),
        ({"input_ids": [1], "labels": [1], "attention_mask": [1], "prompt": "a"}, {"attention_mask"}, False, True),
        ({"messages": [{"role": "user", "content": "a"}], "system": "b"}, set(), False, True),
        ({"messages": [{"role": "user", "content": "a"}], "system": "b"}, {"system"}, True, True),
        (
            {"conversations": [{"from": "human", "value": "a"}], "system": "b", "messages": "c"},
            {"messages"},
            True,
            True,
        ),
    ],
)
def test_columns_that_are_not_read(row: dict, unread: set[str], as_trl: bool, has_template: bool) -> None:
    found = formats.detect(list(row), [row], as_trl=as_trl)
    assert found.unread(row, has_template=has_template) == unread


def test_trl_reads_no_system_beside_messages() -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "system": "c"}
    for as_trl, count in ((False, 3), (True, 2)):
        found = formats.detect(list(row), [row], as_trl=as_trl)
        assert len(formats.to_conversation(row, found).messages) == count  # type: ignore[union-attr]


def test_only_the_nulls_of_arrow_are_left_out() -> None:
    def read(make: type) -> Conversation:
        function = make(name="look", arguments=make(a=1, b=None, c=[make(d=None)]))
        calls = [make(id=None, type="function", function=function)]
        tools = [make(type="function", function=make(name="look", strict=None))]
        messages = [{"role": "user", "content": "a"}, make(role="assistant", content=None, name=None, tool_calls=calls)]
        row = {"messages": messages, "tools": tools, "chat_template_kwargs": make(think=None, deep=make(x=None))}
        converted = formats.to_conversation(row, formats.detect(list(row), [row]))
        assert isinstance(converted, Conversation) and converted.tools
        assert set(converted.messages[1]) == {"role", "content", "tool_calls"}
        assert set(converted.messages[1]["tool_calls"][0]) == {"type", "function"}
        return converted

    own, arrow = read(dict), read(Struct)
    assert own.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None, "c": [{"d": None}]}
    assert own.tools == [{"type": "function", "function": {"name": "look", "strict": None}}]
    assert own.variables == {"think": None, "deep": {"x": None}} and own.notes == ()
    assert arrow.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "c": [{}]}
    assert arrow.tools == [{"type": "function", "function": {"name": "look"}}] and arrow.variables == {"deep": {}}
    assert [note.partition(":")[0] for note in arrow.notes] == ["nulls in the arguments of tool calls are left out"]


@pytest.mark.parametrize("tools", [[], "[]", "", " ", "null", None])
def test_an_empty_list_of_tools_is_none(tools: object) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": tools}
    assert formats.to_conversation(row, formats.detect(list(row), [row])).tools is None  # type: ignore[union-attr]


def test_columns_in_messages_are_cut() -> None:
    """As of a CSV file without a header, whose first row is taken for one."""
    columns = [f"{n} {'a sentence ' * 100}" for n in range(300)]
    row = dict.fromkeys(columns, "x")
    for given in ({}, {"mapping": {"prompt": "none such"}}):
        with pytest.raises(UserError) as error:
            formats.detect(columns, [row], **given)
        assert "and 280 more" in str(error.value) and len(str(error.value)) < 4000
    assert len(str(formats.RowError("unknown_role", f"message 1 has the unknown role {'y ' * 1000!r}"))) < 330
