"""Layers' inputs in blocks of host memory: the same numbers back, and no block lost. Streams: tests/gpu."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from finetune.engine.training import host_activations
from finetune.engine.training.host_activations import HostActivations


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every block of host memory that was allocated; they have 96 bytes, 24 numbers in float32."""
    made: list[Any] = []
    empty = torch.empty

    def counted(*size: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*size, **options)
        if options.get("dtype") == torch.uint8:
            made.append(tensor)
        return tensor

    monkeypatch.setattr(host_activations, "BLOCK", 96)
    monkeypatch.setattr(host_activations.torch, "empty", counted)
    return made


def layer(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale).sin()


def run(offload: HostActivations | None, rows: int, dtype: torch.dtype, layers: int = 4) -> list[torch.Tensor]:
    """Gradients of the input and of each layer's weight."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 10, generator=generator).to(dtype).t().requires_grad_()  # no contiguous tensor
    scales = [torch.randn(10, 1, generator=generator).to(dtype).requires_grad_() for _ in range(layers)]
    y = x
    for scale in scales:
        y = layer(y, scale) if offload is None else offload(lambda y, scale=scale: layer(y, scale), y)
    return list(torch.autograd.grad(y.square().sum(), [x, *scales]))


def test_the_gradients_are_those_of_tensors_that_stay(blocks: list[Any]) -> None:
    """Of rows of any length, in blocks that are used again."""
    offload = HostActivations()

    def keep(function: Any, *inputs: Any) -> Any:
        return offload(function, *inputs, use_reentrant=False)

    for rows, dtype in ((5, torch.float32), (3, torch.bfloat16), (5, torch.float32), (1, torch.float64)):
        expected = run(None, rows, dtype)
        assert all(torch.equal(one, other) for one, other in zip(run(keep, rows, dtype), expected, strict=True))  # type: ignore[arg-type]
    gc.collect()
    assert len(blocks) == 4 * 3  # 50 numbers in float32 take three blocks in each of four layers
    assert len({id(one) for one in offload._free}) == len(blocks)


def test_the_host_has_the_only_copy_between_the_passes(blocks: list[Any]) -> None:
    """But for the last layer's input, which is needed at once."""
    offload = HostActivations()
    x = torch.ones(8, requires_grad=True)
    y, kept = x, []
    pack = offload._pack

    def noted(tensor: torch.Tensor) -> Any:
        kept.append(pack(tensor))
        return kept[-1]

    offload._pack = noted  # type: ignore[method-assign]
    for _ in range(3):
        y = offload(torch.sin, y, use_reentrant=False)
    assert [one._tensor is not None for one in kept if not isinstance(one, torch.Tensor)] == [False, False, True]
    for block in blocks:
        block.zero_()  # what is copied back is the host's
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.cos(y.new_full((8,), 1.0).sin().sin()))
