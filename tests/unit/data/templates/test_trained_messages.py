"""Which messages of a conversation are trained: per-message marks, roles, tool calls and thinking; and what a template
leaves out."""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from finetune.config import ConfigError, load, rules
from finetune.data import IGNORE_INDEX, formats
from finetune.data.formats import Conversation, RowError, Text
from finetune.data.prepare import prepare
from finetune.data.templates.chat_templates import TEMPLATES
from finetune.data.templates.encoder import Encoded, Encoder
from finetune.engine.monitoring import tensorboard_pages
from finetune.errors import UserError
from finetune.prepare import main as prepare_main
from tests.helpers import tiny
from tests.helpers.templates.chat_templates import CHAT_TEMPLATES, CHATML, CHATML_MARKED, PHI3, QWEN3, build_tokenizer

QUESTION, ANSWER = {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello, you!"}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}

# What follows the content of a user and of a system message, up to the end of the turn, and the one after an answer.
ENDS = {
    "chatml": ("<|im_end|>", "<|im_end|>", "<|im_end|>"),
    "llama3": ("<|eot_id|>", "<|eot_id|>", "<|eot_id|>"),
    "gemma": ("<end_of_turn>", "", "<end_of_turn>"),
    "mistral": (" [/INST]", "", "</s>"),  # the system message is the start of the first question
    "phi": ("<|end|>", "<|end|>", "<|end|>"),
    "qwen3": ("<|im_end|>", "<|im_end|>", "<|im_end|>"),
    "phi4": ("<|im_end|>", "<|im_end|>", "<|im_end|>"),  # <|im_start|> of the next message follows immediately
}


def template_of(name: str) -> str:
    return TEMPLATES.get(name) or CHAT_TEMPLATES[name].template


@functools.cache
def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    case = CHAT_TEMPLATES["phi3" if name == "phi" else name]
    return build_tokenizer(case.tokens, case.eos, case.bos)


@functools.cache
def encoder_for(name: str, **options: Any) -> Encoder:
    return Encoder(tokenizer_for(name), template_of(name), **options)


def encode(encoder: Encoder, messages: list[dict], **fields: Any) -> Encoded:
    (result,) = encoder.encode_batch([Conversation(messages=messages, **fields)])
    assert not isinstance(result, RowError), result
    return result[0]


def supervised(encoded: Encoded, tokenizer: PreTrainedTokenizerFast) -> str:
    chosen = encoded.labels != IGNORE_INDEX
    assert (encoded.labels[chosen] == encoded.input_ids[chosen]).all()
    return tokenizer.decode(encoded.labels[chosen])


def read(messages: list[dict], **row: Any) -> Conversation:
    row = {"messages": messages, **row}
    found = formats.to_conversation(row, formats.detect(list(row), [row]))
    assert isinstance(found, Conversation)
    return found


# --- marks in the rows ------------------------------------------------------------------------------------------------


def test_train_and_weight_become_marks_and_leave_the_messages() -> None:
    found = read([QUESTION | {"train": True}, ANSWER | {"weight": 0}, QUESTION, ANSWER | {"weight": 1, "train": None}])
    assert found.messages == [QUESTION, ANSWER, QUESTION, ANSWER]
    assert found.supervised == (True, False, None, None)
    assert read([QUESTION, ANSWER | {"train": False, "weight": 0.0}]).supervised == (None, False)
    assert read([QUESTION, ANSWER | {"weight": None}]).supervised is None  # as Arrow fills absent keys

    turns = [{"from": "human", "value": "Hi", "train": True}, {"from": "gpt", "value": "Hello", "weight": 0}]
    row = {"conversations": turns, "system": "Be kind."}
    found = formats.to_conversation(row, formats.detect(list(row), [row]))
    assert isinstance(found, Conversation) and found.supervised == (None, True, False)
    assert all(set(message) == {"role", "content"} for message in found.messages)

    row = {"prompt": [QUESTION, ANSWER | {"train": True}, QUESTION], "completion": [ANSWER | {"train": False}]}
    found = formats.to_conversation(row, formats.detect(list(row), [row]), system_prompt="Be kind.")
    assert isinstance(found, Conversation)
    assert (found.supervised, found.supervised_from) == ((None, None, True, None, False), 4)


@pytest.mark.parametrize(
    "marks, reason, words",
    [
        ({"weight": 0.5}, "invalid_weight", "message 2 has the weight 0.5; only 0 and 1"),
        ({"weight": 2}, "invalid_weight", "only 0 and 1"),
        ({"weight": "0"}, "invalid_weight", "'0'"),
        ({"train": False, "weight": 1}, "invalid_weight", "train: false and weight: 1"),
        ({"train": True, "weight": 0}, "invalid_weight", "train: true and weight: 0"),
        ({"train": "no"}, "wrong_type", "must be true or false, not 'no'"),
    ],
)
@pytest.mark.parametrize("format", ["messages", "sharegpt"])
def test_other_marks_are_refused_in_words(marks: dict, reason: str, words: str, format: str) -> None:
    answer = ANSWER if format == "messages" else {"from": "gpt", "value": "Hello"}
    question = QUESTION if format == "messages" else {"from": "human", "value": "Hi"}
    with pytest.raises(RowError, match=words) as caught:
        read([question, answer | marks])
    assert caught.value.reason == reason


def test_a_row_without_a_message_to_train_on() -> None:
    with pytest.raises(RowError, match="no assistant turn"):
        read([QUESTION])
    assert read([QUESTION | {"train": True}]).supervised == (True,)
    row = {"messages": [QUESTION]}
    format = formats.detect(list(row), [row])
    formats.to_conversation(row, format, train_on_roles=["user"])
    with pytest.raises(RowError, match="no turn of tool"):
        formats.to_conversation(row, format, train_on_roles=["tool"])
    everything_masked = read([QUESTION, ANSWER | {"weight": 0}])
    (result,) = encoder_for("chatml").encode_batch([everything_masked])
    assert isinstance(result, RowError) and result.reason == "no_label"


# --- the messages that are trained, for every template ----------------------------------------------------------------


@st.composite
def marked_rows(draw: st.DrawFn, system: bool) -> tuple[list[dict], list[bool | None]]:
    """Messages with contents that occur once in the text, and a mark for each."""
    messages = [{"role": "system", "content": "Be kind 0."}] if system and draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": f"question {turn}?"})
        messages.append({"role": "assistant", "content": f"answer {turn}!"})
    if draw(st.integers(0, 4)) == 0:
        messages.append({"role": "user", "content": "question 9?"})
    return messages, [draw(st.sampled_from([None, None, True, False])) for _ in messages]


@pytest.mark.parametrize("name", ENDS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_trained_text_is_that_of_the_trained_messages(name: str, data: st.DataObject) -> None:
    """The reference: each message's content in the rendered text, with the end of its turn."""
    messages, marks = data.draw(marked_rows(ENDS[name][1] != "" or name == "mistral"))
    roles = data.draw(st.sampled_from([("assistant",), ("user",), ("user", "assistant"), ("system", "assistant")]))
    tokenizer = tokenizer_for(name)
    ends = dict(zip(("user", "system", "assistant"), ENDS[name], strict=True))
    last_question = max(i for i, message in enumerate(messages) if message["role"] == "user")
    expected = []
    for index, (message, mark) in enumerate(zip(messages, marks, strict=True)):
        if mark if mark is not None else message["role"] in roles:
            start = ""
            if name == "qwen3" and message["role"] == "assistant" and index > last_question:
                start = "<think>\n\n</think>\n\n"
            expected.append(start + message["content"] + ends[message["role"]])

    row = Conversation(messages=messages, supervised=tuple(marks))
    for last_only in (False, True):
        encoder = encoder_for(name, train_on_roles=roles, last_turn_only=last_only)
        (result,) = encoder.encode_batch([row])
        if not expected:
            assert isinstance(result, RowError) and result.reason == "no_label"
            continue
        assert not isinstance(result, RowError), result
        text = tokenizer.apply_chat_template(messages, chat_template=template_of(name), tokenize=False)
        assert result[0].input_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        trained, wanted = supervised(result[0], tokenizer), "".join(expected[-1:] if last_only else expected)
        if name == "mistral":  # writes a space before contents, which belongs to the first word where a token has both
            trained, wanted = trained.replace(" ", ""), wanted.replace(" ", "")
        assert trained == wanted


@pytest.mark.parametrize("template", [CHATML_MARKED, CHATML.template], ids=["marked", "unmarked"])
@settings(max_examples=40, deadline=None)
@given(row=marked_rows(system=True))
def test_marks_equal_the_assistant_masks_of_a_template_that_reads_them(template: str, row: Any) -> None:
    """TRL trains where `{% generation %}` marks are; here they are in a template that reads the marks themselves."""
    messages, marks = row
    marked = [{**message, "train": mark} for message, mark in zip(messages, marks, strict=True)]
    reference = tokenizer_for("chatml").apply_chat_template(
        marked,
        chat_template=(
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
            "{% if m.train or ((m.train is not defined or m.train is none) and m.role == 'assistant') %}"
            "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
            "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        ),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    (result,) = Encoder(tokenizer_for("chatml"), template).encode_batch([read(marked)])
    if isinstance(result, RowError):
        assert result.reason == "no_label" and not any(reference["assistant_masks"])
        return
    assert result[0].input_ids.tolist() == reference["input_ids"]
    assert (result[0].labels != IGNORE_INDEX).tolist() == [bool(mark) for mark in reference["assistant_masks"]]


def test_marks_of_a_template_that_has_none_or_several_in_a_turn() -> None:
    """One mark around the thinking, one around the answer, none in a turn that only calls a tool."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% if m.thinking %}"
        "{% generation %}{{ m.thinking }}{% endgeneration %}{{ '|' }}{% endif %}{% if m.content %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endif %}{{ '\n' }}{% else %}"
        "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    )
    messages = [
        QUESTION,
        ANSWER | {"thinking": "hm"},
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four."},
    ]
    encoder, tokenizer = Encoder(tokenizer_for("chatml"), template), tokenizer_for("chatml")
    assert supervised(encode(encoder, messages), tokenizer) == "hmHello, you!<|im_end|>Four.<|im_end|>"
    masked = encode(encoder, messages, supervised=(None, False, None, None, None, None))
    assert supervised(masked, tokenizer) == "Four.<|im_end|>"
    masked = encode(encoder, messages, supervised=(None, None, None, None, None, False))
    assert supervised(masked, tokenizer) == "hmHello, you!<|im_end|>"


def test_a_mark_for_the_end_token_belongs_to_the_last_turn() -> None:
    """A template that marks the end token after the last answer, as TRL's for Phi-3. The first answer has one mark: the
    conversation up to it has two."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
        "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if messages[-1].role == 'assistant' %}{% generation %}{{ '<|endoftext|>' }}{% endgeneration %}{% endif %}"
    )
    messages = [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "more"}]
    encoder, tokenizer = Encoder(tokenizer_for("chatml"), template), tokenizer_for("chatml")
    found = [supervised(encode(encoder, messages, supervised_from=first), tokenizer) for first in (0, 3)]
    assert found == ["Hello, you!<|im_end|>more<|im_end|><|endoftext|>", "more<|im_end|><|endoftext|>"]


def test_a_mark_overrides_where_the_completion_starts() -> None:
    messages = [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "more"}]
    encoded = encode(encoder_for("chatml"), messages, supervised_from=3, supervised=(None, True, None, None))
    assert supervised(encoded, tokenizer_for("chatml")) == "Hello, you!<|im_end|>more<|im_end|>"


@pytest.mark.parametrize("template", [CHATML_MARKED, CHATML.template, PHI3.template], ids=["marked", "chatml", "phi3"])
def test_without_assistant_only_loss_all_but_the_masked_messages_is_trained(template: str) -> None:
    tokenizer = tokenizer_for("phi" if template == PHI3.template else "chatml")
    messages = [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "more"}]
    encoder = Encoder(tokenizer, template, assistant_only_loss=False)
    whole = tokenizer.decode(encode(encoder, messages).input_ids)
    assert supervised(encode(encoder, messages), tokenizer) == whole
    end = "<|end|>" if template == PHI3.template else "<|im_end|>"
    assert supervised(encode(encoder, messages, supervised=(None, False, None, None)), tokenizer) == whole.replace(
        f"Hello, you!{end}", ""
    )
    both = encode(encoder, messages, supervised=(False, None, None, False))
    assert supervised(both, tokenizer) == whole.replace(f"Hi there{end}", "", 1).replace(f"more{end}", "")


