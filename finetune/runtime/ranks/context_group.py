"""The ranks that share each row (`training.context_parallel`), and the collectives between them.

Of W ranks, neighbors share rows: rank r has the rows of data rank r // C, and of them part r % C.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from finetune.runtime.ranks import distributed, hang

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ContextGroup:
    """The ranks that share rows with this one, itself included; the default is this rank alone."""

    size: int = 1
    process_group: Any = None

    @property
    def part(self) -> int:
        """Which part of a row this rank has, from 0."""
        return distributed.ranks().rank % self.size

    @property
    def data_rank(self) -> int:
        """Which rows this rank has, among `data_ranks`."""
        return distributed.ranks().rank // self.size

    @property
    def data_ranks(self) -> int:
        """How many groups of ranks hold different rows."""
        return distributed.ranks().world_size // self.size

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors of equal shape, in place."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, ...] -> [size, ...]: entry i goes to the i-th rank, and what it sent to this one takes its place."""
        import torch
        import torch.distributed as dist

        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.process_group)
        return received


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
        group = dist.new_group(range(first, first + size), timeout=timeout)
        own = group if first <= me.rank < first + size else own
    return ContextGroup(size=size, process_group=own)
