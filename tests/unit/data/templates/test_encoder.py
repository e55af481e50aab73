"""Labels: exactly the assistant's content and the end-of-turn token, for real chat templates."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from finetune.data import IGNORE_INDEX
from finetune.data.formats import Conversation, RowError, Text
from finetune.data.templates import encoder as encoding
from finetune.data.templates.encoder import Encoded, Encoder, preview
from finetune.data.templates.token_ranges import byte_lengths
from finetune.errors import UserError
from tests.helpers.templates.chat_templates import (
    CHAT_TEMPLATES,
    CHATML,
    CHATML_MARKED,
    GEMMA,
    MISTRAL,
    MISTRAL_V3,
    build_tokenizer,
)
from tests.helpers.templates.encoding import HELLO, LONG, encode_one, encoder_for, fails_with, supervised, tokenizer_for

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


@st.composite
def conversations(draw: st.DrawFn, system: bool) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": draw(content)}] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(content)})
        messages.append({"role": "assistant", "content": draw(content)})
    if draw(st.integers(0, 4)) == 0:
        messages.append({"role": "user", "content": draw(content)})
    return messages


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("name", CHAT_TEMPLATES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_labels_are_the_assistants_content_and_the_end_of_turn(
    name: str, trim_offsets: bool, data: st.DataObject
) -> None:
    case, tokenizer = CHAT_TEMPLATES[name], tokenizer_for(name, trim_offsets)
    messages = data.draw(conversations(case.system))
    says = case.says(messages)

    encoded = encode_one(encoder_for(name, trim_offsets), messages)
    assert supervised(encoded, tokenizer) == says
    text = tokenizer.apply_chat_template(messages, chat_template=case.template, tokenize=False)
    assert encoded.input_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]

    encoded = encode_one(encoder_for(name, trim_offsets, last_turn_only=True), messages)
    assert supervised(encoded, tokenizer) == says[-1:]


@settings(max_examples=60, deadline=None)
@given(messages=conversations(system=True))
def test_labels_equal_the_mask_of_marked_templates(messages: list[dict[str, str]]) -> None:
    tokenizer = tokenizer_for("chatml")
    reference = tokenizer.apply_chat_template(
        messages, chat_template=CHATML_MARKED, return_assistant_tokens_mask=True, return_dict=True
    )
    expected = np.array(reference["assistant_masks"], dtype=bool)
    marked = Encoder(tokenizer, CHATML_MARKED)
    for encoder in (marked, encoder_for("chatml")):
        encoded = encode_one(encoder, messages)
        assert encoded.input_ids.tolist() == reference["input_ids"]
        assert ((encoded.labels != IGNORE_INDEX) == expected).all()
    last = encode_one(Encoder(tokenizer, CHATML_MARKED, last_turn_only=True), messages)
    assert supervised(last, tokenizer) == CHATML.says(messages)[-1:]


def test_the_thinking_that_qwen3s_template_keeps_is_supervised() -> None:
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "<think>\nlong ago\n</think>\n\none"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "reasoning_content": "just now", "content": "two"},
    ]
    encoded = encode_one(encoder_for("qwen3"), messages)
    assert supervised(encoded, tokenizer_for("qwen3")) == [
        "one<|im_end|>",
        "<think>\njust now\n</think>\n\ntwo<|im_end|>",
    ]


def test_a_generation_prompt_that_opens_the_thinking() -> None:
    """As in DeepSeek-R1 and Qwen3.5: the thinking that the prompt opens is context, and earlier turns lack it."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
        "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    encoder, tokenizer = Encoder(tokenizer_for("qwen3"), template), tokenizer_for("qwen3")
    assert supervised(encode_one(encoder, HELLO * 2), tokenizer) == [
        "Hello, you!<|im_end|>",
        "\n</think>\n\nHello, you!<|im_end|>",
    ]
    thought = [HELLO[0], HELLO[1] | {"reasoning_content": "Be kind."}]
    assert supervised(encode_one(encoder, thought), tokenizer) == ["Be kind.\n</think>\n\nHello, you!<|im_end|>"]
    # Nemotron renders an empty block differently from the one its prompt opens: they share <think>.
    nemotron = template.replace("'<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n'", "'<think></think>'")
    encoded = encode_one(Encoder(tokenizer, nemotron), HELLO)
    assert supervised(encoded, tokenizer) == ["</think>Hello, you!<|im_end|>"]
    bare = template.replace("loop.last", "false")
    assert supervised(encode_one(Encoder(tokenizer, bare), HELLO * 2), tokenizer) == CHATML.says(HELLO * 2)