def test_a_mark_in_a_prompt_never_trains_the_rest_of_it() -> None:
    """With the loss on the whole completion, such a row is refused rather than trained with its prompt."""
    messages = [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "more"}]
    encoder = Encoder(tokenizer_for("chatml"), CHATML.template, assistant_only_loss=False)
    row = Conversation(messages=messages, supervised_from=3, supervised=(None, True, None, None))
    (result,) = encoder.encode_batch([row])
    assert isinstance(result, RowError) and result.reason == "invalid_weight"


def test_tool_results_can_be_trained() -> None:
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "22"},
        {"role": "tool", "name": "add", "content": "33"},
        {"role": "assistant", "content": "It is 55."},
    ]
    tokenizer = build_tokenizer([*QWEN3.tokens, "<tool_response>", "</tool_response>"], QWEN3.eos)
    encoder = Encoder(tokenizer, QWEN3.template, train_on_roles=["tool"])
    encoded = encode(encoder, messages, tools=[TOOL])
    assert supervised(encoded, tokenizer) == "22\n</tool_response>33\n</tool_response><|im_end|>"


def test_a_content_that_changes_the_text_around_it_is_not_trained() -> None:
    """Qwen3 does not take a tool's answer in a user message for a question, so earlier thinking stays."""
    messages = [
        QUESTION,
        {"role": "assistant", "reasoning_content": "hm", "content": "one"},
        {"role": "user", "content": "<tool_response>4</tool_response>"},
        {"role": "assistant", "content": "two"},
    ]
    (result,) = encoder_for("qwen3", train_on_roles=("user",)).encode_batch([Conversation(messages=messages)])
    assert isinstance(result, RowError) and result.reason == "mask_ambiguous" and "message 3" in result.detail


