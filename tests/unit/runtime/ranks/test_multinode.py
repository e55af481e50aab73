"""Ranks that no launcher brings together: two processes, each as on a machine of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

SECONDS = 30


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port at which nothing listens, and which nobody else gets meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.2", 0))
        yield held.getsockname()[1]


def unused_port() -> int:
    """A port for a process to listen on."""
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


MEET = """
import sys
from finetune.runtime import command
from finetune.runtime.ranks import distributed, multinode, process_group

def run():
    multinode.start(int(sys.argv[1]))
    process_group.start(cpu=True, timeout_seconds=60)
    distributed.barrier()
    process_group.finish()
    return 0

sys.exit(command.run_guarded(run))
"""


def started(rank: int, port: int, seconds: int, **changed: str) -> subprocess.Popen[str]:
    """A rank on a machine of its own, without a launcher that waits for the others."""
    given = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    given |= {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"} | changed
    env = {name: value for name, value in (os.environ | given).items() if value}
    return subprocess.Popen(
        [sys.executable, "-c", MEET, str(seconds)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.campaign
@pytest.mark.process
def test_two_processes_of_which_one_has_another_port() -> None:
    """Both end, each with a sentence and without a traceback."""
    port = unused_port()
    with free_port() as other:
        ranks = [started(0, port, 1), started(1, other, 1)]
        printed = [rank.communicate(timeout=4 * SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 2], printed
    assert f"error: [rank 0] Rank 1 did not reach 127.0.0.2:{port} within 1 s (training.join_timeout)" in printed[0]
    assert f"cannot reach rank 0 at 127.0.0.2:{other}, tried for 1 s (training.join_timeout)" in printed[1]
    assert not any("Traceback" in text for text in printed)


@pytest.mark.process
def test_a_launcher_that_does_not_count_the_ranks_of_a_machine() -> None:
    """The second machine can know it; the first one takes the run for one on a single machine, and waits as long."""
    port = unused_port()
    ranks = [started(rank, port, 1, LOCAL_WORLD_SIZE="") for rank in (0, 1)]
    printed = [rank.communicate(timeout=4 * SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 2], printed
    assert f"error: [rank 0] Rank 1 did not reach 127.0.0.2:{port} within 1 s (training.join_timeout)" in printed[0]
    assert "error: RANK=1 and LOCAL_RANK=0 are of a run on several machines, but LOCAL_WORLD_SIZE is not" in printed[1]
