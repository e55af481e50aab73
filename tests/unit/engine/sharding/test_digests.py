"""Digests of frozen weights before and after they are gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from finetune.engine.sharding import (
    digests,
    shard,
)
from tests.helpers.layers import Model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_a_digest_tells_every_changed_byte(dtype: torch.dtype) -> None:
    """Also where the bytes do not fill whole words, and where two words change places."""
    content = torch.randint(0, 256, (14 if dtype != torch.float32 else 16,), dtype=torch.uint8)
    before = digests.digest(content.view(dtype))
    for place in range(len(content)):
        other = content.clone()
        other[place] ^= 1
        assert digests.digest(other.view(dtype)) != before
    words = torch.arange(1, 9, dtype=torch.int32)
    assert digests.digest(words) != digests.digest(words.flip(0))
    assert digests.digest(words) == sum(value * odd for value, odd in zip(range(1, 9), range(1, 17, 2), strict=True))


@pytest.mark.usefixtures("one_rank_group")
def test_frozen_weights_that_are_gathered_with_other_bytes_are_named() -> None:
    """On CUDA, torch's copy for the all-gather makes one pattern of all NaN of a 16-bit type."""
    model = Model(tied=False)
    model.layers.requires_grad_(False)
    packed = torch.tensor([0x7F86, 0x7F95] * 8, dtype=torch.int16).view(torch.bfloat16).view(4, 4)
    layer: Any = model.layers[1]
    layer.linear.register_parameter("weight", nn.Parameter(packed, requires_grad=False))
    shard.apply(model, shard.mesh("cpu"), torch.float32)
    assert digests.changed_weights(model) == ()
    own = layer.linear.weight.to_local()
    own.view(torch.int16).copy_(torch.full((4, 4), 0x7FFF, dtype=torch.int16))
    assert digests.changed_weights(model) == ("layers.1.linear.weight",)
    assert isinstance(layer.linear.weight, DTensor)  # freed again
