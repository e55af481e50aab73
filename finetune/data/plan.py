"""Rows -> global steps -> ranks. The steps do not know how many ranks there are; a rank is a view of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from finetune.errors import UserError

# With groups, rows are sorted inside windows of so many steps: wide enough for like rows to be found, narrow enough
# that a row keeps meeting others from epoch to epoch. Data of few steps gets four windows, for the same reason.
# Both figures are those of `transformers.trainer_pt_utils.get_length_grouped_indices`.
WINDOW_STEPS = 50
MIN_WINDOWS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The order of training: which rows make up global step k of an epoch, and how a step is dealt to ranks.

    The steps are a function of the data and of (seed, epoch, fingerprint, global_batch_size); world size, micro-batch
    and accumulation only deal them. Every row comes exactly once an epoch. The last step of an epoch may hold fewer
    rows; `label_tokens_of_step` weights it exactly. Every answer is random access: to resume at optimizer step s, take
    `divmod(s, plan.steps_per_epoch)`. The two latest results (an epoch's order and its deal) are kept.

    costs:         float [n_rows], compute cost of each row (`Packs.costs`)
    label_tokens:  int [n_rows], labels of each row that are not masked
    fingerprint:   digest of the data, from the cache
    lengths:       int [n_rows], tokens of each row, where rows are padded to the longest of their micro-batch; None for
                   packs, whose shape is constant
    group_size:    rows are drawn in groups of so many of like size (length where rows are padded, else cost); a divisor
                   of global_batch_size. 1: every order is as likely. global_batch_size: steps of like rows, so little
                   padding. 8: steps of several such groups, so that one to eight ranks carry the same and a step is
                   still varied.

    Raises UserError for no rows or an impossible batch size; ValueError for arrays that do not fit together.
    """

    costs: np.ndarray
    label_tokens: np.ndarray
    global_batch_size: int
    seed: int
    fingerprint: str
    lengths: np.ndarray | None = None
    group_size: int = 1
    _kept: dict[str, tuple[tuple[int, ...], np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise UserError(f"global_batch_size is {self.global_batch_size}; it must be at least 1")
        if self.group_size < 1 or self.global_batch_size % self.group_size:
            raise ValueError(
                f"group_size is {self.group_size}; it must divide global_batch_size, {self.global_batch_size}"
            )
        arrays = {"costs": self.costs, "label_tokens": self.label_tokens}
        if self.lengths is not None:
            arrays["lengths"] = self.lengths
        for name, values in arrays.items():
            if np.shape(values) != (self.n_rows,):
                raise ValueError(f"{name} has shape {np.shape(values)}; expected ({self.n_rows},), one per row")
            if self.n_rows and not (np.isfinite(values).all() and np.min(values) >= 0):
                raise ValueError(f"{name} holds values that are negative or not finite")
        if not self.n_rows:
            raise UserError(
                "the data has no rows to train on; look at the ledger (`finetune prepare`) for what was dropped and why"
            )

    @property
    def n_rows(self) -> int:
        return len(self.costs)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.n_rows // self.global_batch_size)

    def step_rows(self, epoch: int, step: int) -> np.ndarray:
        """Rows of one global step, int64 [global_batch_size], fewer in an epoch's last; a read-only view."""
        step = range(self.steps_per_epoch)[step]
        return self._order(epoch)[step * self.global_batch_size : (step + 1) * self.global_batch_size]

    def label_tokens_of_step(self, epoch: int, step: int) -> int:
        """Label tokens of the whole global step: the denominator of its loss, known without a collective."""
        return int(self.label_tokens[self.step_rows(epoch, step)].sum())

    def deal(self, epoch: int, step: int, *, world_size: int, per_device: int, accumulation: int) -> np.ndarray:
        """The rows of one global step by place, int64 [accumulation, world_size, per_device], read-only.

        -1 marks a dummy row, to be fully masked: it keeps the collectives of all ranks in step in an epoch's last step.
        """
        step = range(self.steps_per_epoch)[step]
        return self.deal_epoch(epoch, world_size=world_size, per_device=per_device, accumulation=accumulation)[step]

    def deal_epoch(self, epoch: int, *, world_size: int, per_device: int, accumulation: int) -> np.ndarray:
        """All steps of an epoch, int64 [steps_per_epoch, accumulation, world_size, per_device], read-only.

        Rows are sorted by cost within their step; a micro-step takes neighbours in that order, so its ranks carry
        nearly the same, and of its rows the costliest goes to the rank with the least so far, so the ranks' sums over
        the step are level too. Where rows are padded, a rank's micro-batch is itself a run of neighbours in length.
        """
        self.check_places(world_size=world_size, per_device=per_device, accumulation=accumulation)
        return self._keep(
            "deal",
            (epoch, world_size, per_device, accumulation),
            lambda: self._deal(self._order(epoch), world_size, per_device, accumulation),
        )

    def check_places(self, *, world_size: int, per_device: int, accumulation: int) -> None:
        """UserError unless a global step fills world_size x per_device x accumulation places exactly."""
        places = world_size * per_device * accumulation
        if min(world_size, per_device, accumulation) < 1 or places != self.global_batch_size:
            raise UserError(
                f"{world_size} ranks x {per_device} rows x {accumulation} accumulation steps do not make a "
                f"global_batch_size of {self.global_batch_size}; choose positive whole numbers whose product it is"
            )

    def digest(self) -> str:
        """SHA-256 of all that decides a run's steps, the first epoch's order included; the same at every world size.

        For `run.json`, and to compare the plan between ranks and between a checkpoint and the run that resumes it.
        """
        sha = hashlib.sha256(f"{self.seed} {self.global_batch_size} {self.group_size} {self.fingerprint}".encode())
        for values, dtype in ((self.costs, "<f8"), (self.label_tokens, "<i8"), (self.lengths, "<i8")):
            sha.update(b"none" if values is None else np.asarray(values, dtype=dtype).tobytes())
        sha.update(np.asarray(self._order(0), dtype="<i8").tobytes())
        return sha.hexdigest()

    def _order(self, epoch: int) -> np.ndarray:
        """All rows in the order of an epoch, int64 [n_rows]; step k is the k-th slice of global_batch_size."""
        if epoch < 0:
            raise IndexError(f"epoch is {epoch}; the first is 0")
        return self._keep("order", (epoch,), lambda: self._shuffle(epoch))

    def _shuffle(self, epoch: int) -> np.ndarray:
        """One fresh order per epoch, from a counter-based generator keyed by (seed, epoch, fingerprint)."""
        key = hashlib.sha256(f"{self.seed} {epoch} {self.fingerprint}".encode()).digest()[:16]
        # Sorted raw draws instead of Generator.permutation: NEP 19 promises the same numbers in every release of numpy
        # for the raw stream only, and a run may be resumed with another release.
        draws = np.random.Philox(key=int.from_bytes(key, "little"))
        order = np.argsort(draws.random_raw(self.n_rows), kind="stable")
        if self.group_size == 1:
            return order

        # The remainder stays a random sample: a sorted one would always be the longest or shortest rows.
        n_groups = self.n_rows // self.group_size
        whole, rest = np.split(order, [n_groups * self.group_size])
        n_windows = max(MIN_WINDOWS, -(-len(whole) // (WINDOW_STEPS * self.global_batch_size)))
        window_of_group = np.arange(n_groups) * n_windows // max(n_groups, 1)
        window_of_row = np.repeat(window_of_group, self.group_size)
        whole = whole[np.lexsort((self._sizes[whole], window_of_row))]
        group_order = np.argsort(draws.random_raw(n_groups), kind="stable")
        return np.concatenate([whole.reshape(n_groups, self.group_size)[group_order].ravel(), rest])

    @property
    def _sizes(self) -> np.ndarray:
        return self.costs if self.lengths is None else self.lengths

    def _deal(self, order: np.ndarray, world_size: int, per_device: int, accumulation: int) -> np.ndarray:
        n_steps = self.steps_per_epoch
        rows = np.full(n_steps * self.global_batch_size, -1, dtype=np.int64)
        rows[: self.n_rows] = order
        rows = rows.reshape(n_steps, self.global_batch_size)
        sizes = np.where(rows >= 0, self._sizes[rows], -1)
        rows = np.take_along_axis(rows, np.argsort(-sizes, axis=1, kind="stable"), axis=1)  # dummies last

        # A unit is what is dealt as one: a single pack, or a whole padded micro-batch (as costly as its longest row).
        # A layer is one unit for each rank.
        unit = 1 if self.lengths is None else per_device
        units = rows.reshape(n_steps, -1, world_size, unit)
        longest = units[..., 0]
        costs = np.where(longest >= 0, unit * self.costs[longest], 0.0)

        dealt = np.empty_like(units)
        carried = np.zeros((n_steps, world_size))
        # Ranks take turns at being the first: otherwise rank 0 would have the costliest row of every step.
        turn = np.arange(n_steps)[:, None]
        for layer in range(units.shape[1]):
            least_first = np.argsort(carried, axis=1, kind="stable")
            ranks = (least_first + turn) % world_size
            np.put_along_axis(dealt[:, layer], ranks[..., None], units[:, layer], axis=1)
            carried[turn, least_first] += costs[:, layer]

        dealt = dealt.reshape(n_steps, accumulation, per_device // unit, world_size, unit).swapaxes(2, 3)
        return np.ascontiguousarray(dealt.reshape(n_steps, accumulation, world_size, per_device))

    def _keep(self, name: str, key: tuple[int, ...], make: Callable[[], np.ndarray]) -> np.ndarray:
        kept = self._kept.get(name)
        if kept is None or kept[0] != key:
            made = make()
            made.setflags(write=False)
            self._kept[name] = kept = (key, made)
        return kept[1]


@dataclass(kw_only=True)
class RankView:
    """One rank's micro-batches, in order: a `batch_sampler` for a torch DataLoader.

    Yields lists of `per_device` rows, `accumulation` of them per global step. A row of -1 is a dummy: the data set has
    to answer it with a fully masked row. `len` counts the micro-steps of a whole epoch.

    epoch, start: where to begin: the first `start` micro-steps of that `epoch` are left out, without being read; every
    other epoch is served whole. To resume at optimizer step s: `epoch, step = divmod(s, plan.steps_per_epoch)`,
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