def test_another_token_at_the_very_end() -> None:
    """As in gpt-oss: <|return|> ends the last turn and <|end|> earlier ones."""
    template = (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}"
        "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    encoder, tokenizer = Encoder(tokenizer_for("phi3"), template), tokenizer_for("phi3")
    assert supervised(encode_one(encoder, HELLO * 2), tokenizer) == ["Hello, you!<|end|>", "Hello, you!<|endoftext|>"]
    assert supervised(encode_one(encoder, HELLO * 2 + HELLO[:1]), tokenizer) == ["Hello, you!<|end|>"] * 2


def test_tool_calls_are_supervised_and_tool_results_are_not() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    encoded = encode_one(encoder_for("qwen3"), messages)
    assert supervised(encoded, tokenizer_for("qwen3")) == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nIt is 2.<|im_end|>",
    ]
    messages[1]["content"] = "Let me see."  # phi3 would render this content and drop the call
    assert fails_with(encoder_for("phi3"), Conversation(messages=messages)).reason == "not_rendered"
    messages[1]["tool_calls"] = [{"function": "add"}]
    assert fails_with(encoder_for("phi3"), Conversation(messages=messages)).reason == "not_rendered"


def test_only_turns_from_supervised_from_on_are_supervised() -> None:
    messages = [*HELLO, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "more"}]
    for encoder in (encoder_for("chatml"), Encoder(tokenizer_for("chatml"), CHATML_MARKED)):
        encoded = encode_one(encoder, messages, supervised_from=3)
        assert supervised(encoded, tokenizer_for("chatml")) == ["more<|im_end|>"]


def test_everything_is_supervised_without_assistant_only_loss() -> None:
    encoded = encode_one(encoder_for("llama3", assistant_only_loss=False), HELLO)
    assert (encoded.labels == encoded.input_ids).all()
    assert encoded.label_tokens == len(encoded.labels) - 1  # nothing precedes the first token


PLAIN = (
    "{% for m in messages %}{{ 'USER: ' + m.content + '\n' if m.role == 'user' else 'BOT: ' + m.content + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'BOT: ' }}{% endif %}"
)


@pytest.mark.parametrize("by_offsets", [False, True])
def test_a_first_word_merged_with_the_prompts_space_is_supervised(
    by_offsets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build_tokenizer([], eos="</s>", corpus=["USER: Hello BOT: Hello"] * 9)
    assert "ĠHello" in tokenizer.get_vocab()
    assert byte_lengths(tokenizer) is not None
    if by_offsets:
        monkeypatch.setattr(encoding, "byte_lengths", lambda tokenizer: None)
    encoder = Encoder(tokenizer, PLAIN)
    encoded = encode_one(encoder, [HELLO[0] | {"content": "x"}, HELLO[1] | {"content": "Hello"}])
    assert supervised(encoded, tokenizer) == [" Hello</s>"]


def test_a_token_that_contains_part_of_the_prompts_word_is_masked() -> None:
    backend = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=30, special_tokens=["</s>"], show_progress=False)
    backend.train_from_iterator([":he"] * 9 + ["USRBOTxlo\n: "], trainer)  # no pre-tokenizer: merges reach anywhere
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    template = PLAIN.replace("BOT: ", "BOT:")
    encoded = encode_one(Encoder(tokenizer, template), [HELLO[0] | {"content": "x"}, HELLO[1] | {"content": "hello"}])
    assert ":he" in tokenizer.get_vocab()
    assert "".join(tokenizer.convert_ids_to_tokens(encoded.labels[encoded.labels != IGNORE_INDEX])) == "llo</s>"


def test_a_last_character_of_several_tokens_is_supervised_completely() -> None:
    template = PLAIN.replace("eos_token", "'\n'")  # no end-of-turn token follows
    tokenizer = build_tokenizer([], eos="</s>", corpus=["USER: BOT: x"])
    messages = [HELLO[0] | {"content": "x"}, HELLO[1] | {"content": "🙂"}]
    assert supervised(encode_one(Encoder(tokenizer, template), messages * 2), tokenizer) == ["🙂", "🙂"]


