"""Tests of finetune/export/weights.py."""

from __future__ import annotations

import torch

from finetune.export.weights import Entry, shards
from tests.helpers.export import WARNINGS

pytestmark = WARNINGS


def test_shards_hold_at_most_so_many_bytes() -> None:
    entries = [Entry(str(n), torch.bfloat16, (size,)) for n, size in enumerate([10, 30, 20, 200, 1])]
    assert [[one.name for one in group] for group in shards(entries, 100)] == [["0", "1"], ["2"], ["3"], ["4"]]
