"""Chat templates by name, and from a file."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.config.schema import KEYS
from finetune.data.templates.chat_templates import TEMPLATES, load_template
from finetune.data.templates.encoder import Encoder
from finetune.errors import UserError
from tests.helpers import ROOT
from tests.helpers.templates.chat_templates import CHAT_TEMPLATES, CHATML, PHI3, QWEN3, build_tokenizer
from tests.helpers.templates.encoding import HELLO, encode_one, supervised, tokenizer_for


@pytest.mark.parametrize("name", TEMPLATES)
def test_named_templates_render_as_published(name: str) -> None:
    published = {"phi": "phi3", "chatml_tools": "chatml"}.get(name, name)
    case, tokenizer = CHAT_TEMPLATES[published], tokenizer_for(published)
    messages = [*HELLO, {"role": "user", "content": " and? "}, {"role": "assistant", "content": "more"}]
    if case.system:
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    ours, theirs = (
        tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        for template in (load_template(tokenizer, name), case.template)
    )
    # Ours differ: phi has no EOS after the last turn, mistral no space before [INST].
    assert ours == theirs.removesuffix(PHI3.eos).replace(" [INST]", "[INST]")
    assert supervised(encode_one(Encoder(tokenizer, TEMPLATES[name]), messages), tokenizer) == case.says(messages)


def test_the_template_with_tools_is_qwens() -> None:
    """Written down from Qwen2.5-Instruct's own template; only its system prompt for rows without one is left out."""
    tool = {"type": "function", "function": {"name": "f", "description": "It's <b>", "parameters": {}}}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"city": "Zürich & Rome"}}}]
    result, end = {"role": "tool", "content": "10"}, "<|im_end|>\n"
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls * 2},
        result,
        result,
        {"role": "system", "content": "Answer."},
        {"role": "assistant", "content": "Yes."},
    ]
    call = '\n<tool_call>\n{"name": "f", "arguments": {"city": "Zürich & Rome"}}\n</tool_call>'
    answered = "\n<tool_response>\n10\n</tool_response>"
    expected = (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to assist with the user query."
        "\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "f", "description": "It\'s <b>", "parameters": {}}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' + end
    )
    expected += f"<|im_start|>user\nWarm?{end}<|im_start|>assistant\nI look.{call}{call}{end}"
    expected += f"<|im_start|>user{answered}{answered}{end}<|im_start|>system\nAnswer.{end}"
    expected += f"<|im_start|>assistant\nYes.{end}"
    tokenizer = tokenizer_for("chatml")
    template = load_template(tokenizer, "chatml_tools")
    assert tokenizer.apply_chat_template(messages, tools=[tool], chat_template=template, tokenize=False) == expected


def test_the_help_of_the_setting_and_the_page_list_the_named_templates() -> None:
    page = (ROOT / "docs" / "chat-templates.md").read_text(encoding="utf-8")
    assert all(f"\n| `{name}` |" in page for name in TEMPLATES)
    assert ", ".join(TEMPLATES).replace(", phi", " or phi") in KEYS["model.chat_template"].metadata["help"]


def test_load_template(tmp_path: Any) -> None:
    tokenizer = build_tokenizer(CHATML.tokens, CHATML.eos)
    assert load_template(tokenizer) is None
    tokenizer.chat_template = QWEN3.template
    assert load_template(tokenizer) == QWEN3.template
    assert load_template(tokenizer, "none") is None
    file = tmp_path / "mine.jinja"
    file.write_text(PHI3.template, encoding="utf-8")
    assert load_template(tokenizer, str(file)) == PHI3.template
    file.write_text("{% for m in messages %}", encoding="utf-8")
    with pytest.raises(UserError, match="mine.jinja is invalid Jinja: line 1"):
        load_template(tokenizer, str(file))
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match="mine.jinja cannot be read"):
        load_template(tokenizer, str(file))
    with pytest.raises(UserError, match="'chatlm'.*chatml, chatml_tools, llama3"):
        load_template(tokenizer, "chatlm")
