"""Tests of finetune/drop_in/names.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from tests.helpers.drop_in import WARNINGS

pytestmark = WARNINGS


def test_messages_name_the_arguments_of_a_script(make: Callable[..., Any], tmp_path: Path) -> None:
    from finetune.drop_in.names import with_script_names

    make(save_strategy="steps", save_steps=2).train()
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    with pytest.raises(UserError) as error:
        make(learning_rate=1e-3).train(resume_from_checkpoint=checkpoint)
    assert "- learning_rate: was 0.01, now 0.001" in str(error.value)
    assert "apply them with train(resume_with_changes=True)" in str(error.value)
    with pytest.raises(UserError, match=r"steps: max_steps=9, train\(resume_from_checkpoint=True, resume_with_"):
        make(max_steps=9).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(UserError, match=r"^max_steps is 1, .* earlier checkpoint as resume_from_checkpoint.$"):
        make(max_steps=1).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(UserError, match=r"^resume_from_checkpoint is nowhere: the folder does not exist"):
        make().train(resume_from_checkpoint="nowhere")
    with pytest.raises(UserError, match=r"^global_batch_size 7 is not a multiple of|^The global batch"):
        make(global_batch_size=2**21)
    for text, expected in {
        "set training.seed and data.max_length": "set seed and max_length",
        "set training.gradient_checkpointing: true, or model.load_in_4bit: true": (
            "set gradient_checkpointing=True, or load_in_4bit=True"
        ),
        "lora.r: was 8, now 16": "LoraConfig's r: was 8, now 16",
        "Set data.eval_file or data.eval_fraction.": "Set eval_dataset.",
        "see data.md and training.py": "see data.md and training.py",
    }.items():
        assert with_script_names(text) == expected
