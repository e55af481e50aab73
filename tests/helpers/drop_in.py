"""What the tests of drop_in share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from finetune.errors import UserError

WARNINGS = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]  # marks of every test

TEXTS = [{"text": f"row {number} " + "word " * (number % 7 + 1)} for number in range(24)]
PAIRS = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(24)]
SETTINGS: dict[str, Any] = {
    "max_steps": 4, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "learning_rate": 1e-2,
    "bf16": False, "use_cpu": True,
}  # fmt: skip


def dataset(rows: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows) if isinstance(rows, list) else rows


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def refusal(make: Callable[..., Any], *arguments: Any, **given: Any) -> str:
    with pytest.raises(UserError) as caught:
        make(*arguments, **given)
    assert isinstance(caught.value, ValueError)  # what TRL raises
    return str(caught.value)
