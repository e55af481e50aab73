"""`assistant_only_loss` with published chat templates: which tokens are supervised here, and which in TRL.

TRL replaces a template that it knows by its own training template, which marks the assistant's turns. Here the
published template stays, and the turns are inferred from it; DIFFERENCES lists everything in which the two differ. With
TRL's training template itself, the labels are TRL's, token by token.

Of every template that TRL or this project ships, the trained words are also looked up in the rendered text: answers are
trained, thinking as configured, headers and all else never.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from datetime import datetime
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from trl import chat_template_utils

from finetune.data import IGNORE_INDEX
from finetune.data.formats import Conversation, Message, RowError
from finetune.data.templates.chat_templates import TEMPLATES
from finetune.data.templates.encoder import Encoder
from finetune.data.templates.render import DATE
from finetune.errors import UserError
from tests.helpers.templates.chat_templates import build_tokenizer

# Per template, the differences that occur in CONVERSATIONS:
# newline: TRL also supervises the line break after the end-of-turn token (Phi 3: and the EOS after it). Generation
#   stops at the end-of-turn token, so the model never writes them, and they are masked here.
# prompt: TRL also supervises how a turn opens, such as <think> or <|start|>assistant. The generation prompt contains
#   it, so the model never writes it, and it is masked here.
# text: TRL's training template writes another text, such as the thinking of earlier turns, or a token after the last
#   turn. Here the text is that of the published template, with which the model is used later.
DIFFERENCES: dict[str, str] = {
    **dict.fromkeys(("cohere", "cohere2", "glm4moe", "llama3"), ""),
    **dict.fromkeys(("diffusion_gemma", "gemma", "gemma3", "lfm2", "lfm2_v2", "phi3", "phi3_5"), "newline"),
    **dict.fromkeys(("qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"), "newline"),
    **dict.fromkeys(("deepseekv3", "gptoss", "muse_glimmer"), "prompt"),
    **dict.fromkeys(("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen3_8"), "newline prompt"),
    "deepseek_r1_distill": "prompt text",
    "qwen3": "newline text",
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), "newline prompt text"),
}

FAST = ("deepseek_r1_distill", "gptoss", "phi3", "qwen3", "qwen3_5_think")

CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}


def _messages(*contents: str) -> list[Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


CONVERSATIONS: dict[str, list[Message]] = {
    "one turn": _messages("Natalia sold 48", "answers: 72"),
    "two turns": _messages("hello", "world 48", "more?", "clips"),
    "system": [{"role": "system", "content": "be nice"}, *_messages("hello", "world")],
    "whitespace": _messages("hello", " world \n"),
    "unicode": _messages("hello 🙂", "日本 🙂 é"),
    "thinking": _messages("hello", "<think>\nhm\n</think>\n\nworld", "x", "<think>\nb\n</think>\n\nc"),
    "reasoning": [*_messages("hello"), {"role": "assistant", "content": "c", "reasoning_content": "hm"}],
    "tool": [
        *_messages("2*3?"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "multiply", "content": "6"},
        {"role": "assistant", "content": "It is 6"},
    ],
}
# The newest templates of TRL are missing from older ones.
NAMES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.campaign)
    for name in DIFFERENCES
    if hasattr(chat_template_utils, f"{name}_training_chat_template")
]


@pytest.fixture(autouse=True)
def _today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates that write today's date get the same one from transformers as here."""
    day = SimpleNamespace(now=lambda: datetime.fromisoformat(DATE))
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", day)


@functools.cache
def _tokenizer(template: str) -> Any:
    special = re.findall(r"<\|[^|>]{1,30}\|>|</?(?:start|end)_of_turn>|<turn\|>|<｜[^｜>]{1,40}｜>|</?think>", template)
    tokenizer = build_tokenizer(sorted(set(special)), "<eos>", "<bos>")
    tokenizer.chat_template = template
    return tokenizer


