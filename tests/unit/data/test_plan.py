"""The plan: equal global steps at every world size, each row once per epoch, balanced ranks, resume at any step."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.packs import one_per_row, pack
from finetune.data.plan import Plan, RankView
from finetune.errors import UserError
from tests.helpers import ROOT

GLOBAL_BATCH = 24
PLACES = [  # world_size, per_device, accumulation
    (w, p, GLOBAL_BATCH // (w * p)) for w in (1, 2, 4, 8) for p in (1, 3) if GLOBAL_BATCH % (w * p) == 0
]
MODES = [
    {},
    {"padded": True},
    {"padded": True, "group_by_length": True},
]


def make_plan(n_rows: int, global_batch_size: int = GLOBAL_BATCH, padded: bool = False, **changes) -> Plan:
    rng = np.random.default_rng(n_rows)
    lengths = rng.lognormal(6.0, 0.8, n_rows).round().clip(32, 2048).astype(np.int64)
    return Plan(
        **{
            "costs": lengths + lengths**2 / 24576,
            "label_tokens": rng.integers(1, 50, n_rows),
            "global_batch_size": global_batch_size,
            "seed": 3,
            "fingerprint": "data",
            "lengths": lengths if padded else None,
            **changes,
        }
    )


def epoch_rows(plan: Plan, epoch: int) -> list[list[int]]:
    return [plan.step_rows(epoch, step).tolist() for step in range(plan.steps_per_epoch)]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("n_rows", [1, 5, 23, 24, 25, 48, 240, 1201])
def test_each_row_occurs_exactly_once_per_epoch(n_rows, mode):
    plan = make_plan(n_rows, **mode)
    assert plan.steps_per_epoch == -(-n_rows // GLOBAL_BATCH)
    for epoch in (0, 1):
        steps = epoch_rows(plan, epoch)
        assert sorted(sum(steps, [])) == list(range(n_rows))
        assert all(len(rows) == GLOBAL_BATCH for rows in steps[:-1])
        assert len(steps[-1]) == n_rows - GLOBAL_BATCH * (len(steps) - 1)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("n_rows", [1, 25, 250])
def test_the_ranks_together_hold_the_step_at_any_world_size(n_rows, places, mode):
    plan, reference = make_plan(n_rows, **mode), make_plan(n_rows, **mode)
    world_size, per_device, accumulation = places
    for step in range(plan.steps_per_epoch):
        dealt = plan.deal(2, step, world_size=world_size, per_device=per_device, accumulation=accumulation)
        assert dealt.shape == (accumulation, world_size, per_device) and dealt.dtype == np.int64
        held = dealt[dealt >= 0]
        assert sorted(held.tolist()) == sorted(reference.step_rows(2, step).tolist())
        assert (dealt < 0).sum() == GLOBAL_BATCH - len(held) and dealt.min() >= -1
        # Dummy rows fill the last micro-steps, spread over the ranks: none comes before a micro-step with a row.
        dummies = (dealt < 0).sum(axis=(1, 2))
        assert (
            dummies.tolist() == sorted(dummies.tolist()) and sum(0 < d < world_size * per_device for d in dummies) <= 1
        )


def test_label_tokens_of_a_step_are_those_of_all_its_ranks():
    plan = make_plan(250)
    labels = np.asarray(plan.label_tokens)
    for step in range(plan.steps_per_epoch):
        dealt = plan.deal(0, step, world_size=4, per_device=2, accumulation=3)
        assert plan.label_tokens_of_step(0, step) == sum(int(labels[row]) for row in dealt.ravel() if row >= 0)
    assert sum(plan.label_tokens_of_step(0, step) for step in range(plan.steps_per_epoch)) == labels.sum()


@settings(deadline=None, max_examples=60)
@given(
    n_rows=st.integers(1, 200),
    world_size=st.integers(1, 8),
    per_device=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    epoch=st.integers(0, 10**6),
    mode=st.sampled_from(MODES),
)
def test_views_of_all_ranks_are_the_plan(n_rows, world_size, per_device, accumulation, epoch, mode):
    size = world_size * per_device * accumulation
    plan = make_plan(n_rows, size, **mode)
    places = {"world_size": world_size, "per_device": per_device, "accumulation": accumulation}
    views = [list(RankView(plan=plan, rank=r, epoch=epoch, **places)) for r in range(world_size)]
    assert all(len(view) == plan.steps_per_epoch * accumulation for view in views)
    for step in range(plan.steps_per_epoch):
        micro = slice(step * accumulation, (step + 1) * accumulation)
        rows = [row for view in views for batch in view[micro] for row in batch if row >= 0]
        assert sorted(rows) == sorted(plan.step_rows(epoch, step).tolist())


def test_the_order_depends_on_epoch_seed_and_data():
    orders = [
        np.concatenate(epoch_rows(plan, epoch)).tolist()
        for plan, epoch in [
            (make_plan(200), 0),
            (make_plan(200), 1),
            (make_plan(200, seed=4), 0),
            (make_plan(200, fingerprint="other"), 0),
        ]
    ]
    orders.append(list(range(200)))
    assert len({tuple(order) for order in orders}) == len(orders)


def test_order_is_uniform():
    """Each row falls into each quarter of the epoch about equally often: 400 epochs, 4 sigma."""
    plan = make_plan(40, 10)
    quarter = np.zeros((40, 4))
    for epoch in range(400):
        for step in range(4):
            quarter[plan.step_rows(epoch, step), step] += 1
    assert np.abs(quarter - 100).max() < 4 * np.sqrt(400 * 0.25 * 0.75)


def test_order_is_pinned():
    """A changed order would silently break the resumption of older runs."""
    assert epoch_rows(make_plan(10, 4), 0) == [[8, 4, 2, 6], [7, 3, 1, 0], [9, 5]]
    grouped = make_plan(10, 2, costs=np.arange(10.0), group_by_length=True)
    assert epoch_rows(grouped, 1) == [[3, 4], [6, 7], [2, 9], [1, 5], [0, 8]]


@pytest.mark.process
def test_same_in_every_process():
    seen = {describe()}
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
        seen.add(run.stdout)
    assert len(seen) == 1 and len(seen.pop()) == 64


def describe() -> str:
    sha = hashlib.sha256()
    for mode in MODES:
        plan = make_plan(1000, **mode)
        sha.update(plan.digest().encode())
        sha.update(plan.deal_epoch(5, world_size=4, per_device=2, accumulation=3).tobytes())
    return sha.hexdigest()


def test_the_digest_depends_on_everything_but_the_world_size():
    plan = make_plan(100)
    before = plan.digest()
    plan.deal(1, 0, world_size=8, per_device=3, accumulation=1)
    assert plan.digest() == before == make_plan(100).digest()
    labels = np.array(plan.label_tokens)
    labels[7] += 1
    others = [
        make_plan(100, seed=4),
        make_plan(100, fingerprint="other"),
        make_plan(100, global_batch_size=12),
        make_plan(100, group_by_length=True),
        make_plan(100, padded=True),
        make_plan(100, label_tokens=labels),
        make_plan(100, costs=plan.costs * 1.5),
        make_plan(101),
    ]
    assert len({before, *(other.digest() for other in others)}) == len(others) + 1


# Balance


def uneven(costs: np.ndarray, dealt: np.ndarray) -> np.ndarray:
    """[steps]: the costliest rank's sum over a step, divided by the mean of all ranks, minus 1."""
    ranks = costs[dealt].sum(axis=(1, 3))
    return ranks.max(axis=1) / ranks.mean(axis=1) - 1


