"""A command that is stopped leaves no rank behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.runtime import subprocesses
from tests.helpers import launch

# What `finetune parity` does, with ranks that would go on for ever and say who they are.
COMMAND = """
import sys
from finetune.runtime import command, subprocesses

def run(argv):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocesses.run([sys.executable, *launcher, *argv])

sys.exit(command.run_with_options("", sys.argv[1:], run))
"""
RANK = """
import os, sys, time
from pathlib import Path
(Path(sys.argv[1]) / f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""


@pytest.mark.process
@pytest.mark.campaign
def test_ranks_end_with_a_command_that_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(COMMAND)
    (tmp_path / "rank.py").write_text(RANK)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "command.py"), str(tmp_path / "rank.py"), str(tmp_path)],
        env=launch.environment(tmp_path),
    )
    try:
        ranks = wait_for(lambda: [int(path.read_text() or 0) for path in tmp_path.glob("rank-*")], 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        assert wait_for(lambda: [rank for rank in ranks if not alive(rank)], 2)
    finally:
        process.kill()


def test_an_error_keeps_its_problems() -> None:
    said = (
        "setting up\nerror: [rank 0] The configuration has 2 problems.\n  - a: is no key\n  - b: is no key\nW1 torchrun"
    )
    message = "[rank 0] The configuration has 2 problems.\n  - a: is no key\n  - b: is no key"
    assert subprocesses.first_error(said) == message
    assert subprocesses.first_error("Traceback (most recent call last):\n  File x") is None


def wait_for(look: Callable[[], list[int]], count: int) -> list[int]:
    """What `look` finds once it is `count` things that are not zero; within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [one for one in look() if one]
        if len(found) == count:
            return found
        os.sched_yield()
    raise AssertionError(f"{look()} after a minute")


def alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
