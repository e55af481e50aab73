"""Wrong bits: weights that differ between ranks which should hold the same, and a pass that gives two results.

A GPU, its memory or a link that fails seldom raises an error; it changes bits. Ranks under DDP do the same sums on the
same numbers, so their weights and optimizer states are equal to the last bit: a checksum of them goes with each record.
In the first step and every `EVERY`th one, each rank also computes the loss of a micro-batch twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

EVERY = 1000  # steps: the pass costs a third of a step
FIELDS = ("checksum_low", "checksum_high", "wrong_pass")  # of a rank, for `verdict`; NaN for what it does not know
# Of a loss: kernels that add in another order each time change it by less, in 16 bits too. A wrong bit that does is
# harmless.
ORDER = 1e-3
SMALL = 2**20  # bytes of a tensor: such ones are summed together, in a few kernels
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksum:
    """The sum of all bits of a trainer's trained weights and optimizer states."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._optimizer: Any = None  # whose tensors these are
        self._small: dict[torch.dtype, list[torch.Tensor]] = {}
        self._large: list[torch.Tensor] = []

    def halves(self) -> tuple[int, int]:
        """The lower and the upper 32 bits of it; numbers of 64 bits do not fit into a float. Waits for the device."""
        if self._optimizer is not self._trainer.optimizer:
            self._find()
        parts = [torch.cat(small) for small in self._small.values()] + self._large
        if not parts:
            return 0, 0
        sums = torch.stack([part.sum(dtype=torch.int64) for part in parts])
        odd = torch.arange(1, 2 * len(parts), 2, device=sums.device)  # so that two changes do not cancel out
        whole = int((sums * odd).sum()) % 2**64
        return whole % 2**32, whole // 2**32

    def _find(self) -> None:
        """The tensors, which optimizers change in place."""
        self._optimizer, self._small, self._large = self._trainer.optimizer, {}, []
        weights = [one for one in self._trainer.model.parameters() if one.requires_grad]
        for one in weights:
            states = self._optimizer.state.get(one, {}).values()
            self._add([one.data, *(state for state in states if isinstance(state, torch.Tensor) and state.numel() > 1)])

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        for one in tensors:
            if is_traceable_wrapper_subclass(one):  # torchao's states of 8 and 4 bits: of codes and scales
                self._add(getattr(one, name) for name in one.__tensor_flatten__()[0])
                continue
            bits = one.detach().contiguous().view(-1).view(_INTEGERS[one.element_size()])
            if bits.data_ptr() != one.data_ptr():  # a copy, which does not follow it
                continue
            if one.nbytes <= SMALL:
                self._small.setdefault(bits.dtype, []).append(bits)
            else:
                self._large.append(bits)


class WrongBits:
    """What a rank checks of its own."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._checksum = Checksum(trainer)
        self._next = 0  # step in which a pass is computed twice
        self._wrong_pass: int | None = None

    def before_pass(self, inputs: dict[str, Any], count: torch.Tensor | None) -> None:
        """Before a training pass: compute its loss twice if it is time, and twice more if they differ. One result of
        four that is another is a mistake. Otherwise the pass is not deterministic here, and is not tried again."""
        trainer = self._trainer
        step = trainer.state.global_step
        if step < self._next or count is None or trainer.statistics.expert_load is not None or trainer.sharded:
            return
        self._next = (step // EVERY + 1) * EVERY
        devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
        found, odd = list[float](), list[float]()
        for times in (2, 2):
            for _ in range(times):
                with torch.random.fork_rng(devices):  # dropout
                    found.append(float(trainer.loss_apart(inputs, count)))
            middle = sorted(found)[len(found) // 2]
            odd = [one for one in found if not abs(one - middle) <= ORDER * abs(middle)]
            if not odd:
                return
        self._next = 2**62
        if len(odd) == 1:
            self._wrong_pass = step + 1

    def fields(self) -> list[float]:
        """What this rank sends with a record, by `FIELDS`."""
        nothing = float("nan")
        trainer = self._trainer
        alike = trainer.args.world_size > 1 and not trainer.sharded and trainer.optimizer is not None
        low, high = self._checksum.halves() if alike else (nothing, nothing)
        return [low, high, nothing if self._wrong_pass is None else self._wrong_pass]


def verdict(fields: Sequence[Sequence[float]], step: int, devices: Sequence[dict[str, Any]]) -> str | None:
    """What is wrong, for all ranks the same; None if nothing is.

    Args:
        fields: of each rank, as from `WrongBits.fields`.
        step: of the record.
        devices: host and GPU of each rank.
    """

    def named(ranks: Iterable[int]) -> str:
        places = [(rank, devices[rank]["host"], devices[rank]["gpu"]) for rank in ranks]
        return ", ".join(f"{rank} ({host}" + (")" if gpu is None else f", GPU {gpu})") for rank, host, gpu in places)

    for rank, (*_, wrong) in enumerate(fields):
        if wrong == wrong:  # not NaN
            return (
                f"Rank {named([rank])} computed a pass of step {wrong:.0f} several times, and one result was another: "
                f"its GPU or its memory makes mistakes. {_REMEDY.format(step=int(wrong))}"
            )
    sums = [(low, high) for low, high, _ in fields if low == low]
    if len(set(sums)) <= 1 or len(sums) < len(fields):
        return None
    common, most = Counter(sums).most_common(1)[0]
    odd = [rank for rank, one in enumerate(sums) if one != common]
    if most <= len(sums) / 2:
        odd = list(range(len(sums)))
    which = f"Rank {named(odd)} has" if len(odd) == 1 else f"The ranks {named(odd)} have"
    others = "" if len(odd) == len(sums) else ", and all others have the same"
    return (
        f"{which} other trained weights or optimizer states at step {step}{others}: bits were changed by a GPU, its "
        f"memory or a link. {_REMEDY.format(step=step)}"
    )


_REMEDY = (
    "Resume from a checkpoint before step {step} or start again, without that GPU if it happens twice "
    "(`nvidia-smi -q -d ECC`)."
)
