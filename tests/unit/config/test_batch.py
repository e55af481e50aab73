"""Tests of finetune/config/batch.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.config import (
    TrainingConfig,
    fixed_batch_arguments,
    load,
    resolve_batch,
    with_fixed_batch,
)
from finetune.errors import UserError
from tests.helpers.config import MODEL


def batch(world_size: int, **settings: int) -> tuple[int, int, int]:
    found = resolve_batch(TrainingConfig(**settings), world_size)
    return found.per_device, found.accumulation, found.global_batch_size


def test_batch():
    assert [batch(world) for world in (1, 2, 4, 16)] == [(8, 2, 16), (8, 1, 16), (4, 1, 16), (1, 1, 16)]
    assert batch(1, global_batch_size=14) == (7, 2, 14)
    assert batch(2, global_batch_size=26) == (1, 13, 26)
    assert batch(2, global_batch_size=32, per_device_train_batch_size=4) == (4, 4, 32)
    assert batch(2, global_batch_size=32, gradient_accumulation_steps=1) == (16, 1, 32)
    assert batch(2, gradient_accumulation_steps=3) == (8, 3, 48)
    assert batch(2, gradient_accumulation_steps=3, per_device_train_batch_size=2) == (2, 3, 12)
    assert batch(2, per_device_train_batch_size=4) == (4, 1, 8)  # as in TRL: it grows with the number of ranks
    assert batch(3, per_device_train_batch_size=5) == (5, 1, 15)


def test_ranks_that_share_rows_count_as_one():
    assert batch(4, global_batch_size=8, context_parallel=2) == batch(2, global_batch_size=8)
    assert batch(4, per_device_train_batch_size=3, context_parallel=4) == (3, 1, 3)
    with pytest.raises(
        UserError, match=r"context_parallel 4 does not divide 6 \(processes\).* Set it to 1 or 2 or 3 or 6"
    ):
        batch(6, context_parallel=4)
    with pytest.raises(UserError, match=r"multiple of 3 \(6 processes in groups of 2 that share rows\)\. Use") as error:
        batch(6, global_batch_size=8, context_parallel=2)
    assert "which fit 8: 2, 4, 8, 16. Or" in str(error.value)


def test_a_batch_that_grows_is_the_same_on_every_world_size_once_it_is_fixed():
    training = TrainingConfig(per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert with_fixed_batch(training, 4).global_batch_size == 24
    assert {resolve_batch(with_fixed_batch(training, 4), world).global_batch_size for world in (1, 2, 4)} == {24}
    given = load([*MODEL, "--training.per_device_train_batch_size", "2", *fixed_batch_arguments(training, 4)]).training
    assert resolve_batch(given, 1) == resolve_batch(with_fixed_batch(training, 4), 1)
    assert fixed_batch_arguments(TrainingConfig(global_batch_size=8), 2) == []


@given(st.integers(1, 300), st.integers(1, 64), st.none() | st.integers(1, 20), st.none() | st.integers(1, 20))
def test_batch_is_exact_or_refused(size, world, per_device, accumulation):
    training = TrainingConfig(
        global_batch_size=size, per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulation
    )
    possible = [
        (p, a)
        for p in ([per_device] if per_device else range(1, size + 1))
        for a in ([accumulation] if accumulation else range(1, size + 1))
        if p * a * world == size
    ]
    try:
        found = resolve_batch(training, world)
    except UserError:
        assert not possible
    else:
        assert (found.per_device, found.accumulation) in possible and found.global_batch_size == size
        if per_device is None and accumulation is None:
            assert found.per_device == max(p for p, _ in possible if p <= 8)


def test_batch_that_does_not_fit():
    with pytest.raises(UserError) as caught:
        batch(3, global_batch_size=16)
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert "global_batch_size 16" in text and "3 (processes)" in text
    assert "which fit 16: 1, 2, 4, 8, 16." in text and "to 15 or 18" in text

    with pytest.raises(UserError, match=r"which fit 4: 1, 2, 4\. .*size to 8\."):
        batch(8, global_batch_size=4)
    with pytest.raises(UserError, match=r"16 \(the default\) is not .* which fit 16: 1, 2, 4, 8, 16\. .*to 15 or 18"):
        batch(3)
    with pytest.raises(UserError, match=r"16 is not .* No number of processes .*to 15 or 20, or remove"):
        batch(1, global_batch_size=16, per_device_train_batch_size=5)
    with pytest.raises(UserError, match=r"32 is not 2 .* x 4 .* x 2 .* = 16\. .*which fit 32: 4\. .*to 16"):
        batch(2, global_batch_size=32, per_device_train_batch_size=4, gradient_accumulation_steps=2)
