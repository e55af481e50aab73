"""Tests of finetune/doctor/copies.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.config import Config
from finetune.doctor import checks, copies
from tests.helpers.doctor import copied


def test_copies_between_all_pairs_are_compared_byte_by_byte() -> None:
    """Three devices that lose, change, or refuse what is sent."""

    def send(source: str, target: str, sent: torch.Tensor) -> torch.Tensor:
        received = sent.clone()
        if (source, target) == ("cuda:0", "cuda:2"):
            received[5:8] ^= 1
        if (source, target) == ("cuda:2", "cuda:1"):
            raise RuntimeError("peer access is not supported")
        return received

    found = {(one.source[-1], one.target[-1]): one for one in copies.compare(["cuda:0", "cuda:1", "cuda:2"], send)}
    assert set(found) == {(a, b) for a in "012" for b in "012" if a != b}
    assert {pair: one.wrong for pair, one in found.items() if one.wrong != 0} == {("0", "2"): 3, ("2", "1"): None}
    assert found["2", "1"].error == "RuntimeError: peer access is not supported"
    assert copies.compare(["cuda:0"], send) == []


def test_a_copy_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own copies, on the CPU: every byte arrives, or none where the copy is left out."""
    monkeypatch.setattr(copies, "BYTES", 4096)
    assert [one.wrong for one in copies.compare(["cpu", "cpu"])] == [0, 0]
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)
    assert [one.wrong for one in copies.compare(["cpu", "cpu"])] == [4096, 4096]


@pytest.mark.parametrize(
    ("made", "disabled", "state", "words"),
    [
        ([copied("cuda:0", "cuda:1")], None, "ok", "1 copy of 16 MiB, every byte arrived"),
        (
            [copied("cuda:0", "cuda:1"), copied("cuda:1", "cuda:0", 1234)],
            None,
            "stop",
            "of 16,777,216 bytes from cuda:1 to cuda:0, 1,234 arrive changed; set NCCL_P2P_DISABLE=1",
        ),
        ([copied("cuda:0", "cuda:1", 1)], "1", "warning", "NCCL_P2P_DISABLE=1 keeps NCCL from such copies"),
        ([copied("cuda:0", "cuda:1", None, "no access")], None, "unknown", "cuda:0 to cuda:1: no access"),
    ],
)
def test_bytes_that_change_on_their_way_would_stop_a_run(
    made: list[dict[str, Any]], disabled: str | None, state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    if disabled:
        monkeypatch.setenv("NCCL_P2P_DISABLE", disabled)
    got, reason = checks.CHECKS["GPU copies"](Config(), {"copies": made}) or ("", "")
    assert got == state and words in reason
    assert checks.CHECKS["GPU copies"](Config(), {"copies": []}) is None