def _of_trl(tokenizer: Any, messages: list[Message], template: str) -> tuple[list[int], np.ndarray] | None:
    """Token ids and the mask of assistant tokens as TRL makes them, or None if the template refuses the messages."""
    try:
        found = tokenizer.apply_chat_template(
            messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception:  # templates raise errors of any kind
        return None
    return list(found["input_ids"]), np.array(found["assistant_masks"], dtype=bool)


def _here(encoder: Encoder, messages: list[Message]) -> tuple[list[int], np.ndarray] | None:
    """Token ids and supervised tokens, or None if the row is dropped."""
    (result,) = encoder.encode_batch([Conversation(messages=[dict(message) for message in messages])])
    if not isinstance(result, list):
        return None
    return result[0].input_ids.tolist(), result[0].labels != IGNORE_INDEX


def _kind(tokenizer: Any, run: str) -> str:
    """Why TRL supervises this text, which directly precedes or follows what is supervised here."""
    if not run.removesuffix("<eos>").strip():
        return "newline"
    question = CONVERSATIONS["one turn"][:1]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    given = prompt.removeprefix(tokenizer.apply_chat_template(question, tokenize=False))
    return "prompt" if run in given or run in prompt[-40:] else f"unexplained: {run!r}"


@pytest.mark.parametrize("name", NAMES)
def test_published_templates_differ_from_trl_only_as_listed(name: str) -> None:
    published = getattr(chat_template_utils, f"{name}_chat_template")
    tokenizer = _tokenizer(published)
    training = chat_template_utils.get_training_chat_template(tokenizer)
    assert training is not None
    encoder = Encoder(tokenizer, published)
    found, compared = set(), 0
    for messages in CONVERSATIONS.values():
        expected, here = _of_trl(tokenizer, messages, training), _here(encoder, messages)
        if expected is None or here is None:
            continue  # a template without a system role or tools: dropped with a reason, never rendered otherwise
        compared += 1
        ids, supervised = here
        rendered = list(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])
        ends_in_the_next = name == "glm4moe"  # by a token that is added after the last turn
        assert ids[: len(rendered)] == rendered and len(ids) - len(rendered) in (0, ends_in_the_next)
        if ids != expected[0]:
            found.add("text")
            continue
        assert not (supervised & ~expected[1])[1:].any()  # nothing beyond what TRL supervises
        extra = np.flatnonzero(expected[1] & ~supervised)
        for _, run in groupby(enumerate(extra), lambda place: place[1] - place[0]):
            found.add(_kind(tokenizer, tokenizer.decode([ids[place] for _, place in run])))
    assert compared >= 5
    assert found == set(DIFFERENCES[name].split())


@pytest.mark.parametrize("name", NAMES)
def test_with_the_training_template_of_trl_the_labels_are_those_of_trl(name: str) -> None:
    training = getattr(chat_template_utils, f"{name}_training_chat_template")
    tokenizer = _tokenizer(training)
    encoder = Encoder(tokenizer, training)
    compared = 0
    for title, messages in CONVERSATIONS.items():
        expected = _of_trl(tokenizer, messages, training)
        if expected is None:
            continue
        compared += 1
        here = _here(encoder, messages)
        assert here is not None and here[0] == expected[0], title
        assert (here[1] == expected[1])[1:].all(), title  # the first token is never predicted
    assert compared >= 5


# --- thinking, headers and ends, in every template --------------------------------------------------------------------

BLOCK = "<think>\n{0}\n</think>\n\n"
_THOUGHT, _ANSWER = "thought{} hm", "answer{} ok"
TOOL = {"type": "function", "function": {"name": "multiply", "description": "b", "parameters": {"type": "object"}}}
FIELDS = ("reasoning_content", "thinking")


def _turn(number: int, content: str, **fields: Any) -> list[Message]:
    """A question and its answer; {0} is the thought, {1} the answer."""
    content = content.format(_THOUGHT.format(number), _ANSWER.format(number))
    return [{"role": "user", "content": f"question{number}?"}, {"role": "assistant", "content": content, **fields}]


