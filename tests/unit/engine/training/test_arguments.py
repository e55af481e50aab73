"""TRL's training arguments, by the names that the installed SFTConfig has."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import trl

from finetune.engine.training.arguments import current_field_names


@pytest.mark.parametrize(
    ("fields", "given", "expected"),
    [
        (
            "learning_rate gradient_checkpointing gradient_checkpointing_kwargs",  # transformers up to 5.17
            {"learning_rate": 1e-3, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"a": 1}},
            {"learning_rate": 1e-3, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"a": 1}},
        ),
        (
            "learning_rate activation_checkpointing activation_checkpointing_kwargs",  # from 5.18 on
            {"learning_rate": 1e-3, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"a": 1}},
            {"learning_rate": 1e-3, "activation_checkpointing": True, "activation_checkpointing_kwargs": {"a": 1}},
        ),
        (  # both, of which the old one is deprecated
            "gradient_checkpointing activation_checkpointing gradient_checkpointing_kwargs",
            {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None},
            {"activation_checkpointing": False, "gradient_checkpointing_kwargs": None},
        ),
        (  # the user's own setting, by the new name, wins
            "activation_checkpointing gradient_checkpointing",
            {"gradient_checkpointing": True, "activation_checkpointing": False},
            {"activation_checkpointing": False},
        ),
    ],
    ids=["old names", "new names", "both names", "both given"],
)
def test_checkpointing_settings_take_the_names_that_sft_config_has(
    monkeypatch: pytest.MonkeyPatch, fields: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    monkeypatch.setattr(trl, "SFTConfig", dataclasses.make_dataclass("SFTConfig", fields.split()))
    before = dict(given)
    assert current_field_names(given) == expected
    assert given == before  # the argument is not changed
