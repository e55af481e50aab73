"""The predictor against timelines worked out by hand, torch's own buckets, and what must hold for any numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from finetune.measure.predict import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    MIB,
    Curve,
    Gradients,
    Prediction,
    Work,
    all_reduce_curve,
    buckets,
    exposed_seconds,
    line_through,
    predict,
)

WORK = Work(
    per_device=1,
    compute_seconds=0.9,
    accumulation=3,
    backward_share=2 / 3,
    data_seconds=0.03,
    optimizer_seconds=0.05,
    other_seconds=0.02,
    tokens=10_000.0,
    steps=100.0,
    start_up_seconds=20.0,
    gradients=Gradients(sizes=()),
    peak_memory_bytes=5e9,
    memory_bytes=None,
)
# 1 MiB in 10 ms, 100 MiB in 1 s: seconds proportional to bytes in between.
CURVE = Curve(points=((MIB, 0.01), (100 * MIB, 1.0)))


def test_between_sizes_the_logarithms_are_a_line_below_is_latency_and_above_bandwidth() -> None:
    curve = Curve(points=((1000, 0.001), (100_000, 0.01)))
    assert curve.seconds(10_000) == pytest.approx(math.sqrt(0.001 * 0.01))  # half way in both logarithms
    assert curve.seconds(1) == curve.seconds(1000) == 0.001
    assert curve.seconds(1_000_000) == pytest.approx(0.1)
    assert curve.seconds(0) == 0.0
    assert CURVE.seconds(10 * MIB) == pytest.approx(0.1)


def test_a_larger_message_is_never_faster_whatever_was_measured() -> None:
    noisy = Curve(points=((100, 0.005), (1000, 0.003), (10_000, 0.02)))
    assert noisy.seconds(1000) == 0.005
    for points in ((), ((0, 1.0),), ((10, 0.0),)):
        with pytest.raises(ValueError, match="positive"):
            Curve(points=points)


def test_a_curve_of_what_bench_comm_writes() -> None:
    measured = {"collectives": {"all_reduce": [{"bytes": 8, "seconds": {"median": 0.5, "mean": 9.0}}]}}
    assert all_reduce_curve(measured).points == ((8.0, 0.5),)


def test_buckets_are_those_of_torch() -> None:
    numels = [300_000, 5, 7_000_000, 128, 12_000_000, 260_000, 40, 3_000_000, 1_000_000, 90_000, 1]
    tensors = [torch.empty(n, device="meta") for n in reversed(numels)]  # gradients come in the reverse order
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * MIB]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    expected = [sum(tensors[i].numel() * 4 for i in bucket) for bucket in indices]
    assert len(expected) > 3
    assert buckets([4 * n for n in numels]) == expected
    assert FIRST_BUCKET_BYTES == dist._DEFAULT_FIRST_BUCKET_BYTES


def test_buckets_by_hand() -> None:
    assert buckets([]) == []
    assert buckets([10, 20, 30], cap=100, first=25) == [30, 30]  # 30 fills the first; 20 + 10 never fill the second
    assert buckets([5, 5, 5, 5], cap=10, first=5) == [5, 10, 5]


def test_exposed_communication_by_hand() -> None:
    # Backward 1 s; three buckets of 10 MiB, ready at 1/3, 2/3 and 1; each takes 0.1 s: only the last is seen.
    assert exposed_seconds([10 * MIB] * 3, 1.0, CURVE) == pytest.approx(0.1)
    # Backward 0.15 s: ready at 0.05, 0.10, 0.15; reduced until 0.15, 0.25, 0.35: 0.2 s after the backward's end.
    assert exposed_seconds([10 * MIB] * 3, 0.15, CURVE) == pytest.approx(0.2)
    # Nothing to hide behind: all of it.
    assert exposed_seconds([10 * MIB] * 3, 0.0, CURVE) == pytest.approx(0.3)
    # A small first bucket begins early: 1 MiB at 1/11 s for 0.01 s, then 10 MiB at 1 s for 0.1 s.
    assert exposed_seconds([MIB, 10 * MIB], 1.0, CURVE) == pytest.approx(0.1)


def test_a_step_by_hand() -> None:
    """Two ranks, three micro-batches of 0.3 s, of which 0.2 s backward; one bucket of 20 MiB that takes 0.2 s."""
    found = predict(replace(WORK, gradients=Gradients(sizes=(20 * MIB,), first=BUCKET_BYTES)), 2, CURVE)
    assert found.exposed_seconds == pytest.approx(0.2)  # a single bucket is ready at the very end
    assert found.step_seconds == pytest.approx(0.9 + 0.03 + 0.05 + 0.02 + 0.2)
    assert found.exposed_fraction == pytest.approx(0.2 / 1.2)
    assert found.tokens_per_second == pytest.approx(10_000 / 1.2)
    assert found.tokens_per_second_per_gpu == pytest.approx(5_000 / 1.2)
    assert found.peak_memory_bytes == 5e9 + 20 * MIB


def test_accumulation_communicates_in_the_last_micro_batch_alone() -> None:
    """As much work in one micro-batch has a longer backward to hide behind; the bytes are sent once either way."""
    gradients = Gradients(sizes=(10 * MIB,) * 6, cap=10 * MIB, first=10 * MIB)
    many = predict(replace(WORK, accumulation=9, gradients=gradients), 2, CURVE)
    few = predict(replace(WORK, accumulation=1, gradients=gradients), 2, CURVE)
    # backward 0.6 s / 9: the first bucket is ready at 0.0111; the sixth is done 0.6 s later
    assert many.exposed_seconds == pytest.approx(0.6 / 9 / 6 + 0.6 - 0.6 / 9)
    assert few.exposed_seconds == pytest.approx(0.1)


def test_gradients_inside_the_buckets_cost_no_memory() -> None:
    inside = Gradients(sizes=(MIB,), as_bucket_view=True)
    for accumulation in (1, 2):
        work = replace(WORK, accumulation=accumulation, gradients=inside)
        assert predict(work, 2, CURVE).peak_memory_bytes == WORK.peak_memory_bytes
        beside = predict(replace(work, gradients=replace(inside, as_bucket_view=False)), 2, CURVE)
        assert beside.peak_memory_bytes == WORK.peak_memory_bytes + MIB
        unseen = replace(inside, in_peak=False)  # the one device was measured without gradients held
        assert predict(replace(work, gradients=unseen), 2, CURVE).peak_memory_bytes == WORK.peak_memory_bytes + MIB


def test_several_ranks_need_a_curve() -> None:
    with pytest.raises(ValueError, match="curve"):
        predict(replace(WORK, gradients=Gradients(sizes=(1,))), 2, None)


sizes = st.lists(st.integers(1, 60 * MIB), min_size=1, max_size=30).map(tuple)
seconds = st.floats(1e-5, 10.0)


@given(sizes=sizes, compute=seconds, share=st.floats(0.01, 0.99), accumulation=st.integers(1, 16))
def test_what_holds_for_any_model(sizes: tuple[int, ...], compute: float, share: float, accumulation: int) -> None:
    gradients = Gradients(sizes=sizes)
    work = replace(WORK, compute_seconds=compute, backward_share=share, accumulation=accumulation, gradients=gradients)
    one, two = predict(work, 1, CURVE), predict(work, 2, CURVE)
    measured = work.compute_seconds + work.data_seconds + work.optimizer_seconds + work.other_seconds
    assert one.step_seconds == pytest.approx(measured)  # one device: the measurement comes back
    assert one.exposed_seconds == 0.0
    assert one.peak_memory_bytes == work.peak_memory_bytes
    assert sum(buckets(sizes)) == sum(sizes)
    backward = compute * share / accumulation
    last = CURVE.seconds(buckets(sizes)[-1])
    assert two.exposed_seconds >= last * (1 - 1e-9)
    assert two.exposed_seconds <= sum(map(CURVE.seconds, buckets(sizes))) * (1 + 1e-9)
    slower = Curve(points=tuple((size, 2 * taken) for size, taken in CURVE.points))
    assert predict(work, 2, slower).step_seconds >= two.step_seconds  # a slower link never helps
    assert exposed_seconds(buckets(sizes), 2 * backward, CURVE) <= two.exposed_seconds + 1e-9  # more to hide behind
    nothing = replace(work, gradients=Gradients(sizes=()))  # sending nothing is free
    assert predict(nothing, 2, CURVE).step_seconds == one.step_seconds


def test_runs_by_hand() -> None:
    rest = {"exposed_seconds": 0.0, "tokens_per_second": 1.0, "peak_memory_bytes": 1.0}
    one = Prediction(world_size=1, step_seconds=2.0, steps=1800, start_up_seconds=60.0, **rest)
    two = Prediction(world_size=2, step_seconds=1.25, steps=1800, start_up_seconds=90.0, **rest)
    assert one.hours == pytest.approx(3660 / 3600)
    assert two.cost(3.0) == pytest.approx(2 * 3.0 * 2340 / 3600)
    assert two.break_even_steps(one) == pytest.approx(30 / 0.75)
    assert one.break_even_steps(two) is None
    assert two.cost(0.0) == 0.0


def test_a_line_is_not_moved_by_a_stray_measurement() -> None:
    points = [(float(x), 0.5 + 0.01 * x) for x in range(100, 1000, 100)]
    assert line_through([*points, (500.0, 60.0)]) == pytest.approx((0.5, 0.01), rel=1e-6)
    assert line_through([(8.0, 0.3), (8.0, 0.5), (8.0, 0.4)]) == (0.4, 0.0)  # packs: one size, its median
    assert line_through([(1.0, 0.9), (2.0, 0.5)])[1] == 0.0  # larger ones do not get faster
    assert line_through([(100.0, 0.1), (200.0, 0.3)])[0] == 0.0  # and no micro-batch takes less than no time
    with pytest.raises(ValueError, match="one point"):
        line_through([])
