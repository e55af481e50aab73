"""The mark of tests that run a program confined: long ones, on a kernel that can."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.oracle import sandbox


def confined(test: Callable[..., Any]) -> Callable[..., Any]:
    """A campaign that starts processes, skipped if this kernel confines nothing."""
    marks = (pytest.mark.process, pytest.mark.campaign, pytest.mark.usefixtures("kernel"))
    for mark in marks:
        test = mark(test)
    return test


@functools.cache
def kernel_confines() -> bool:
    """Whether this kernel confines a process, asked in a process that ends."""
    program = f"import sys; sys.path.append({str(Path(sandbox.__file__).parent)!r})\nimport sandbox\n"
    program += "print(sandbox.confine('/tmp').complete)"
    command = [sys.executable, "-I", "-S", "-c", program]
    return sys.platform == "linux" and sandbox.run(command, seconds=60, output=99).output.strip() == b"True"