def _with_tools(**fields: Any) -> list[Message]:
    call = CALL | {"function": {"name": "multiply", "arguments": {"a": "value1"}}}
    return [
        {"role": "user", "content": "question1?"},
        {"role": "assistant", "content": "", "tool_calls": [call], **fields},
        {"role": "tool", "name": "multiply", "content": "result1"},
        {"role": "assistant", "content": _ANSWER.format(1)},
    ]


ROWS: dict[str, list[Message]] = {
    "plain": _turn(1, "{1}"),
    "block": _turn(1, BLOCK + "{1}"),
    "block on a line": _turn(1, "<think>{0}</think>{1}"),
    "only the closing tag": _turn(1, "{0}\n</think>\n\n{1}"),
    "tags in the answer": _turn(1, BLOCK + "{1}: `<think>` and `</think>`."),
    **{field: _turn(1, "{1}", **{field: _THOUGHT.format(1)}) for field in FIELDS},
    "two turns": [*_turn(1, "{1}"), *_turn(2, "{1}")],
    "two blocks": [*_turn(1, BLOCK + "{1}"), *_turn(2, BLOCK + "{1}")],
    "two closing tags": [*_turn(1, "{0}\n</think>\n\n{1}"), *_turn(2, "{0}\n</think>\n\n{1}")],
    "tools": _with_tools(),
    **{f"tools, {field}": _with_tools(**{field: _THOUGHT.format(1)}) for field in FIELDS},
}


_SPECIAL = re.compile(r"<\|[\w\"]+\|?>|<\w+\|>|<｜[^｜<>]+｜>|</?(?:start|end)_of_\w+>|<eos>")
_WORD = re.compile(r"(question|thought|answer|result|value)[0-9]")


@functools.cache
def _shipped() -> dict[str, str]:
    """All chat templates of TRL and of this project."""
    names = [name for name in dir(chat_template_utils) if name.endswith("_chat_template")]
    found = {name.removesuffix("_chat_template"): getattr(chat_template_utils, name) for name in names}
    return {name: text for name, text in found.items() if isinstance(text, str)} | TEMPLATES


@functools.cache
def _tokenizer_of_all(*, tags: bool) -> Any:
    """With the special tokens of all templates; `tags`: also those of thinking."""
    special = set(_SPECIAL.findall("".join(_shipped().values()))) | ({"<think>", "</think>"} if tags else set())
    return build_tokenizer(sorted(special), "<eos>", "<bos>")


@functools.cache
def _piece(tags: bool, token: int) -> str:
    return _tokenizer_of_all(tags=tags).decode([token])


@functools.cache
def _rendered(name: str, messages: str, tools: bool, prompt: bool) -> str | None:
    """What transformers renders, or None if the template refuses the messages (JSON)."""
    try:
        return _tokenizer_of_all(tags=True).apply_chat_template(
            json.loads(messages),
            chat_template=_shipped()[name],
            tools=[TOOL] if tools else None,
            add_generation_prompt=prompt,
            tokenize=False,
        )
    except Exception:  # templates raise errors of any kind
        return None


def _opened(messages: list[Message]) -> list[Message]:
    """With the opening tag that the prompt has had before thinking that only ends."""
    return [
        message | {"content": "<think>\n" + message["content"]}
        if "</think>" in message["content"] and "<think>" not in message["content"]
        else message
        for message in messages
    ]


def _encoded(name: str, tags: bool, thinking: bool) -> list[tuple[str, str] | None]:
    """Of each of ROWS: its text and, for each character, "+" if it is trained, else "-"; None if it is dropped."""
    tokenizer = _tokenizer_of_all(tags=tags)
    rows = [
        Conversation(messages=copy.deepcopy(messages), tools=[TOOL] if title.startswith("tools") else None)
        for title, messages in ROWS.items()
    ]
    try:
        results = Encoder(tokenizer, _shipped()[name], train_on_thinking=thinking).encode_batch(rows)
    except UserError:  # no turn can be found exactly
        return [None] * len(rows)
    found: list[tuple[str, str] | None] = []
    for result in results:
        if isinstance(result, RowError):
            found.append(None)
            continue
        pieces = [_piece(tags, id) for id in result[0].input_ids.tolist()]
        signs = np.where(result[0].labels != IGNORE_INDEX, "+", "-")
        found.append(("".join(pieces), "".join(sign * len(p) for sign, p in zip(signs, pieces, strict=True))))
    return found


