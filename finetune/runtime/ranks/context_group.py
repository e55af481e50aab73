"""The ranks that share each row (`training.context_parallel`), and the collectives between them.

Of W ranks, neighbors share rows: rank r has the rows of data rank r // C, and of them part r % C.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from finetune.runtime.clock import Clock
from finetune.runtime.ranks import activity, distributed, hang, rank_status

if TYPE_CHECKING:
    import torch


class ExchangeTimer:
    """Times the exchanges of this rank while it is `on`: on a GPU with CUDA events, without a host-device sync."""

    def __init__(self, device: str) -> None:  # "cuda" or "cpu"
        self.on = False
        self._clock = Clock(device)

    def mark(self, label: str = "") -> None:
        """An exchange begins, or with a label ends: the phase of the step that it is part of."""
        if self.on:
            self._clock.mark(label)

    def take(self) -> tuple[float, float]:
        """Seconds in forward and in backward passes since the last call. Synchronizes with the device."""
        seconds = self._clock.drain()
        self._clock.reset()
        forward, backward = (sum(one for label, one in seconds if label == phase) for phase in ("forward", "backward"))
        return forward, backward


@dataclass(frozen=True, kw_only=True)
class ContextGroup:
    """The ranks that share rows with this one, itself included; the default is this rank alone."""

    size: int = 1
    process_group: Any = None
    timer: ExchangeTimer | None = None

    @property
    def processes(self) -> int:
        """How many processes share rows, this one included: those of the ranks, unless this is a `StandIn`."""
        return self.size

    @property
    def part(self) -> int:
        """Which part of a row this rank has, from 0."""
        return distributed.ranks().rank % self.processes

    @property
    def data_rank(self) -> int:
        """Which rows this rank has, among `data_ranks`."""
        return distributed.ranks().rank // self.processes

    @property
    def data_ranks(self) -> int:
        """How many groups of ranks hold different rows."""
        return distributed.ranks().world_size // self.processes

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors of equal shape, in place."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, ...] -> [size, ...]: entry i goes to the i-th rank, and what it sent to this one takes its place."""
        import torch

        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        if self.timer is not None:
            self.timer.mark()
        self._all_to_all(received, sent)
        if self.timer is not None:
            self.timer.mark(activity.current().phase)
        return received

    def _all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        import torch.distributed as dist

        dist.all_to_all_single(received, sent, group=self.process_group)


@dataclass(frozen=True, kw_only=True)
class StandIn(ContextGroup):
    """A process that does on one device what each rank of a group does: it has a part of each row, and as many heads in
    attention, so that time and memory are a rank's. An exchange returns what was sent, so that values are wrong.
    """

    @property
    def processes(self) -> int:
        return 1

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        received.copy_(sent)


ALONE = ContextGroup()


def create(size: int, timeout_seconds: int) -> ContextGroup:
    """The group of this rank, among groups of `size` neighbors. Every rank calls it once they can communicate.

    Args:
        timeout_seconds: of its collectives, as `training.ddp_timeout`; torch's own comes after that of the hang report.
    """
    if size == 1:
        return ALONE
    import torch.distributed as dist

    me, own = distributed.ranks(), None
    timeout = timedelta(seconds=timeout_seconds + hang.BACKSTOP_SECONDS)
    for first in range(0, me.world_size, size):  # every rank takes part in creating every group
        described = f"{rank_status.SHARED_ROWS} of ranks {first} to {first + size - 1}"  # in the hang report
        group = dist.new_group(range(first, first + size), timeout=timeout, group_desc=described)
        own = group if first <= me.rank < first + size else own
    timer = ExchangeTimer("cuda" if dist.get_backend() == "nccl" else "cpu")
    return ContextGroup(size=size, process_group=own, timer=timer)
