"""A process group that the ranks can train in."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from finetune.errors import UserError
from finetune.runtime.ranks import distributed, process_group

pytestmark = pytest.mark.usefixtures("no_launcher")


def test_a_process_group_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsloth can switch accelerate's distributed set-up off: each rank then trains alone, without an error."""
    import accelerate

    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    distributed.ranks.cache_clear()
    monkeypatch.setattr(accelerate, "PartialState", lambda **_: SimpleNamespace(num_processes=1))
    with pytest.raises(UserError, match="started 2 processes, but the process group has 1"):
        process_group.start(cpu=True, timeout_seconds=60)


def test_gloo_uses_the_network_between_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(process_group.machines, "route_to", lambda host: ("ib0", "10.0.0.2"))
    process_group.choose_gloo_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")  # the user's
    process_group.choose_gloo_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
