"""What a process is doing, read by another one."""

from __future__ import annotations

import os

import pytest

from finetune.runtime.ranks import activity


def test_the_activity_of_a_process_can_be_read_without_its_help() -> None:
    descriptor = activity.share()
    if descriptor is None:
        pytest.skip("this system has no such memory")
    activity.enter("forward", 12)
    found = activity.read_from_process(os.getpid(), descriptor)
    assert found is not None and found == activity.current() and (found.phase, found.step) == ("forward", 12)
    assert activity.read_from_process(os.getpid(), 10**6) is None
    os.close(descriptor)