def test_sentencepiece_style_tokens() -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # type: ignore[attr-defined]
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "</s>", "[INST]", "[/INST]"], show_progress=False)
    backend.train_from_iterator(["Hi there Hello, you! Hi there Hello, you! "], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    encoded = encode_one(Encoder(tokenizer, MISTRAL.template), HELLO)
    tokens = tokenizer.convert_ids_to_tokens(encoded.labels[encoded.labels != IGNORE_INDEX])
    assert "".join(tokens) == "▁Hello,▁you!</s>"


def test_a_vocabulary_that_lacks_characters_does_not_shift_the_labels() -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[attr-defined]
    backend.decoder = decoders.ByteLevel()  # type: ignore[attr-defined]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(CHATML.tokens), show_progress=False)
    backend.train_from_iterator(["user assistant Hi there Hello, you! \n\t 12 words'll do;\r"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=CHATML.eos)
    encoder = Encoder(tokenizer, CHATML.template)
    assert byte_lengths(tokenizer) is not None
    messages = [{"role": "user", "content": "QQQQQ there"}, HELLO[1]]  # has no Q
    assert supervised(encode_one(encoder, messages), tokenizer) == ["Hello, you!<|im_end|>"]


def test_bos_occurs_once() -> None:
    case, tokenizer = CHAT_TEMPLATES["llama3"], build_tokenizer(CHAT_TEMPLATES["llama3"].tokens, "<eos>", "<bos>")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[attr-defined]
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    encoder = Encoder(tokenizer, case.template)
    assert encode_one(encoder, HELLO).input_ids.tolist().count(bos) == 1
    ((text,),) = encoder.encode_batch([Text(text="Hello there")])
    assert isinstance(text, Encoded)
    assert text.input_ids.tolist().count(bos) == 1
    assert text.input_ids[0] == bos
    assert supervised(text, tokenizer) == ["<bos>Hello there<eos>"]
    ((again,),) = encoder.encode_batch([Text(text="<bos>Hello there<eos>")])
    assert isinstance(again, Encoded) and again.input_ids.tolist() == text.input_ids.tolist()


def test_the_completion_and_eos_of_plain_text_are_supervised() -> None:
    tokenizer = tokenizer_for("chatml")
    text = Text(text="Question: how many? Answer: 42", supervised_from=len("Question: how many? Answer:"))
    ((piece,),) = Encoder(tokenizer, None).encode_batch([text])  # type: ignore[misc]
    assert supervised(piece, tokenizer) == [" 42<|im_end|>"]
    ((piece,),) = Encoder(tokenizer, None, completion_only_loss=False).encode_batch([text])  # type: ignore[misc]
    assert piece.label_tokens == len(piece.input_ids) - 1
    with pytest.raises(UserError, match="no chat template"):
        Encoder(tokenizer, None).encode_batch([Conversation(messages=HELLO)])


def test_over_length() -> None:
    whole = encode_one(encoder_for("chatml"), LONG)
    length, cut = len(whole.input_ids), len(whole.input_ids) - 7
    assert not whole.shortened

    cut_off = encode_one(encoder_for("chatml", max_length=cut), LONG)
    assert cut_off.shortened
    assert cut_off.input_ids.tolist() == whole.input_ids[:cut].tolist()
    assert cut_off.labels.tolist() == whole.labels[:cut].tolist()
    exact = encode_one(encoder_for("chatml", max_length=length, over_length="drop"), LONG)
    assert not exact.shortened

    error = fails_with(encoder_for("chatml", max_length=cut, over_length="drop"), Conversation(messages=LONG))
    assert error.reason == "over_length" and str(length) in error.detail and str(cut) in error.detail
    # Cut within the question, nothing is supervised.
    assert fails_with(encoder_for("chatml", max_length=5), Conversation(messages=LONG)).reason == "no_label"


@pytest.mark.parametrize("limit", [2, 3, 10, 17, 50])
def test_split_predicts_every_label_once(limit: int) -> None:
    whole = encode_one(encoder_for("chatml"), LONG)
    (pieces,) = encoder_for("chatml", max_length=limit, over_length="split").encode_batch([Conversation(messages=LONG)])
    assert not isinstance(pieces, RowError) and len(pieces) > 1
    assert all(2 <= len(piece.input_ids) <= limit and piece.shortened for piece in pieces)
    assert all(piece.labels[0] == IGNORE_INDEX and piece.label_tokens > 0 for piece in pieces)
    labels = np.concatenate([piece.labels for piece in pieces])
    assert labels[labels != IGNORE_INDEX].tolist() == whole.labels[whole.labels != IGNORE_INDEX].tolist()
    for piece, following in zip(pieces, pieces[1:], strict=False):
        assert following.input_ids[0] == piece.input_ids[-1]


def test_failing_rows_have_reasons_and_do_not_affect_the_others() -> None:
    system = [{"role": "system", "content": "Be brief."}, *HELLO]
    good, failed, unsupervised, again = encoder_for("gemma").encode_batch(
        [
            Conversation(messages=HELLO),
            Conversation(messages=system),
            Conversation(messages=HELLO[:1]),
            Conversation(messages=HELLO),
        ]
    )
    assert isinstance(failed, RowError) and failed.reason == "template_error" and "System role" in failed.detail
    assert isinstance(unsupervised, RowError) and unsupervised.reason == "no_label"
    for result in (good, again):
        assert isinstance(result, list) and supervised(result[0], tokenizer_for("gemma")) == GEMMA.says(HELLO)
    twice = [HELLO[0], HELLO[0], HELLO[1]]
    assert fails_with(encoder_for("mistral"), Conversation(messages=twice)).reason == "template_error"


def test_a_message_that_the_template_does_not_render_is_an_error() -> None:
    system = [{"role": "system", "content": "Be brief."}, *HELLO]
    encoder = Encoder(tokenizer_for("mistral"), MISTRAL_V3)
    assert supervised(encode_one(encoder, HELLO), tokenizer_for("mistral")) == MISTRAL.says(HELLO)
    error = fails_with(encoder, Conversation(messages=system))
    assert error.reason == "not_rendered" and "message 1" in error.detail
    developer = [{"role": "developer", "content": "Be brief."}, *HELLO]
    assert fails_with(encoder_for("phi3"), Conversation(messages=developer)).reason == "not_rendered"


def test_each_row_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, seen = encoder_for("qwen3"), []
    tokenize = Encoder.tokenize
    monkeypatch.setattr(
        Encoder, "tokenize", lambda self, texts, *a, **k: seen.extend(texts) or tokenize(self, texts, *a, **k)
    )
    rows = [Conversation(messages=HELLO * 3), Conversation(messages=LONG), Conversation(messages=HELLO)]
    encoder.encode_batch(rows)
    assert len(seen) == len(rows)


def test_an_encoder_can_be_pickled() -> None:
    encoder = encoder_for("llama3")
    here = encode_one(encoder, HELLO)
    there = encode_one(pickle.loads(pickle.dumps(encoder)), HELLO)
    assert there.labels.tolist() == here.labels.tolist()


def test_truncation_left_enabled_in_the_tokenizer_has_no_effect() -> None:
    tokenizer = build_tokenizer(CHATML.tokens, CHATML.eos)
    encoder = Encoder(tokenizer, CHATML.template)
    tokenizer("a long text that is cut", truncation=True, max_length=3)
    assert supervised(encode_one(encoder, LONG), tokenizer) == CHATML.says(LONG)


def test_preview() -> None:
    tokenizer = tokenizer_for("chatml")
    encoded = encode_one(encoder_for("chatml"), HELLO)
    plain = preview(encoded, tokenizer, color=False).plain
    assert plain == "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n⟦Hello, you!<|im_end|>⟧\n"
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system="standard").print(preview(encoded, tokenizer))
    assert "⟦" not in stream.getvalue()
    assert "\x1b[1;32mHello, you!<|im_end|>" in stream.getvalue()


def test_preview_of_a_long_document() -> None:
    tokenizer = tokenizer_for("chatml")
    ids = np.array(tokenizer("a b c d " * 1000).input_ids[:2000], dtype=np.int32)
    labels = np.where(np.arange(2000) < 1800, ids, -100).astype(np.int32)
    plain = preview(Encoded(input_ids=ids, labels=labels), tokenizer, color=False).plain

    def decoded(start: int, stop: int) -> str:
        return tokenizer.decode(ids[start:stop].tolist())

    start = f"{decoded(0, 1)}⟦{decoded(1, 1000)}⟧"
    assert plain == f"{start} [... 500 tokens ...] ⟦{decoded(1500, 1800)}⟧{decoded(1800, 2000)}"
