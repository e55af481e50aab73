"""Real chat templates as published (without tool parts).

Each has an independent reference in plain Python for the supervised text: the rendered content plus the end-of-turn
token, one string per assistant turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Messages = list[dict[str, str]]

# No runs of whitespace, so that no token merges whitespace of a template with that of a message.
CORPUS = (
    "The assistant told the user that the system works well.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "A model answers: 48 / 2 = 24, then 48 + 24 = 72. How many clips did she sell altogether?",
    "Être ou ne pas être, voilà la question. Größe, naïve café, 日本語 テスト, emoji 🙂🎉.",
)


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    template: str
    tokens: tuple[str, ...]
    says: Callable[[Messages], list[str]]  # the supervised text of each assistant turn
    bos: str | None = None
    eos: str
    system: bool = True


def build_tokenizer(
    tokens: Iterable[str], eos: str, bos: str | None = None, corpus: Iterable[str] = CORPUS
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, like those of GPT-2, Llama 3 and Qwen, with these special tokens."""
    special = list(dict.fromkeys([*tokens, eos, *([bos] if bos else [])]))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[attr-defined]
    backend.decoder = decoders.ByteLevel()  # type: ignore[attr-defined]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)


def _words(end: str, *, trim: bool = False, before: str = "") -> Callable[[Messages], list[str]]:
    def says(messages: Messages) -> list[str]:
        spoken = [message["content"] for message in messages if message["role"] == "assistant"]
        return [before + (words.strip() if trim else words) + end for words in spoken]

    return says


def _qwen3(messages: Messages) -> list[str]:
    """Thinking is kept only after the last question; the last message gets an empty block if it has none."""
    last_question = max(i for i, message in enumerate(messages) if message["role"] == "user")
    turns = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        thought, words = "", message["content"]
        if "</think>" in words:
            thought = words.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
            words = words.split("</think>")[-1].lstrip("\n")
        if i > last_question and (i == len(messages) - 1 or thought):
            words = "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + words.lstrip("\n")
        turns.append(words + "<|im_end|>")
    return turns


CHATML = ChatTemplate(
    template=(
        "{% for message in messages %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    tokens=("<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
    says=_words("<|im_end|>"),
)

# The same with the marks that transformers' return_assistant_tokens_mask needs.
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = ChatTemplate(
    template=(
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
        "+ message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    says=_words("<|eot_id|>", trim=True),
)

GEMMA = ChatTemplate(
    template=(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
        "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    tokens=("<start_of_turn>", "<end_of_turn>"),
    bos="<bos>",
    eos="<eos>",
    says=_words("<end_of_turn>", trim=True),
    system=False,
)

# From Mistral-7B-Instruct-v0.2. It has no generation prompt: the answer follows [/INST].
MISTRAL = ChatTemplate(
    template=(
        "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
        "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
        "{{- bos_token }}{%- for message in loop_messages %}"
        "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}"
        "{%- endif %}{%- if message['role'] == 'user' %}{%- if loop.first and system_message is defined %}"
        "{{- ' [INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }}{%- else %}"
        "{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}"
        "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}{%- else %}"
        "{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}{%- endfor %}"
    ),
    tokens=("[INST]", "[/INST]"),
    bos="<s>",
    eos="</s>",
    says=_words("</s>", before=" "),
)

# Mistral-7B-Instruct-v0.3 writes the system message into the last user message, but only if that is the last message:
# in a complete conversation it is silently lost.
MISTRAL_V3 = MISTRAL.template.replace("loop.first and system_message", "loop.last and system_message")

# A trap: EOS follows the last turn of any role. It is not the end-of-turn token.
PHI3 = ChatTemplate(
    template=(
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}"
        "{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
        "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    tokens=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    eos="<|endoftext|>",
    says=_words("<|end|>"),
)

PHI4 = ChatTemplate(
    template=(
        "{% for message in messages %}{% if (message['role'] == 'system') %}"
        "{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}"
        "{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}"
        "{% elif (message['role'] == 'assistant') %}"
        "{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
    ),
    tokens=("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    eos="<|im_end|>",
    says=_words("<|im_end|>"),
)

QWEN3 = ChatTemplate(
    template="""
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string \
and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1]\
.lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' \
+ content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {{- tool_call.arguments | tojson }}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}""",
    tokens=("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    eos="<|im_end|>",
    says=_qwen3,
)

CHAT_TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "phi4": PHI4,
    "qwen3": QWEN3,
}