@pytest.fixture(scope="module")
def costs():
    """Packs of 16,384 tokens, without the last one: it is nearly all padding, which no deal can balance."""
    lengths = np.random.default_rng(0).lognormal(6.0, 0.8, 60_000).round().clip(32, 2048).astype(np.int64)
    return pack(lengths, 16384, "key").costs(2048)[:-1]


@pytest.mark.parametrize(
    ("per_device", "accumulation"),
    [(1, 4), (2, 2), (1, 8), (2, 4)],
)
def test_ranks_are_balanced_to_one_percent_at_world_size_8(costs, per_device, accumulation):
    plan = make_plan(len(costs), 8 * per_device * accumulation, costs=costs)
    dealt = plan.deal_epoch(0, world_size=8, per_device=per_device, accumulation=accumulation)[:-1]
    as_shuffled = np.array(epoch_rows(plan, 0)[:-1]).reshape(dealt.shape)
    level = uneven(costs, dealt)
    assert level.max() <= 0.01
    assert level.mean() < uneven(costs, as_shuffled).mean() / 5


def test_two_packs_per_rank_are_paired_optimally(costs):
    """The costliest with the cheapest: no other pairing makes the costliest rank cheaper."""
    plan = make_plan(len(costs), 16, costs=costs)
    for step in range(20):
        dealt = plan.deal(0, step, world_size=8, per_device=1, accumulation=2)
        ordered = np.sort(costs[plan.step_rows(0, step)])
        assert costs[dealt].sum(axis=(0, 2)).max() == pytest.approx((ordered + ordered[::-1]).max())


