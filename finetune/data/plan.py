"""Rows -> global steps -> ranks. The steps do not depend on the number of ranks; a rank is a view of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from finetune.data.packs import random_order
from finetune.errors import UserError

# With `group_by_length`, rows are sorted within windows of this many steps: wide enough to find similar rows, narrow
# enough that a row meets different rows in each epoch. For the same reason, small datasets are divided into at least
# four windows. Both values are those of `transformers.trainer_pt_utils.get_length_grouped_indices`.
WINDOW_STEPS = 50
MIN_WINDOWS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The training order: the rows of global step k of each epoch, and how they are dealt to ranks.

    The steps depend only on the data and (seed, epoch, fingerprint, global_batch_size); world size, micro-batch and
    accumulation decide only how they are dealt. Every row occurs exactly once per epoch. The last step of an epoch may
    have fewer rows; `label_tokens_of_step` weights it exactly. All lookups are random access: to resume at optimizer
    step s, use `divmod(s, plan.steps_per_epoch)`. The latest epoch's order and deal are cached.

    costs:         float [n_rows], compute cost of each row (`Packs.costs`)
    label_tokens:  int [n_rows], supervised tokens of each row
    fingerprint:   digest of the data, from the cache
    lengths:       int [n_rows], tokens of each row if micro-batches are padded to their longest row; None for packs,
                   whose shape is constant
    group_by_length: draw the rows of a step among rows of similar length, for less padding. A step is then not a
                   random sample of the data, which costs held-out loss. False: all orders are equally likely.

    Raises UserError for no rows.
    """

    costs: np.ndarray
    label_tokens: np.ndarray
    global_batch_size: int
    seed: int
    fingerprint: str
    lengths: np.ndarray | None = None
    group_by_length: bool = False
    _cache: dict[str, tuple[tuple[int, ...], np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.n_rows:
            raise UserError(
                "The data has no rows to train on. Run `finetune prepare` to see which rows were dropped and why."
            )

    @property
    def n_rows(self) -> int:
        return len(self.costs)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.n_rows // self.global_batch_size)

    def step_rows(self, epoch: int, step: int) -> np.ndarray:
        """Rows of one global step, int64 [global_batch_size], fewer in the last step of an epoch; a read-only view."""
        step = range(self.steps_per_epoch)[step]
        return self._order(epoch)[step * self.global_batch_size : (step + 1) * self.global_batch_size]

    def label_tokens_of_step(self, epoch: int, step: int) -> int:
        """Supervised tokens of the global step: the denominator of its loss, known without a collective."""
        return int(self.label_tokens[self.step_rows(epoch, step)].sum())

    def deal(self, epoch: int, step: int, *, world_size: int, per_device: int, accumulation: int) -> np.ndarray:
        """The rows of one global step by position, int64 [accumulation, world_size, per_device], read-only.

        -1 is a dummy row, to be fully masked. It keeps all ranks' collectives aligned in the last step of an epoch.
        """
        step = range(self.steps_per_epoch)[step]
        return self.deal_epoch(epoch, world_size=world_size, per_device=per_device, accumulation=accumulation)[step]

    def deal_epoch(self, epoch: int, *, world_size: int, per_device: int, accumulation: int) -> np.ndarray:
        """All steps of an epoch, int64 [steps_per_epoch, accumulation, world_size, per_device], read-only.

        Rows are sorted by cost within their step. A micro-step takes neighbors in that order, so its ranks have nearly
        equal work; its costliest row goes to the rank with the least work so far, which also balances the ranks' totals
        over the step. If rows are padded, each rank's micro-batch consists of neighbors in length.
        """
        self.check_places(world_size=world_size, per_device=per_device, accumulation=accumulation)
        return self._cached(
            "deal",
            (epoch, world_size, per_device, accumulation),
            lambda: self._deal(self._order(epoch), world_size, per_device, accumulation),
        )

    def check_places(self, *, world_size: int, per_device: int, accumulation: int) -> None:
        """Raises UserError unless world_size x per_device x accumulation equals global_batch_size."""
        places = world_size * per_device * accumulation
        if min(world_size, per_device, accumulation) < 1 or places != self.global_batch_size:
            raise UserError(
                f"{world_size} ranks x {per_device} rows x {accumulation} accumulation steps do not give a "
                f"global_batch_size of {self.global_batch_size}. Choose positive integers whose product it is."
            )

    def digest(self) -> str:
        """SHA-256 of everything that determines a run's steps, including the order of the first epoch.

        Equal at every world size. Recorded in `run.json` and compared between ranks, and between a checkpoint and the
        run that resumes it.
        """
        sha = hashlib.sha256(f"{self.seed} {self.global_batch_size} {self.group_by_length} {self.fingerprint}".encode())
        for values, dtype in ((self.costs, "<f8"), (self.label_tokens, "<i8"), (self.lengths, "<i8")):
            sha.update(b"none" if values is None else np.asarray(values, dtype=dtype).tobytes())
        sha.update(np.asarray(self._order(0), dtype="<i8").tobytes())
        return sha.hexdigest()

    def _order(self, epoch: int) -> np.ndarray:
        """All rows in the order of an epoch, int64 [n_rows]; step k is the k-th slice of global_batch_size."""
        return self._cached("order", (epoch,), lambda: self._shuffle(epoch))

    def _shuffle(self, epoch: int) -> np.ndarray:
        """A new order for each epoch."""
        order = random_order(self.n_rows, f"{self.seed} {epoch} {self.fingerprint}")
        if not self.group_by_length:
            return order
        # The remainder stays a random sample; if sorted, it would always be the longest or shortest rows.
        size, n_groups = self.global_batch_size, self.n_rows // self.global_batch_size
        grouped, rest = np.split(order, [n_groups * size])
        n_windows = max(MIN_WINDOWS, -(-n_groups // WINDOW_STEPS))
        window_of_group = np.arange(n_groups) * n_windows // max(n_groups, 1)
        grouped = grouped[np.lexsort((self._sizes[grouped], np.repeat(window_of_group, size)))]
        group_order = random_order(n_groups, f"{self.seed} {epoch} {self.fingerprint} groups")
        return np.concatenate([grouped.reshape(n_groups, size)[group_order].ravel(), rest])

    @property
    def _sizes(self) -> np.ndarray:
        return self.costs if self.lengths is None else self.lengths

    def _deal(self, order: np.ndarray, world_size: int, per_device: int, accumulation: int) -> np.ndarray:
        # Ranks wait for each other where gradients are reduced, once per micro-step with FSDP and once per step with
        # DDP, so both must be even. A layer has one unit per rank, neighbors by cost, which makes micro-steps even; its
        # costliest unit goes to the rank with the least so far, which makes the step even. The loss does not depend on
        # any of this: the rows of a step are fixed before.
        n_steps = self.steps_per_epoch
        rows = np.full(n_steps * self.global_batch_size, -1, dtype=np.int64)
        rows[: self.n_rows] = order
        rows = rows.reshape(n_steps, self.global_batch_size)
        sizes = np.where(rows >= 0, self._sizes[rows], -1)
        rows = np.take_along_axis(rows, np.argsort(-sizes, axis=1, kind="stable"), axis=1)  # dummy rows last

        # A unit is dealt to one rank as a whole: a single pack, or a padded micro-batch, in which every row costs as
        # much as the longest. A layer is one unit per rank.
        unit = 1 if self.lengths is None else per_device
        units = rows.reshape(n_steps, -1, world_size, unit)
        longest = units[..., 0]
        costs = np.where(longest >= 0, unit * self.costs[longest], 0.0)

        dealt = np.empty_like(units)
        assigned = np.zeros((n_steps, world_size))  # cost so far
        # Ties rotate with the step; otherwise rank 0 would always get the costliest row.
        turn = np.arange(n_steps)[:, None]
        for layer in range(units.shape[1]):
            least_first = np.argsort(assigned, axis=1, kind="stable")
            ranks = (least_first + turn) % world_size
            np.put_along_axis(dealt[:, layer], ranks[..., None], units[:, layer], axis=1)
            assigned[turn, least_first] += costs[:, layer]

        dealt = dealt.reshape(n_steps, accumulation, per_device // unit, world_size, unit).swapaxes(2, 3)
        return np.ascontiguousarray(dealt.reshape(n_steps, accumulation, world_size, per_device))

    def _cached(self, name: str, key: tuple[int, ...], compute: Callable[[], np.ndarray]) -> np.ndarray:
        """The value of `compute()`, read-only; only the latest key's value is cached under each name."""
        cached = self._cache.get(name)
        if cached is None or cached[0] != key:
            values = compute()
            values.setflags(write=False)
            self._cache[name] = cached = (key, values)
        return cached[1]


class SequentialPlan(Plan):
    """A plan without shuffling."""

    def _order(self, epoch: int) -> np.ndarray:
        return np.arange(self.n_rows)


@dataclass(kw_only=True)
class RankView:
    """One rank's micro-batches, in order: a `batch_sampler` for a torch DataLoader.

    Yields lists of `per_device` rows, `accumulation` lists per global step. Row -1 is a dummy, for which the dataset
    must return a fully masked row. `len` is the number of micro-steps in a full epoch.

    epoch, start: where to begin. The first `start` micro-steps of `epoch` are skipped without being read; all other
    epochs are complete. To resume at optimizer step s: `epoch, step = divmod(s, plan.steps_per_epoch)`,
    `start = step * accumulation`.
    """

    plan: Plan
    rank: int
    world_size: int
    per_device: int
    accumulation: int
    epoch: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        self.plan.check_places(world_size=self.world_size, per_device=self.per_device, accumulation=self.accumulation)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}; with {self.world_size} ranks it must be in [0, {self.world_size})")
        if not 0 <= self.start <= len(self):
            raise ValueError(f"start is {self.start}; an epoch has {len(self)} micro-steps")
        self._first_epoch = self.epoch

    def __len__(self) -> int:
        return self.plan.steps_per_epoch * self.accumulation

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        dealt = self.plan.deal_epoch(
            self.epoch, world_size=self.world_size, per_device=self.per_device, accumulation=self.accumulation
        )
        start = self.start if self.epoch == self._first_epoch else 0
        mine = dealt[:, :, self.rank].reshape(len(self), self.per_device)
        return (rows.tolist() for rows in mine[start:])
