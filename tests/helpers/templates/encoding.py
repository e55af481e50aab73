"""Encoders of known chat templates, and what they supervise."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from finetune.data import IGNORE_INDEX
from finetune.data.formats import Conversation, RowError, Text
from finetune.data.templates import encoder as encoding
from finetune.data.templates.encoder import Encoded, Encoder
from finetune.data.templates.token_ranges import byte_lengths
from tests.helpers.templates.chat_templates import CHAT_TEMPLATES, build_tokenizer

HELLO = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello, you!"}]


LONG = [{"role": "user", "content": "How many? " * 3}, {"role": "assistant", "content": "seventy-two clips " * 9}]


@functools.cache
def tokenizer_for(name: str, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    case = CHAT_TEMPLATES[name]
    tokenizer = build_tokenizer(case.tokens, case.eos, case.bos)
    if trim_offsets:  # like GPT-2: a token's offsets exclude its leading space
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # type: ignore[attr-defined]
    return tokenizer


@functools.cache
def encoder_for(name: str, trim_offsets: bool = False, **options: Any) -> Encoder:
    tokenizer = tokenizer_for(name, trim_offsets)
    assert byte_lengths(tokenizer) is not None
    with pytest.MonkeyPatch.context() as patch:
        if trim_offsets:  # use offsets for all rows, not only for non-ASCII ones
            patch.setattr(encoding, "byte_lengths", lambda tokenizer: None)
        return Encoder(tokenizer, CHAT_TEMPLATES[name].template, **options)


def encode_one(encoder: Encoder, messages: list[dict], **fields: Any) -> Encoded:
    (result,) = encoder.encode_batch([Conversation(messages=messages, **fields)])
    assert not isinstance(result, RowError), result
    (piece,) = result
    return piece


def fails_with(encoder: Encoder, row: Conversation | Text) -> RowError:
    (result,) = encoder.encode_batch([row])
    assert isinstance(result, RowError)
    return result


def supervised(encoded: Encoded, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The decoded runs of supervised tokens; also checks that every label equals its token."""
    runs: list[list[int]] = []
    before = IGNORE_INDEX
    for token, label in zip(encoded.input_ids.tolist(), encoded.labels.tolist(), strict=True):
        assert label in (IGNORE_INDEX, token)
        if label != IGNORE_INDEX:
            if before == IGNORE_INDEX:
                runs.append([])
            runs[-1].append(label)
        before = label
    return [tokenizer.decode(run) for run in runs]
