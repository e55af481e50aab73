"""`assistant_only_loss` with published chat templates: which tokens are supervised here, and which in TRL.

TRL replaces a template that it knows by its own training template, which marks the assistant's turns. Here the
published template stays, and the turns are inferred from it; DIFFERENCES lists everything in which the two differ. With
TRL's training template itself, the labels are TRL's, token by token.
"""

from __future__ import annotations

import functools
import re
from datetime import datetime
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from trl import chat_template_utils

from finetune.data import IGNORE_INDEX
from finetune.data.formats import Conversation, Message
from finetune.data.templates.encoder import Encoder
from finetune.data.templates.render import DATE
from tests.helpers.templates.chat_templates import build_tokenizer

# Per template, the differences that occur in CONVERSATIONS:
# newline: TRL also supervises the line break after the end-of-turn token (Phi 3: and the EOS after it). Generation
#   stops at the end-of-turn token, so the model never writes them, and they are masked here.
# prompt: TRL also supervises how a turn opens, such as <think> or <|start|>assistant. The generation prompt contains
#   it, so the model never writes it, and it is masked here.
# text: TRL's training template writes another text, such as the thinking of earlier turns, or a token after the last
#   turn. Here the text is that of the published template, with which the model is used later.
DIFFERENCES: dict[str, str] = {
    **dict.fromkeys(("cohere", "cohere2", "llama3"), ""),
    **dict.fromkeys(("diffusion_gemma", "gemma", "gemma3", "lfm2", "lfm2_v2", "phi3", "phi3_5"), "newline"),
    **dict.fromkeys(("qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"), "newline"),
    **dict.fromkeys(("deepseekv3", "gptoss", "muse_glimmer"), "prompt"),
    **dict.fromkeys(("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen3_8"), "newline prompt"),
    "deepseek_r1_distill": "prompt text",
    "glm4moe": "text",
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
        assert ids == list(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])
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
