"""The end of a turn in a GGUF file: everything else stays as it is."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from finetune.export import gguf_metadata

ALIGNMENT = 64
UINT8, UINT32, BOOL, STRING, ARRAY, FLOAT64 = 0, 4, 7, 8, 9, 12


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def gguf(*pairs: bytes, data: bytes = b"weights!" * 32) -> bytes:
    """A file with one tensor of 256 bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs)
    head += text("output.weight") + struct.pack("<I2QIQ", 2, 16, 16, 24, 0)
    return head + bytes(-len(head) % ALIGNMENT) + data


PAIRS = [
    pair("general.alignment", UINT32, struct.pack("<I", ALIGNMENT)),
    pair("general.name", STRING, text("a 猫")),
    pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("bc")),
    pair("nested", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", UINT8, 3) + b"abc"),
    pair("general.double", FLOAT64, struct.pack("<d", 1.5)),
    pair("tokenizer.ggml.add_bos_token", BOOL, b"\1"),
    pair("tokenizer.ggml.eos_token_id", UINT32, struct.pack("<I", 2)),
]


def eot(token: int) -> bytes:
    return pair("tokenizer.ggml.eot_token_id", UINT32, struct.pack("<I", token))


def test_the_token_is_added_and_the_tensors_stay_aligned(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf(*PAIRS))
    assert gguf_metadata.add_end_of_turn(file, 7)
    assert file.read_bytes() == gguf(*PAIRS, eot(7))
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    "content", [gguf(*PAIRS, eot(5)), gguf(*PAIRS[:-1], eot(5)), b"no GGUF file", b"GGUF" + bytes(20)]
)
def test_a_file_that_names_one_or_is_of_another_format_stays(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert not gguf_metadata.add_end_of_turn(file, 7)
    assert file.read_bytes() == content


def test_eos_is_not_named_twice(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf(*PAIRS))
    assert not gguf_metadata.add_end_of_turn(file, 2)
