"""Ranks that no launcher brings together: two processes, each as on a machine of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

SECONDS = 30


def unused_port() -> int:
    """A port for a process to listen on."""
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


MEET = """
import sys
from finetune.errors import UserError
from finetune.runtime import command
from finetune.runtime.ranks import distributed, failures, multinode, process_group

def run():
    THEN
    multinode.node.connect()
    process_group.start(cpu=True, timeout_seconds=60)
    distributed.barrier()
    process_group.finish()
    return 0

sys.exit(command.run_guarded(run))
"""


def started(rank: int, port: int, then: str = "pass") -> subprocess.Popen[str]:
    """A rank on a machine of its own, without a launcher that waits for the others."""
    given = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    given |= {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    code = MEET.replace("THEN", then)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.process
@pytest.mark.parametrize("early", [False, True])
def test_two_machines_meet_and_end_together(early: bool) -> None:
    """With a rank that fails before it joins the other, or none."""
    port = unused_port()
    fails = "failures.ANNOUNCE_SECONDS = 60.0; raise UserError('no such file')"
    ranks = [started(0, port), started(1, port, fails if early else "pass")]
    printed = [rank.communicate(timeout=4 * SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == ([1, 2] if early else [0, 0]), printed
    assert not any("Traceback" in text for text in printed), printed
    assert ("error: [rank 0] rank 1 on" in printed[0]) == early and ("no such file" in printed[0]) == early
    assert not early or "error: [rank 1] no such file" in printed[1]
