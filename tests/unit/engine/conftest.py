"""Process groups of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    """A gloo group of this process alone, which FSDP2 shards over like any other."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
