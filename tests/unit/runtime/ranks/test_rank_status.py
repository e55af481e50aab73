"""What a rank is doing, by its own account."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.runtime.ranks import rank_status


def test_the_oldest_collective_of_the_training_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of other groups, nor those that have completed; by this process's clock."""

    def entry(number: int, group: str = "default_pg", retired: bool = False) -> dict[str, Any]:
        return {
            "record_id": number,
            "profiling_name": f"nccl:{number}",
            "process_group": ["0", group],
            "retired": retired,
            "state": "scheduled",
        }

    entries = [entry(1, retired=True), entry(2, "undefined"), entry(3), entry(4)]
    monkeypatch.setattr(rank_status, "recorded_collectives", lambda: entries)
    clock = [100.0]
    monkeypatch.setattr(rank_status.time, "monotonic", lambda: clock[0])
    pending = rank_status.PendingCollectives()
    assert pending.oldest() == ("nccl:3", 0.0)
    clock[0] = 130.0
    entries.append(entry(5))
    assert pending.oldest() == ("nccl:3", 30.0)
    entries[2] = entry(3, retired=True)
    entries[3] = entry(4, retired=True)
    assert pending.oldest() == ("nccl:5", 0.0)
    entries[:] = [entry(6, "context_parallel of ranks 2 to 3")]
    assert pending.oldest() == ("nccl:6 (context_parallel of ranks 2 to 3)", 0.0)  # whom the rank shares its rows with
