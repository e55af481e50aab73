"""Tests of finetune/bench/comm.py."""

from __future__ import annotations

import pytest

from finetune.bench import comm
from finetune.errors import UserError
from finetune.runtime.machine import hardware
from tests.helpers.bench import machine, on_cpu


@pytest.mark.parametrize(
    ("collective", "ranks", "bus"),  # GB/s of 1 GB in 1 s, by the text of nccl-tests' PERFORMANCE.md
    [("all_reduce", 2, 1.0), ("all_reduce", 8, 1.75), ("reduce_scatter", 8, 0.875), ("all_gather", 4, 0.75)]
    + [("broadcast", 2, 1.0), ("broadcast", 8, 1.0), ("all_to_all", 4, 0.75)],
)
def test_bandwidths_are_those_of_nccl_tests(collective: str, ranks: int, bus: float) -> None:
    assert comm.bandwidths(collective, 10**9, 1.0, ranks) == pytest.approx({"algbw_gb_s": 1.0, "busbw_gb_s": bus})


def test_settings_worth_trying_by_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {one.name: one for one in comm.variants(machine(monkeypatch, 4, 18))}
    assert {"peer access off", "Ring", "Tree", "Simple", "LL", "LL128", "buffer 32 MiB"} < set(tried)
    assert all(one.environment["NCCL_NVLS_ENABLE"] == "0" for one in tried.values())  # it stays off
    assert tried["peer access off"].environment["NCCL_P2P_DISABLE"] == "1"
    assert tried["Tree"].collectives == ("all_reduce",)  # no other has that algorithm

    bridge = {one.name: one for one in comm.variants(machine(monkeypatch, 2, "PHB", peers=False))}
    assert bridge["as advised"].environment == {"NCCL_P2P_DISABLE": "1"}
    assert bridge["peer access left to NCCL"].environment == {"NCCL_P2P_DISABLE": "0"}
    assert "LL128" not in bridge and "peer access off" not in bridge  # LL128 may corrupt data there

    for count, here in ((1, "one GPU"), (0, "no GPU")):
        found = machine(monkeypatch, 1, 18) if count else hardware.Hardware(**on_cpu())
        with pytest.raises(UserError, match=here):
            comm.variants(found)
