"""The messages in the rendered text: once per conversation, and in time that grows with its length."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from finetune.data.formats import Conversation, RowError
from finetune.data.templates import spans
from finetune.data.templates.chat_templates import TEMPLATES
from finetune.data.templates.encoder import Encoder
from finetune.errors import UserError
from tests.helpers.templates.chat_templates import CHAT_TEMPLATES, CHATML
from tests.helpers.templates.encoding import HELLO, encode_one, encoder_for, fails_with, supervised, tokenizer_for


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}",
            "no generation prompt",
        ),
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "exactly once"),
        ("{{ raise_exception('never') }}", "never"),
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content }}"
            "{{ ' STOP' if loop.last and m.role == 'assistant' else '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
            "ends the last turn",
        ),
    ],
)
def test_ambiguous_templates_are_refused(template: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        encode_one(Encoder(tokenizer_for("chatml"), template), HELLO)
    assert "assistant_only_loss" in str(caught.value) and template[:20] in str(caught.value).replace("\\n", "\n")
    if "raise_exception" not in template:
        assert encode_one(Encoder(tokenizer_for("chatml"), template, assistant_only_loss=False), HELLO).label_tokens


def test_only_the_row_that_the_template_reorders_is_refused() -> None:
    # With a "?" in the answer, question and answer swap positions: a text of the same length.
    template = (
        "{% set flip = '?' in messages[-1].content %}{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ messages[1 - loop.index0 if flip else loop.index0].content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    encoder = Encoder(tokenizer_for("chatml"), template)
    assert supervised(encode_one(encoder, HELLO), tokenizer_for("chatml")) == CHATML.says(HELLO)
    swapped = [HELLO[0], {"role": "assistant", "content": "Really?"}]
    assert fails_with(encoder, Conversation(messages=swapped)).reason == "mask_ambiguous"


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_rows_of_known_roles_are_rendered_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, renderings, render = encoder_for(name), [], spans.render
    row = Conversation(messages=[HELLO[0], HELLO[1] | {"content": " Hello, you!\t"}] * 2)
    encoder.encode_batch([row])
    monkeypatch.setattr(spans, "render", lambda *given, **more: renderings.append(given) or render(*given, **more))
    encoder.encode_batch([row] * 5)
    assert len(renderings) == 5


def long_conversation(kind: str, count: int) -> Conversation:
    """A conversation of `count` messages with names, tools, or thinking; or of one question and many tool calls."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    result = {"role": "tool", "content": "2"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    while len(messages) < count - 2:
        number = len(messages)
        if kind == "calls":
            messages.append({"role": "assistant", "content": None, "tool_calls": [call] * (1 + number % 5 // 4)})
            messages += [result] * len(messages[-1]["tool_calls"])
            continue
        thinking = "<think>\nHm.\n</think>\n\n" if kind == "thinking" and number % 3 else ""
        messages.append({"role": "assistant", "content": f"{thinking}{' ' * (number % 2)}Hello {number}!"})
        messages.append({"role": "user", "content": f"Hi {number % 7}"} | ({"name": "Ann"} if kind == "names" else {}))
    messages.append({"role": "assistant", "content": "Hello, you!"})
    tools = [{"type": "function", "function": {"name": "add"}}] if kind in ("tools", "calls") else None
    return Conversation(messages=messages, tools=tools)


KINDS = ("plain", "names", "tools", "thinking", "calls")


WITH_CALLS = ("qwen3", "chatml_tools")


@pytest.mark.campaign
@pytest.mark.parametrize("roles", [["assistant"], ["assistant", "user"]])
@pytest.mark.parametrize(
    "name, kind",
    [(n, k) for n in (*CHAT_TEMPLATES, "chatml_tools") for k in KINDS if k != "calls" or n in WITH_CALLS],
)
def test_windows_give_the_spans_of_the_whole(
    name: str, kind: str, roles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = long_conversation(kind, 90)
    encoder = Encoder(
        tokenizer_for("chatml" if name == "chatml_tools" else name),
        TEMPLATES.get(name) or CHAT_TEMPLATES[name].template,
        train_on_roles=roles,
    )
    (windowed,) = encoder.encode_batch([row])
    monkeypatch.setattr(spans, "LONG", 10_000)
    (exact,) = copy.copy(encoder).encode_batch([row])
    assert not isinstance(windowed, RowError) and not isinstance(exact, RowError)
    assert windowed[0].label_tokens and np.array_equal(windowed[0].labels, exact[0].labels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WITH_CALLS)
@pytest.mark.campaign
def test_a_long_conversation_takes_linear_time(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def messages_rendered(count: int) -> int:
        encoder = Encoder(
            tokenizer_for("qwen3"), CHAT_TEMPLATES["qwen3"].template if name == "qwen3" else TEMPLATES[name]
        )
        encoder.encode_batch([Conversation(messages=HELLO)])
        rendered.clear()
        encoder.encode_batch([long_conversation(kind, count)])
        return sum(rendered)

    rendered: list[int] = []
    render = spans.render

    def counted(text: str, messages: list[dict[str, Any]], **more: Any) -> Any:
        rendered.append(len(messages))
        return render(text, messages, **more)

    monkeypatch.setattr(spans, "render", counted)
    assert messages_rendered(320) < 2.5 * messages_rendered(160)
