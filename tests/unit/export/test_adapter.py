"""Tests of finetune/export/adapter.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.export.adapter import Adapter, find_name
from tests.helpers.export import WARNINGS, make_adapter, make_base

pytestmark = WARNINGS

REFUSED: dict[str, dict[str, Any]] = {
    "init_lora_weights: pissa": {"init_lora_weights": "pissa"},
    "layer_replication": {"layer_replication": [[0, 2]]},
    "not LORA": {"peft_type": "VERA"},
    "a_later_field": {"a_later_field": {"x": 1}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_merged_is_refused(words: str, tmp_path: Path) -> None:
    make_adapter(tmp_path, make_base(tmp_path / "base"))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    with pytest.raises(UserError, match=f"{words}.*--to adapter"):
        Adapter(tmp_path, config | REFUSED[words])


def test_names_with_and_without_a_prefix() -> None:
    names = ["model.layers.0.q.weight", "visual.layers.1.q.weight", "model.layers.1.q.weight", "norm.weight"]
    assert find_name("model.layers.0.q", "weight", names) == "model.layers.0.q.weight"
    assert find_name("model.language_model.layers.0.q", "weight", names) == "model.layers.0.q.weight"
    assert find_name("model.language_model.layers.1.q", "weight", names) is None  # two could be meant
    assert find_name("model.layers.2.q", "weight", names) is None
    assert find_name("model.norm", "weight", names) == "norm.weight"
