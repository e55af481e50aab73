"""Which tokens a span of the text has: from the lengths of the tokens in bytes, or from the tokenizer's offsets.

A token that extends beyond the span is included if its part outside is only whitespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from finetune.runtime.types import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

Span = tuple[int, int]


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray | None:
    """Length in bytes of every token, int32 [vocabulary], or None if lengths do not determine positions in ASCII text.

    Computing offsets takes a quarter of the tokenizer's time. A byte-level tokenizer (GPT-2, Llama 3, Qwen) does not
    need them: its tokens concatenate to the bytes of the text, and Unicode normalization does not change ASCII.
    """
    from tokenizers import decoders, normalizers

    backend = tokenizer.backend_tokenizer
    unicode = (normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD)
    if not isinstance(backend.decoder, decoders.ByteLevel):  # pyright: ignore[reportAttributeAccessIssue]
        return None
    if backend.normalizer is not None and not isinstance(backend.normalizer, unicode):
        return None
    tokens = backend.get_vocab(with_added_tokens=False)  # each character is one byte
    added = backend.get_added_tokens_decoder()
    if any(token.lstrip or token.rstrip for token in added.values()):  # these absorb adjacent whitespace
        return None
    lengths = np.zeros(max([*tokens.values(), *added], default=-1) + 1, dtype=np.int32)
    for token, index in tokens.items():
        lengths[index] = len(token)
    for index, token in added.items():
        lengths[index] = len(token.content.encode())
    probe = "Hello,  you!\n\n\t 12 words'll do;\r\n"
    ids = backend.encode(probe, add_special_tokens=False).ids
    return lengths if int(lengths[ids].sum()) == len(probe) else None


def tokens_by_length(ends: np.ndarray, text: str, span: Span) -> tuple[int, int]:
    """The tokens [first, stop) of a span, from the position in the text where each token ends."""
    start, end = span
    if start >= end:
        return 0, 0
    first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(ends, end, side="left")
    begin = ends[first - 1] if first else 0
    outside_before, outside_after = text[begin:start], text[end : ends[last]]
    return int(first) + bool(outside_before.strip()), int(last) + 1 - bool(outside_after.strip())


def tokens_by_offset(encoding: Encoding, text: str, span: Span) -> tuple[int, int]:
    """The tokens [first, stop) of a span, from the tokenizer's offsets, looked up only at the edges of the span."""
    start, end = span
    # A character may have no token (a trimmed space): search inward from both edges.
    first = next((t for i in range(start, end) if (t := encoding.char_to_token(i)) is not None), None)
    if first is None:
        return 0, 0
    last = next(t for i in range(end - 1, start - 1, -1) if (t := encoding.char_to_token(i)) is not None)
    while first > 0 and (chars := encoding.token_to_chars(first - 1)) and chars[0] >= start:
        first -= 1  # a token of trimmed whitespace covers no character
    while last + 1 < len(encoding) and (chars := encoding.token_to_chars(last + 1)) and chars[0] < end:
        last += 1  # a character of several bytes, such as an emoji, may have several tokens
    outside_before = text[encoding.token_to_chars(first)[0] : start]  # pyright: ignore[reportOptionalSubscript]
    outside_after = text[end : encoding.token_to_chars(last)[1]]  # pyright: ignore[reportOptionalSubscript]
    return first + bool(outside_before.strip()), last + 1 - bool(outside_after.strip())
