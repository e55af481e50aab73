"""When gradients are views of DDP's buckets, and when the first buckets are freed (docs/defects.md, D8 and D9)."""

from __future__ import annotations

import functools

import torch

from finetune.runtime.ranks import distributed


class DdpBuckets:
    """What happens once per run to the buckets in which DDP reduces gradients. Models without DDP are left alone."""

    def __init__(self) -> None:
        self._hold_gradients = self._first_freed = False

    def before_micro_batch(self, model: torch.nn.Module, *, reduces: bool) -> None:
        """Under accumulation: make the gradients views of the buckets (D9).

        A micro-batch that does not reduce adds to an existing gradient; if there is none, it allocates one outside the
        buckets. So the run's first micro-batch reduces as well, which leaves views. That step's last micro-batch then
        averages the already averaged gradient again, which does not change it. From then on gradients are zeroed in
        place.

        Args:
            reduces: whether this micro-batch is the last one of its step.
        """
        if reduces or self._hold_gradients or not getattr(model, "gradient_as_bucket_view", False):
            return
        model.require_backward_grad_sync = True  # type: ignore[assignment]  # `no_sync` resets it on exit
        model.zero_grad = functools.partial(model.zero_grad, set_to_none=False)
        self._hold_gradients = True

    def after_micro_batch(self, model: torch.nn.Module) -> None:
        """After the first micro-batch that reduces: make NCCL release the buckets (D8).

        DDP replaces them before the next reduction. On a rank whose host runs ahead of its GPU, NCCL's process group
        would still hold the old ones, as much memory as all gradients. Costs one host-device sync.
        """
        if not self._first_freed and getattr(model, "require_backward_grad_sync", False):
            distributed.drain_nccl_work()
            self._first_freed = True
