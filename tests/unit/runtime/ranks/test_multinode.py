"""Ranks that no launcher brings together: two processes, each as on a machine of its own."""

from __future__ import annotations

import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers import launch, warm

SECONDS = 120


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


def ran(rank: int, port: int, cache: Path, then: str = "pass") -> subprocess.CompletedProcess[str]:
    """A rank on a machine of its own, without a launcher that waits for the others."""
    given = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    env = launch.environment(cache, **given, MASTER_ADDR="127.0.0.2", MASTER_PORT=str(port))
    code = ["-c", MEET.replace("THEN", then)]
    return warm.server("transformers").run(code, ranks=1, env=env, cwd=cache, timeout=SECONDS, merged=True)


@pytest.mark.process
@pytest.mark.parametrize("early", [False, True])
def test_two_machines_meet_and_end_together(early: bool, tmp_path: Path) -> None:
    """With a rank that fails before it joins the other, or none."""
    port = unused_port()
    fails = "failures.ANNOUNCE_SECONDS = 60.0; raise UserError('no such file')"
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(ran, (0, 1), [port] * 2, [tmp_path] * 2, ("pass", fails if early else "pass")))
    printed = [rank.stdout for rank in ranks]
    assert [rank.returncode for rank in ranks] == ([1, 2] if early else [0, 0]), printed
    assert not any("Traceback" in text for text in printed), printed
    assert ("error: [rank 0] rank 1 on" in printed[0]) == early and ("no such file" in printed[0]) == early
    assert not early or "error: [rank 1] no such file" in printed[1]
