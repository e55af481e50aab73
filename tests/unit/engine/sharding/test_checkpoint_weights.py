"""A saved adapter is compared with what the ranks hold."""

from __future__ import annotations

import pytest

from finetune.engine.sharding import (
    checkpoint_weights,
)
from finetune.errors import RunError


def test_an_adapter_with_rows_of_zeros_is_not_saved_whole() -> None:
    checkpoint_weights.check_adapter(80, 80)
    with pytest.raises(RunError, match="the ranks hold 80 nonzero elements, the file 10"):
        checkpoint_weights.check_adapter(80, 10)