# --- tool calls and thinking ------------------------------------------------------------------------------------------


def test_turns_with_tool_calls_can_be_masked() -> None:
    messages = [
        QUESTION,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    answer = "<think>\n\n</think>\n\nIt is 2.<|im_end|>"
    call = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    tokenizer, encoder = tokenizer_for("qwen3"), encoder_for("qwen3", train_on_tool_calls=False)
    assert supervised(encode(encoder_for("qwen3"), messages), tokenizer) == call + answer
    assert supervised(encode(encoder, messages), tokenizer) == answer
    assert supervised(encode(encoder, messages, supervised=(None, True, None, None)), tokenizer) == call + answer


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>' }}{% generation %}"
    "{{ '\n\n' + m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endif %}{{ '\n' }}{% else %}"
    "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@settings(max_examples=40, deadline=None)
@given(
    thoughts=st.lists(
        st.sampled_from([None, "hm", "th", "</think>", "<think>", "\n", "Four.", "4", "é 日本"]), min_size=1, max_size=3
    ),
    content=st.sampled_from(["Four.", "4", "th", "I </think> so", "hm hm"]),
)
def test_masked_thinking_equals_the_assistant_masks_of_a_template_that_marks_the_rest(
    thoughts: list[str | None], content: str
) -> None:
    messages = []
    for thought in thoughts:
        messages += [QUESTION, {"role": "assistant", "content": content}]
        if thought is not None:
            messages[-1]["reasoning_content"] = thought
    tokenizer = tokenizer_for("qwen3")
    reference = tokenizer.apply_chat_template(
        messages, chat_template=THINKING, return_assistant_tokens_mask=True, return_dict=True
    )
    plain = THINKING.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    encoded = encode(Encoder(tokenizer, plain, train_on_thinking=False), messages)
    assert encoded.input_ids.tolist() == reference["input_ids"]
    assert (encoded.labels != IGNORE_INDEX).tolist() == [bool(mark) for mark in reference["assistant_masks"]]


def test_thinking_in_the_content_and_in_qwen3s_template() -> None:
    encoder, tokenizer = encoder_for("qwen3", train_on_thinking=False), tokenizer_for("qwen3")
    field = [QUESTION, {"role": "assistant", "reasoning_content": "just now", "content": "two"}]
    content = [QUESTION, {"role": "assistant", "content": "<think>\njust now\n</think>\n\ntwo"}]
    for messages in (field, content):
        encoded = encode(encoder, [QUESTION, ANSWER, *messages])
        assert supervised(encoded, tokenizer) == "Hello, you!<|im_end|>\n\ntwo<|im_end|>"
    assert supervised(encode(encoder, [QUESTION, ANSWER]), tokenizer) == "\n\nHello, you!<|im_end|>"  # an empty block
    chatml = Encoder(tokenizer, CHATML.template, train_on_thinking=False)
    assert supervised(encode(chatml, content), tokenizer) == "\n\ntwo<|im_end|>"
    mentions = [QUESTION, {"role": "assistant", "content": "The tag </think> ends it."}]
    assert supervised(encode(chatml, mentions), tokenizer) == "The tag </think> ends it.<|im_end|>"
    # A template that drops the field: an answer that equals the reasoning is not the reasoning.
    same = [QUESTION, {"role": "assistant", "reasoning_content": "4", "content": "4"}]
    assert supervised(encode(encoder, same * 2), tokenizer) == "4<|im_end|>\n\n4<|im_end|>"


def test_thinking_in_channels_as_of_gpt_oss() -> None:
    template = (
        "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}{% if m.thinking %}"
        "{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}"
        "{{ '<|channel|>final<|message|>' + m.content + '<|end|>' }}{% else %}"
        "{{ '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    )
    tokenizer = build_tokenizer(["<|start|>", "<|end|>", "<|message|>", "<|channel|>"], "<|end|>")
    messages = [QUESTION, ANSWER | {"thinking": "Be kind."}]
    final = "<|channel|>final<|message|>Hello, you!<|end|>"
    thinking = "<|channel|>analysis<|message|>Be kind.<|end|><|start|>assistant"
    assert supervised(encode(Encoder(tokenizer, template), messages), tokenizer) == thinking + final
    masked = encode(Encoder(tokenizer, template, train_on_thinking=False), messages)
    assert supervised(masked, tokenizer) == "<|start|>assistant" + final


def test_variables_of_the_chat_template() -> None:
    template = "{{ '<|im_start|>' if verbose else '' }}" + CHATML.template
    tokenizer = tokenizer_for("chatml")
    for values in ({}, {"verbose": True}):
        encoded = encode(Encoder(tokenizer, template, chat_template_kwargs=values), [QUESTION, ANSWER])
        text = tokenizer.apply_chat_template([QUESTION, ANSWER], chat_template=template, tokenize=False, **values)
        assert encoded.input_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert supervised(encoded, tokenizer) == "Hello, you!<|im_end|>"


def test_encoders_with_these_settings_are_picklable() -> None:
    encoder = encoder_for("qwen3", train_on_thinking=False, train_on_roles=("user", "assistant"))
    row = Conversation(messages=[QUESTION, ANSWER | {"reasoning_content": "hm"}], supervised=(False, None))
    (before,), (after,) = encoder.encode_batch([row]), pickle.loads(pickle.dumps(encoder)).encode_batch([row])
    assert not isinstance(before, RowError) and not isinstance(after, RowError)
    assert (before[0].labels == after[0].labels).all()


# --- what a template leaves out ---------------------------------------------------------------------------------------


def test_notes_name_what_the_template_leaves_out() -> None:
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\none"}
    field = ANSWER | {"reasoning_content": "hm"}
    named = QUESTION | {"name": "Bob"}

    def notes(template: str, messages: list[dict], encoder_options: Any = None, **fields: Any) -> list[str]:
        encoder = Encoder(tokenizer_for("qwen3"), template, **(encoder_options or {}))
        return [
            text.removeprefix("the chat template leaves out ") for text in encode(encoder, messages, **fields).notes
        ]

    qwen3, chatml = QWEN3.template, CHATML.template
    assert notes(qwen3, [QUESTION, ANSWER] * 2) == []
    assert notes(qwen3, [QUESTION, thought]) == []
    assert notes(qwen3, [QUESTION, thought, QUESTION, thought]) == ["the thinking of earlier turns"]
    assert notes(qwen3, [QUESTION, field, QUESTION, field]) == ["the thinking of earlier turns"]
    assert notes(chatml, [QUESTION, thought, QUESTION, thought]) == []
    assert notes(chatml, [QUESTION, field]) == ["reasoning_content of the last turn"]
    assert notes(chatml, [named, ANSWER]) == ["the name of user messages"]
    assert notes(chatml, [QUESTION, ANSWER], tools=[TOOL]) == ["the descriptions of the tools"]
    assert notes(chatml.replace("{% for", "{{ tools | tojson }}{% for", 1), [QUESTION, ANSWER], tools=[TOOL]) == []
    calls = [QUESTION, {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]}, *[QUESTION, ANSWER]]
    assert notes(qwen3, calls) == []
    assert notes(chatml, calls, supervised=(None, False, None, None)) == ["tool calls"]
    # A template that drops a system message: the row is dropped if the mask is inferred, noted if it is not.
    without = chatml.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
    )
    system = [{"role": "system", "content": "Be kind."}, QUESTION, ANSWER]
    assert notes(without, system, {"assistant_only_loss": False}) == ["the system message"]
    (dropped,) = Encoder(tokenizer_for("qwen3"), without).encode_batch([Conversation(messages=system)])
    assert isinstance(dropped, RowError) and dropped.reason == "not_rendered"


