"""Adds the token that ends a turn to a GGUF file.

llama.cpp's converter writes the tokenizer's EOS alone. llama.cpp knows common ends of turns (<|im_end|>, <end_of_turn>,
<|eot_id|>) by their text; at any other it stops only if `tokenizer.ggml.eot_token_id` of the file names it.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import BinaryIO

from finetune.runtime import files

EOS, EOT = "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"
ALIGNMENT = "general.alignment"
_MAGIC = b"GGUF"
_UINT32, _STRING, _ARRAY = 4, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, _UINT32: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by its type


def add_end_of_turn(path: Path, token: int) -> bool:
    """Name the token that ends a turn. Returns whether the file was changed: not if it names one already, if that is
    its EOS, or if it is not a little-endian GGUF file of version 2 or 3."""
    with files.open_regular(path) as source:
        if source.read(4) != _MAGIC or _number(source, "<I") not in (2, 3):
            return False
        tensors, pairs = _number(source, "<Q"), _number(source, "<Q")
        start = source.tell()
        found: dict[str, int] = {}
        for _ in range(pairs):
            key, kind = _text(source), _number(source, "<I")
            if kind == _UINT32:
                found[key] = _number(source, "<I")
            else:
                _skip(source, kind)
        if EOT in found or found.get(EOS) == token:
            return False
        end_of_pairs = source.tell()
        for _ in range(tensors):
            _text(source)
            source.seek(8 * _number(source, "<I") + 4 + 8, os.SEEK_CUR)  # dimensions, type, offset
        end_of_header, alignment = source.tell(), found.get(ALIGNMENT, 32)
        temporary = path.with_name(f"{path.name}.partial")
        with files.open_new(temporary) as target:
            source.seek(0)
            target.write(source.read(start - 8) + struct.pack("<Q", pairs + 1))
            source.seek(start)
            target.write(source.read(end_of_pairs - start))
            target.write(struct.pack("<Q", len(EOT)) + EOT.encode() + struct.pack("<II", _UINT32, token))
            target.write(source.read(end_of_header - end_of_pairs))
            target.write(bytes(-target.tell() % alignment))
            source.seek(end_of_header + -end_of_header % alignment)  # offsets of tensors count from here
            shutil.copyfileobj(source, target, 2**24)
    os.replace(temporary, path)
    return True


def _number(source: BinaryIO, form: str) -> int:
    return struct.unpack(form, source.read(struct.calcsize(form)))[0]


def _text(source: BinaryIO) -> str:
    return source.read(_number(source, "<Q")).decode("utf-8", "replace")


def _skip(source: BinaryIO, kind: int) -> None:
    """Go past one value."""
    if kind == _STRING:
        source.seek(_number(source, "<Q"), os.SEEK_CUR)
    elif kind == _ARRAY:
        inner, count = _number(source, "<I"), _number(source, "<Q")
        if inner in _SIZES:
            source.seek(count * _SIZES[inner], os.SEEK_CUR)
        else:
            for _ in range(count):
                _skip(source, inner)
    else:
        source.seek(_SIZES[kind], os.SEEK_CUR)
