"""Which settings determine the result of a run."""

from __future__ import annotations

import pytest
import transformers

from finetune.engine.checkpoint import run_settings
from tests.unit.engine.checkpoint.test_resume import rates


@pytest.mark.parametrize(
    ("schedule", "warmup", "depends"),
    [
        ("cosine", 0, True),
        ("linear", 3, True),
        ("constant", 0.5, False),
        ("constant_with_warmup", 3, False),
        ("constant_with_warmup", 0.5, True),
        ("inverse_sqrt", 3, False),
        ("polynomial", 0, True),
    ],
)
def test_which_schedules_depend_on_the_length(schedule: str, warmup: float, depends: bool) -> None:
    """Against transformers: are the first 8 rates of 10 steps those of 20?"""
    found = run_settings.depends_on_length({"training.lr_scheduler_type": schedule, "training.warmup_steps": warmup})
    arguments = transformers.TrainingArguments(warmup_steps=warmup)
    curves = [rates(schedule, 1e-2, total, arguments.get_warmup_steps(total))[:8] for total in (10, 20)]
    assert found == depends == (curves[0] != curves[1])
