"""The inputs of recomputed layers in pinned host memory, copied while the GPU computes.

A layer's input is copied to the host during the layer's forward pass, and back during the backward pass of the layer
after it, on a stream of its own. transformers' `offload=True` copies on the stream that computes; TRL's
`OffloadActivations` synchronizes host and GPU after every micro-batch.

Host memory comes in blocks of one size, which all tensors share: rows of different lengths use the same ones again, and
torch, which rounds a pinned allocation up to a power of two, wastes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

BLOCK = 16 * 2**20  # bytes


class HostActivations:
    """A checkpoint function, (function, *inputs) -> what the function returns. One for all layers of a model.

    On a CPU it does the same without streams, which saves nothing.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._newest: weakref.ref[_Copy] | None = None  # of the layer before

    def __call__(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        with saved_tensors_hooks(self._pack, self._unpack):  # checkpoint's own hooks hide what is inside
            return checkpoint.checkpoint(function, *inputs, **options)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Copy:
        if not tensor.is_floating_point() or not tensor.numel():  # checkpoint saves an empty one too
            return tensor
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        before = self._newest() if self._newest is not None else None
        copy = _Copy(tensor.detach().contiguous(), self._free, self._stream, before)
        if before is not None:
            before.drop_original()  # only now: the copy had the time of a layer
        self._newest = weakref.ref(copy)
        return copy

    @staticmethod
    def _unpack(kept: torch.Tensor | _Copy) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        tensor = kept.take()
        if (before := kept.before()) is not None:  # needed next
            before.fetch()
        return tensor


class _Copy:
    """A tensor in host memory, and on its device from when it is fetched until it is taken.

    Memory of the device is allocated and freed in the order of the stream that computes. So that stream waits for each
    copy before it may use the memory for something else.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        free: list[torch.Tensor],
        stream: torch.cuda.Stream | None,
        before: _Copy | None,
    ) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._free, self._stream = free, stream if tensor.is_cuda else None
        self._before = None if before is None else weakref.ref(before)
        count = -(-tensor.nbytes // BLOCK)
        while len(free) < count:
            free.append(torch.empty(BLOCK, dtype=torch.uint8, pin_memory=tensor.is_cuda))
        self._blocks = [free.pop() for _ in range(count)]
        self._tensor: torch.Tensor | None = tensor
        self._done = self._copy(tensor, to_host=True)

    def before(self) -> _Copy | None:
        """That of the layer before, if it still exists."""
        return None if self._before is None else self._before()

    def fetch(self) -> None:
        """Begin to copy the tensor to its device, if it is not there."""
        if self._tensor is None:
            self._tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._done = self._copy(self._tensor, to_host=False)

    def take(self) -> torch.Tensor:
        """The tensor, complete for what is computed next."""
        self.fetch()
        tensor, self._tensor = self._tensor, None
        self._wait()
        assert tensor is not None
        return tensor

    def drop_original(self) -> None:
        """Free the device's memory; the host has the tensor."""
        self._wait()
        self._tensor = None

    def _copy(self, tensor: torch.Tensor, *, to_host: bool) -> torch.Event | None:
        pieces = tensor.view(-1).view(torch.uint8).split(BLOCK)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for block, piece in zip(self._blocks, pieces, strict=True):
                host = block[: len(piece)]
                (host if to_host else piece).copy_(piece if to_host else host, non_blocking=True)
        return None if self._stream is None else self._stream.record_event()

    def _wait(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def __del__(self) -> None:
        if self._tensor is not None:  # of a backward pass that was given up
            self._wait()
        self._free.extend(self._blocks)  # what is copied next waits for what is copied now: there is one stream