@pytest.mark.parametrize("padded", [False, True])
def test_a_micro_step_holds_neighbors_in_cost(padded):
    plan = make_plan(480, padded=padded)
    dealt = plan.deal_epoch(0, world_size=4, per_device=2, accumulation=3)
    for micro_steps in plan.costs[dealt]:
        for costlier, cheaper in zip(micro_steps[:-1], micro_steps[1:], strict=True):
            assert costlier.min() >= cheaper.max()


def test_no_rank_is_always_the_costliest(costs):
    plan = make_plan(len(costs), 8, costs=costs)
    dealt = plan.deal_epoch(0, world_size=8, per_device=1, accumulation=1)[:-1]
    by_rank = costs[dealt].sum(axis=(0, 1, 3))
    assert by_rank.max() / by_rank.mean() - 1 < 0.005
    # ties between equally loaded ranks rotate with the step, so that the costliest row visits all of them
    assert set(costs[dealt[:, 0, :, 0]].argmax(axis=1)) == set(range(8))


def test_grouping_by_length_saves_padding_and_stays_random():
    def padded_positions(plan: Plan, epoch: int) -> int:
        dealt = plan.deal_epoch(epoch, world_size=4, per_device=8, accumulation=1)[:-1]
        return int(8 * np.array(plan.lengths)[dealt].max(axis=-1).sum())

    plain = make_plan(5000, 32, padded=True)
    grouped = make_plan(5000, 32, padded=True, group_by_length=True)
    tokens = np.array(plain.lengths).sum()
    assert padded_positions(grouped, 0) < 1.03 * tokens
    assert padded_positions(plain, 0) > 1.1 * padded_positions(grouped, 0)
    # steps are not sorted by length, and a row meets different rows in the next epoch
    means = np.array([np.array(grouped.lengths)[rows].mean() for rows in epoch_rows(grouped, 0)])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3
    assert {frozenset(rows) for rows in epoch_rows(grouped, 0)}.isdisjoint(
        frozenset(rows) for rows in epoch_rows(grouped, 1)
    )


def test_a_padded_micro_batch_holds_neighbors_in_length():
    plan = make_plan(480, padded=True)
    dealt = plan.deal_epoch(0, world_size=4, per_device=3, accumulation=2)
    lengths = np.array(plan.lengths)
    for step in range(plan.steps_per_epoch):
        ordered = np.sort(lengths[plan.step_rows(0, step)])[::-1].reshape(8, 3)
        batches = np.sort(lengths[dealt[step]].reshape(8, 3), axis=1)[:, ::-1]
        assert sorted(batches.tolist()) == sorted(ordered.tolist())


# A rank's view