def _check_words(text: str, trained: str, *, thinking: bool) -> None:
    """Answers and calls are trained, questions and results never, thinking and the tag that ends it as configured."""
    for word in _WORD.finditer(text):
        wanted = word[1] in ("answer", "value") or (thinking and word[1] == "thought")
        assert set(trained[slice(*word.span())]) == {"-+"[wanted]}, word[0]
        closing = text.rfind("</think>", text.rfind("question", 0, word.start()), word.start())
        if word[1] == "answer" and closing > 0 and not thinking:
            assert "+" not in trained[closing : closing + len("</think>")], "</think>"


def _check_ends(text: str, trained: str) -> None:
    """The token after an answer is trained."""
    for word in re.finditer("answer[0-9] ok", text):
        end = _SPECIAL.search(text, word.end())
        assert end is not None and set(trained[slice(*end.span())]) == {"+"}, f"the end of {word[0]}"


def _check_headers(text: str, trained: str, messages: list[Message], render: Callable[..., str | None]) -> None:
    """What the generation prompt adds is not trained, nor is the <think> that it opens."""
    for index, message in enumerate(messages):
        before, prompt = (render(json.dumps(messages[:index]), prompt=prompt) for prompt in (False, True))
        if message["role"] != "assistant" or not before or not prompt or not prompt.startswith(before):
            continue
        header, start = prompt.removeprefix(before), len(before)
        if not text.startswith(prompt):  # an earlier turn, or one that has another block of thinking
            word = _WORD.search(json.dumps(message))
            place = text.find(word[0]) if word else -1
            if place < 0:
                continue
            header, opens, _ = header.partition("<think>")
            start = text.rfind(header, 0, place)
            if opens and text.startswith(header + opens, start):
                header += opens
        assert start >= 0 and "+" not in trained[start : start + len(header)], f"the header {header!r}"


def _shown(text: str, trained: str) -> str:
    runs = groupby(zip(text, trained, strict=True), lambda pair: pair[1])
    joined = [(sign, "".join(character for character, _ in run)) for sign, run in runs]
    return "".join(run if sign == "-" else f"[[{run}]]" for sign, run in joined)


OF_PARTS = ("idefics3", "llava_next", "llava_next_training", "smolvlm")  # these templates take no content as a string


@pytest.mark.parametrize("tags", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", sorted(_shipped()))
def test_answers_are_trained_and_headers_and_masked_thinking_never(name: str, tags: bool) -> None:
    template, kept = _shipped()[name], 0
    for thinking in (True, False):
        for (title, messages), found in zip(ROWS.items(), _encoded(name, tags, thinking), strict=True):
            render = functools.partial(_rendered, name, tools=title.startswith("tools"))
            given = _opened(messages) if "</think>" in template else messages
            expected = render(json.dumps(given), prompt=False)
            if found is None:
                words = {word[0] for word in _WORD.finditer(json.dumps(messages))}
                assert any(word not in (expected or "") for word in words), f"{title}: dropped"
                continue
            kept, (text, trained) = kept + 1, found
            try:
                assert expected is not None and text.startswith(expected), "the text is another one"
                _check_words(text, trained, thinking=thinking)
                if "{%- generation" not in template and "{% generation" not in template:  # its own marks are followed
                    _check_ends(text, trained)
                    _check_headers(text, trained, given, render)
            except AssertionError as error:
                raise AssertionError(f"{title}, thinking {thinking}: {error}\n{_shown(text, trained)}") from None
    assert kept or name in OF_PARTS
