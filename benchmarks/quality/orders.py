"""Training with packs and steps that are sorted by length, to measure what random ones gain:

    python -m benchmarks.quality.orders sorted|grouped [arguments of finetune.train]

`sorted`: best-fit decreasing packs (the first hold the longest documents, the last the shortest), in random steps.
`grouped`: the same packs, and steps of groups of 8 packs of similar cost, so that a step is one length class.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_left, insort
from typing import Any

import numpy as np

from finetune import train
from finetune.data import layout
from finetune.data.packs import Packs
from finetune.data.plan import Plan

GROUP = 8  # packs of similar cost
WINDOW_STEPS = 50  # packs are sorted within windows of this many steps, at least four of them


def best_fit_decreasing(lengths: Any, pack_length: int, *further: Any, **named: Any) -> Packs:
    """Longest document first, each into the fullest pack that has room. Takes and ignores the arguments of any
    version of `finetune.data.packs.pack`."""
    rooms: list[tuple[int, int]] = []  # (room left, pack), sorted
    packs: list[list[int]] = []
    for document in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[document])
        place = bisect_left(rooms, (length, -1))
        if place == len(rooms):
            packs.append([])
            room, number = pack_length, len(packs) - 1
        else:
            room, number = rooms.pop(place)
        packs[number].append(document)
        insort(rooms, (room - length, number))
    sizes = [np.asarray(lengths, dtype=np.int64)[one] for one in packs]
    return Packs(
        documents=np.concatenate(packs).astype(np.int64),
        offsets=np.cumsum([0, *map(len, packs)]).astype(np.int64),
        tokens=np.array([one.sum() for one in sizes]),
        squares=np.array([(one**2).sum() for one in sizes]),
        pack_length=pack_length,
    )


def shuffled(plan: Plan, epoch: int, group: int) -> np.ndarray:
    """All rows in an epoch's order, in groups of similar cost."""
    key = hashlib.sha256(f"{plan.seed} {epoch} {plan.fingerprint}".encode()).digest()[:16]
    draw = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    order = draw.permutation(plan.n_rows)
    grouped, rest = np.split(order, [plan.n_rows // group * group])  # the rest stays a random sample
    windows = max(4, -(-len(grouped) // (WINDOW_STEPS * plan.global_batch_size)))
    window = np.arange(len(grouped)) // group * windows * group // max(len(grouped), 1)
    if group > 1:
        grouped = grouped[np.lexsort((plan.costs[grouped], window))]
    return np.concatenate([draw.permutation(grouped.reshape(-1, group)).ravel(), rest])


def main() -> int:
    """Replace both, and train."""
    if sys.argv[1:2] not in (["sorted"], ["grouped"]):
        sys.stderr.write("python -m benchmarks.quality.orders sorted|grouped [arguments of finetune.train]\n")
        return 2
    group = GROUP if sys.argv[1] == "grouped" else 1
    for place, name in ((layout, "pack"), (Plan, "_shuffle")):
        if not hasattr(place, name):
            raise RuntimeError(f"{place.__name__}.{name} is gone: the order cannot be replaced")
    setattr(layout, "pack", best_fit_decreasing)  # noqa: B010
    setattr(Plan, "_shuffle", lambda plan, epoch: shuffled(plan, epoch, group))  # noqa: B010
    return train.main([word for word in sys.argv[2:] if word != "--"])


if __name__ == "__main__":
    raise SystemExit(main())
