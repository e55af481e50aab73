from __future__ import annotations

import pytest

from tests.notebooks.oracle.marks import kernel_confines


@pytest.fixture(scope="session")
def kernel() -> None:
    if not kernel_confines():
        pytest.skip("the kernel confines nothing")
