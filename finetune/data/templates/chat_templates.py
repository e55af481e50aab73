"""The chat templates that this project knows by name, and how a configured one is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from jinja2 import TemplateSyntaxError

from finetune.data.templates.render import check_syntax
from finetune.errors import UserError
from finetune.runtime import files
from finetune.runtime.types import Tokenizer

# The published templates, without tools and images, and ChatML with tools as Qwen2.5 and Hermes write them (without a
# default system prompt). They refuse unknown roles.
TEMPLATES = {
    "chatml": r"""
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "chatml_tools": r"""
{%- set system = messages[0].content if messages[0].role in ('system', 'developer') else '' %}
{%- if tools %}
    {{- '<|im_start|>system\n' + (system + '\n\n' if system else '') }}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role in ('system', 'developer') %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>' + message.role + ('\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls %}
            {%- set function = call.function or call %}
            {{- '\n<tool_call>\n{"name": ' + function.name | tojson + ', "arguments": ' }}
            {{- (function.arguments if function.arguments is defined else {}) | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role in ('user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "llama3": r"""
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
    "gemma": r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('Gemma has no system role, and roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('user' if message.role == 'user' else 'model') + '\n' }}
    {{- message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}""",
    "mistral": r"""
{{- bos_token }}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for message in messages[1 if system else 0:] %}
    {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant/user/...') }}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "phi": r"""
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('Only the roles system, user and assistant are supported') }}
    {%- endif %}
    {{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}""",
}


def load_template(tokenizer: Tokenizer | None, name_or_path: str | None = None) -> str | None:
    """Load a chat template: by default the tokenizer's (None if it has none); else one of TEMPLATES by name, a Jinja
    file, or None for "none". Raises UserError for an unknown name, an unreadable file or invalid Jinja."""
    if name_or_path is None:
        assert tokenizer is not None  # needed only without a name
        template = cast("str | dict[str, str] | None", tokenizer.chat_template)
        source = f"of the tokenizer {tokenizer.name_or_path!r}"
        if isinstance(template, dict):  # some tokenizers have several, by purpose
            if "default" not in template:
                raise UserError(
                    f"The chat template {source} has several variants and no 'default': {', '.join(sorted(template))}. "
                    "Set model.chat_template to a Jinja file."
                )
            template = template["default"]
    elif name_or_path == "none":
        return None
    elif name_or_path in TEMPLATES:
        return TEMPLATES[name_or_path]
    elif Path(name_or_path).is_file():
        source = f"in {name_or_path}"
        try:
            template = files.read_text(Path(name_or_path))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"The chat template {source} cannot be read: {error}. Set model.chat_template to a Jinja file in UTF-8."
            ) from error
    else:
        raise UserError(
            f"model.chat_template is neither a known name nor a file: {name_or_path!r}. Set it to "
            f"{', '.join(TEMPLATES)}, none, or the path of a Jinja file."
        )
    if template is not None:
        try:
            check_syntax(template)
        except TemplateSyntaxError as error:
            raise UserError(
                f"The chat template {source} is invalid Jinja: line {error.lineno}: {error.message}. Correct it, or "
                "set model.chat_template to another one."
            ) from error
    return template


# Tokens that end documents in the pretraining of GPT-2, Qwen, SmolLM and Phi; Llama 3 and Granite; Gemma; Llama 2 and
# Mistral.
_DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")


def document_end(tokenizer: Tokenizer) -> str:
    """The token that ended documents in the model's pretraining. It is EOS, but the EOS of a chat model may be the end
    of a turn (Qwen's <|im_end|>); then it is another of its special tokens."""
    if tokenizer.eos_token in _DOCUMENT_ENDS:
        return tokenizer.eos_token
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return next((end for end in _DOCUMENT_ENDS if end in added), tokenizer.eos_token or "")
