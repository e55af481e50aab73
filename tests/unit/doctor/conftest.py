"""Fixtures of the tests of doctor."""

from __future__ import annotations

import copy
import fcntl
import json
from typing import Any

import pytest

from tests.helpers import warm
from tests.helpers.doctor import HUB_TOKEN, KEY, SECRET, copied, examine, gpus


@pytest.fixture(scope="package")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """(text, JSON) of this machine, seen with secrets in the environment; one worker looks for all."""
    home = tmp_path_factory.mktemp("home") / "alice"
    variables = {"HF_TOKEN": HUB_TOKEN, "NCCL_SECRET_TOKEN": SECRET, "MY_API_KEY": "0123456789abcdef"}
    variables |= {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{home}/{SECRET}/nccl.log", "UNRELATED": "not to be shown"}
    variables["TORCH_SHOW"] = f"url=https://me:pass@host key={KEY}, 0123456789abcdef"
    with (warm.session() / "doctor").open("a+") as found:
        fcntl.flock(found, fcntl.LOCK_EX)
        found.seek(0)
        if not (kept := found.read()):
            done = examine(home, "--json", str(home / "report.json"), **variables)
            assert done.returncode == 0, done.stdout + done.stderr
            found.write(kept := json.dumps([done.stdout, json.loads((home / "report.json").read_text())]))
    return tuple(json.loads(kept))


@pytest.fixture
def two_gpus(healthy: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """What `examine` would have found on a machine with two H200s."""
    found = copy.deepcopy(healthy[1])
    found |= {"devices": gpus(2), "driver_gpus": 2}
    found["copies"] = [copied("cuda:0", "cuda:1"), copied("cuda:1", "cuda:0")]
    return found
