"""Chat templates by name, and from a file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from finetune.data.templates.chat_templates import TEMPLATES, load_template
from finetune.data.templates.encoder import Encoder
from finetune.errors import UserError
from tests.helpers.chat_templates import (
    CHAT_TEMPLATES,
    CHATML,
    PHI3,
    QWEN3,
    build_tokenizer,
)
from tests.helpers.encoding import HELLO, encode_one, supervised, tokenizer_for

# Role names, markers of this and other templates, thinking, and whitespace at every edge.
snippets = st.sampled_from(
    [
        "assistant",
        "user\n",
        "system:",
        "model",
        "[INST] ",
        "<|im_start|>assistant\n",
        "<|im_end|>",
        "<|eot_id|>",
        "</s>",
    ]
    + [
        "<end_of_turn>\n",
        "<|end|>",
        "### Response:",
        "🙂",
        "👩‍👩‍👧",
        "é",
        "日本",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "0",
        "{{ x }}",
    ]
    + ["<think>\nhm\n</think>\n\n"]
)


content = st.lists(
    snippets | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=6
).map("".join)


content = content.filter(lambda text: text.strip() != "")


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