def test_notes_of_a_split_row_count_once() -> None:
    encoder = Encoder(tokenizer_for("chatml"), CHATML.template, max_length=8, over_length="split")
    row = Conversation(messages=[QUESTION, {"role": "assistant", "content": "Hello! " * 9, "reasoning_content": "hm"}])
    (pieces,) = encoder.encode_batch([row])
    assert not isinstance(pieces, RowError) and len(pieces) > 1
    assert [len(piece.notes) for piece in pieces] == [1] + [0] * (len(pieces) - 1)


# --- from the configuration -------------------------------------------------------------------------------------------


def test_the_roles_of_the_configuration_are_those_of_the_formats() -> None:
    assert rules.ROLES == formats.ROLES


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--data.train_on_roles", "[asistant]"], "unknown role 'asistant'. Set roles out of system, developer, user"),
        (["--data.train_on_roles", "[]"], "not empty"),
        (["--data.train_on_roles", "[user]", "--data.assistant_only_loss", "false"], "the loss on all messages"),
        (["--data.train_on_thinking", "false", "--data.assistant_only_loss", "false"], "the loss on all messages"),
        (["--data.train_on_tool_calls", "false", "--data.format", "text"], "rows of text have no messages"),
        (["--data.chat_template_kwargs", "{a: 1}", "--data.response_part", "auto"], "rows of text have no messages"),
        (["--data.chat_template_kwargs", "{tools: []}"], "'tools' cannot be set here"),
        (["--data.roles_to_train", "[user]"], "data.train_on_roles"),
    ],
)
def test_contradictions_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--model.model_name_or_path", "m", "--data.train_file", "f", *arguments])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "option", [{"train_on_roles": ["user"]}, {"train_on_tool_calls": False}, {"train_on_thinking": False}]
)
def test_rows_of_text_refuse_what_selects_messages(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(UserError, match=f"data.{name} cannot be used with rows of text"):
        Encoder(tokenizer_for("chatml"), CHATML.template, **option).encode_batch([Text(text="Hello")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    tiny.make_tokenizer(folder)
    two_turns = [QUESTION, ANSWER, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "more"}]
    rows = [
        [two_turns[0], two_turns[1] | {"weight": 0}, two_turns[2], two_turns[3] | {"weight": 1}],
        [two_turns[0], two_turns[1] | {"reasoning_content": "hm"}, *two_turns[2:]],
        [QUESTION, ANSWER | {"weight": 0.5}],
    ]
    lines = [json.dumps({"messages": messages}) + "\n" for messages in rows]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def test_prepare_honors_weights_and_prints_the_notes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--model.model_name_or_path", str(folder), "--data.train_file", str(folder / "rows.jsonl")]
    report = folder / "report.json"
    assert prepare_main([*named, "--data.cache_dir", str(folder / "cache"), "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    note = "the chat template leaves out the thinking of earlier turns"
    assert f"train: {note} (1 row)" in printed
    assert "only 0 and 1 are supported" in printed
    ledger = json.loads(report.read_text(encoding="utf-8"))["ledger"]["train"]
    assert ledger["notes"] == {note: 1} and ledger["dropped"] == {"invalid_weight": 1}
    layouts = {"train": {"pack_length": None}}
    assert f"train: {note} (1 row)" in tensorboard_pages.data_page({"train": ledger}, layouts, include_rows=False)


def test_every_setting_reaches_the_rows_and_the_cache_key(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    named = ["--model.model_name_or_path", "m", "--data.train_file", str(folder / "rows.jsonl")]
    named += ["--data.cache_dir", str(folder / "cache2")]
    found = {}
    for option in ("", "train_on_roles=[user]", "train_on_tool_calls=false", "train_on_thinking=false"):
        key, _, value = option.partition("=")
        found[key] = prepare(load([*named, *([f"--data.{key}", value] if key else [])]), tokenizer)
    found["chat_template_kwargs"] = prepare(load([*named, "--data.chat_template_kwargs", "{a: 1}"]), tokenizer)
    assert len({data.fingerprint for data in found.values()}) == 5
    assert len({data.folder for data in found.values()}) == 5  # the entries of the cache
    texts = {}
    for name, data in found.items():
        _, labels = data.train[0]
        texts[name] = tokenizer.decode(labels[labels != IGNORE_INDEX])
    assert texts[""] == "more<|im_end|>" == texts["train_on_thinking"]
    assert texts["train_on_roles"] == "Hi there<|im_end|>and?<|im_end|>"
