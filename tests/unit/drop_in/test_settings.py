"""Tests of finetune/drop_in/settings.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.errors import UserError
from tests.helpers.drop_in import WARNINGS

pytestmark = WARNINGS


def test_a_batch_means_what_it_means_to_trl_unless_it_is_fixed(make: Callable[..., Any]) -> None:
    trainer = make(gradient_accumulation_steps=3)
    assert trainer.plan.global_batch_size == 12
    fixed = make(global_batch_size=8, per_device_train_batch_size=2)
    assert fixed.plan.global_batch_size == 8 and fixed.args.gradient_accumulation_steps == 4


@pytest.mark.parametrize(
    ("ranks", "per_device", "expected"),
    [(1, 2, (2, 4)), (2, 2, (2, 2)), (4, 2, (2, 1)), (8, 2, (1, 1)), (1, 3, (2, 4)), (2, 8, (4, 1)), (1, 8, (8, 1))],
)
def test_a_fixed_batch_fits_every_number_of_ranks_that_divides_it(
    ranks: int, per_device: int, expected: tuple[int, int]
) -> None:
    """A rank holds at most `per_device_train_batch_size` rows at once."""
    from finetune.drop_in import settings

    batch = settings.batch(SimpleNamespace(per_device_train_batch_size=per_device), 8, ranks)
    assert (batch.per_device, batch.accumulation, batch.global_batch_size) == (*expected, 8)
    with pytest.raises(UserError, match="global_batch_size 8"):
        settings.batch(SimpleNamespace(per_device_train_batch_size=per_device), 8, 3 * ranks)


def test_a_batch_of_another_number_of_ranks_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the arguments are those that it was launched with: 4 rows per rank, once per step."""
    from finetune.drop_in import settings

    args = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=1)

    def kept(ranks: int, rows: int, launched: int) -> tuple[int, ...] | None:
        monkeypatch.setattr(settings.distributed, "ranks", lambda: SimpleNamespace(world_size=ranks))
        had = {"per_device": 1, "global_batch_size": rows, "world_size": launched}
        found = settings.resumed_batch(args, {"batch": had})
        return found and (found.per_device, found.accumulation, found.global_batch_size)

    assert kept(2, 4, 1) == (2, 1, 4) and kept(1, 8, 2) == (4, 2, 8) and kept(2, 16, 4) == (4, 2, 16)
    assert kept(2, 8, 2) is None and kept(2, 6, 1) is None
    assert settings.resumed_batch(args, {}) is None
    with pytest.raises(UserError, match="global_batch_size 4"):
        kept(3, 4, 1)


def test_a_script_keeps_weights_as_it_loads_the_model() -> None:
    from finetune.drop_in import settings
    from finetune.engine.optimizer import master_weights

    half, whole = torch.nn.Linear(3, 3).bfloat16(), torch.nn.Linear(3, 3)
    assert settings.weights_as_loaded(half).kind == "none" and settings.weights_as_loaded(whole).kind == "float32"
    text = master_weights.lost_updates_warning(half, settings.weights_as_loaded(half), 2e-5)
    assert text is not None and "12 trained weights have 16 bits" in text and "dtype=torch.float32" in text
    assert master_weights.lost_updates_warning(whole, settings.weights_as_loaded(whole), 2e-5) is None
    half.requires_grad_(False)  # a frozen base under an adapter
    assert settings.weights_as_loaded(half).kind == "float32"
