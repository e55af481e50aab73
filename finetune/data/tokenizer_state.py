"""What a script's function changes in the tokenizer while it makes the rows.

It is kept with the rows: ranks and later runs that find them in the cache do not call the function, and the template
and tokens that a model was trained with are saved with it.
"""

from __future__ import annotations

from finetune.runtime.types import JsonObject, Tokenizer

# Settings of a tokenizer that functions set in place; Unsloth's `apply_chat_template` sets the last two, for its export
# to GGUF.
FIELDS = ("chat_template", "eos_token", "bos_token", "pad_token", "unk_token", "padding_side", "truncation_side",
          "model_max_length", "_ollama_modelfile", "_system_message")  # fmt: skip


def state(tokenizer: Tokenizer) -> JsonObject:
    """The values of FIELDS, as JSON."""
    found = {name: getattr(tokenizer, name, None) for name in FIELDS}
    return {name: value for name, value in found.items() if value is None or isinstance(value, str | int | dict)}


def changes(before: JsonObject, tokenizer: Tokenizer) -> JsonObject:
    """The values that differ from an earlier `state`."""
    return {name: value for name, value in state(tokenizer).items() if value != before.get(name)}


def restore(tokenizer: Tokenizer, changed: JsonObject) -> None:
    """Set what `changes` found."""
    for name, value in changed.items():
        if name in FIELDS and getattr(tokenizer, name, None) != value:
            setattr(tokenizer, name, value)
