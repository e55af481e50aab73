"""Tests of finetune/export/weights.py."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from finetune.export.weights import Entry, write
from tests.helpers.export import WARNINGS

pytestmark = WARNINGS


def test_files_hold_at_most_so_many_bytes(tmp_path: Path) -> None:
    tensors = {str(n): torch.full((size,), n, dtype=torch.bfloat16) for n, size in enumerate([10, 30, 20, 200, 1])}
    entries = [Entry(name, one.dtype, tuple(one.shape)) for name, one in tensors.items()]
    write(tmp_path, entries, tensors.__getitem__, 100)
    files = {path.name: load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))}
    assert [list(one) for one in files.values()] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert all(torch.equal(one, tensors[name]) for group in files.values() for name, one in group.items())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, group in files.items() for name in group}