def test_resume_at_any_step_on_any_world_size_continues_with_the_next():
    plan = make_plan(250, 12)
    whole = [sorted(rows) for epoch in (0, 1) for rows in epoch_rows(plan, epoch)]
    for done in range(2 * plan.steps_per_epoch):
        epoch, step = divmod(done, plan.steps_per_epoch)
        for world_size in (1, 2, 4):
            accumulation = 12 // world_size
            resumed = make_plan(250, 12)
            views = [
                RankView(
                    plan=resumed, rank=rank, world_size=world_size, per_device=1, accumulation=accumulation,
                    epoch=epoch, start=step * accumulation,
                )
                for rank in range(world_size)
            ]  # fmt: skip
            served: list[list[int]] = []
            for now in range(epoch, 2):
                for view in views:
                    view.set_epoch(now)
                batches = [list(view) for view in views]
                for k in range(len(batches[0]) // accumulation):
                    rows = [r for b in batches for (r,) in b[k * accumulation : (k + 1) * accumulation] if r >= 0]
                    served.append(sorted(rows))
            assert served == whole[done:]


def test_start_applies_only_to_the_first_epoch():
    plan = make_plan(100)
    places = {"rank": 1, "world_size": 2, "per_device": 3, "accumulation": 4}
    whole = RankView(plan=plan, **places)
    resumed = RankView(plan=plan, **places, epoch=1, start=6)
    assert len(resumed) == len(whole) == 20  # the length is still that of a full epoch
    for epoch, left_out in ((1, 6), (2, 0), (1, 6)):
        whole.set_epoch(epoch)
        resumed.set_epoch(epoch)
        assert list(resumed) == list(whole)[left_out:]
    assert list(RankView(plan=plan, **places, start=20)) == []


def test_serves_as_batch_sampler_of_a_torch_data_loader():
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __getitem__(self, row: int) -> int:
            return row

    view = RankView(plan=make_plan(100), rank=0, world_size=2, per_device=3, accumulation=4)
    loader = DataLoader(Rows(), batch_sampler=view)
    assert len(loader) == 20
    assert [batch.tolist() for batch in loader] == list(view)


# Bad input


def test_refuses_no_rows():
    with pytest.raises(UserError, match="no rows"):
        make_plan(0)


@pytest.mark.parametrize("places", [(5, 1, 5), (2, 1, 11), (0, 1, 24), (-1, -1, 24), (24, 2, 1)])
def test_refuses_places_that_do_not_fill_the_global_batch(places):
    world_size, per_device, accumulation = places
    plan = make_plan(100)
    with pytest.raises(UserError, match="global_batch_size of 24"):
        plan.deal(0, 0, world_size=world_size, per_device=per_device, accumulation=accumulation)
    with pytest.raises(UserError, match="global_batch_size of 24"):
        RankView(plan=plan, rank=0, world_size=world_size, per_device=per_device, accumulation=accumulation)


def test_refuses_steps_that_do_not_exist():
    plan = make_plan(100)
    with pytest.raises(IndexError):
        plan.step_rows(0, plan.steps_per_epoch)
    with pytest.raises(IndexError):
        plan.deal(0, plan.steps_per_epoch, world_size=1, per_device=1, accumulation=24)
    places = {"world_size": 2, "per_device": 3, "accumulation": 4}
    with pytest.raises(ValueError, match="rank is 2"):
        RankView(plan=plan, rank=2, **places)
    with pytest.raises(ValueError, match="start is 21"):
        RankView(plan=plan, rank=0, **places, start=21)


def test_cached_arrays_are_read_only():
    plan = make_plan(100)
    for kept in (plan.step_rows(0, 0), plan.deal(0, 0, world_size=1, per_device=1, accumulation=24)):
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 0


def test_unpacked_rows_are_planned_like_packs():
    rows = one_per_row(np.array([5, 9, 2, 7]))
    plan = make_plan(4, 2, costs=rows.costs(64), label_tokens=rows.totals(np.array([1, 2, 3, 4])), lengths=rows.tokens)
    assert sorted(sum(epoch_rows(plan, 0), [])) == [0, 1, 2, 3]
    assert sum(plan.label_tokens_of_step(0, step) for step in range(2)) == 10


if __name__ == "__main__":  # the other process of test_same_in_every_process
    sys.stdout.write(describe())
