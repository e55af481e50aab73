"""Tests of finetune/runtime/communication.py."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from finetune.runtime import communication


def test_ddps_account() -> None:
    def model(**data: int) -> Any:
        return types.SimpleNamespace(_get_ddp_logging_data=lambda: data)

    found = communication.exposed_and_hidden(
        model(backward_comm_time=9_000_000, backward_compute_comm_overlap_time=2_000_000)
    )
    assert found == pytest.approx((0.007, 0.002))
    # The first bucket may be full only when the backward pass is over.
    late = model(backward_comm_time=1_000_000, backward_compute_comm_overlap_time=3_000_000)
    assert communication.exposed_and_hidden(late) == (0.0, 0.001)
    assert communication.exposed_and_hidden(model(rank=0)) is None
    assert communication.exposed_and_hidden(torch.nn.Linear(1, 1)) is None
