"""What a report says of ranks that make no progress."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune.runtime.ranks.hang_report import TIMEOUT, Report
from finetune.runtime.ranks.rank_status import RankStatus

LIMIT = 600.0


def at(rank: int, phase: str = "backward", step: int = 7, seconds: float = LIMIT, **others: Any) -> RankStatus:
    return RankStatus(rank=rank, step=step, phase=phase, seconds=seconds, **others)


def waits(rank: int, collective: str = "nccl:all_reduce", training: bool = True, **others: Any) -> RankStatus:
    return at(rank, collective=collective, waited=LIMIT, training=training, **others)


def report(*answered: RankStatus, silent: dict[int, RankStatus | None] | None = None, kind: str = TIMEOUT) -> Report:
    silent = silent or {}
    return Report(kind=kind, world_size=len(answered) + len(silent), answered=answered, silent=silent, limit=LIMIT)


def test_the_rank_that_the_others_wait_for_is_missing() -> None:
    found = report(waits(0), at(1, "data"), waits(2))
    assert found.missing == [1] and not found.working
    assert found.sentence() == (
        "rank 1 is missing at step 7, phase data, where it has been for 600 s; ranks 0, 2 have waited 600 s for it in "
        "nccl:all_reduce at step 7, phase backward"
    )
    content = found.to_dict()
    assert content["missing"] == [{"rank": 1, "step": 7, "phase": "data", "seconds": 600.0, "answered": True}]
    assert (content["step"], content["collective"]) == (7, "nccl:all_reduce")
    assert [one["rank"] for one in content["answered"]] == [0, 1, 2]


def test_a_rank_that_does_not_answer_is_missing() -> None:
    """Its last report is older than what the wait of the others shows: it has come to their step."""
    found = report(waits(0), silent={1: at(1, "forward", step=5, old=True), 2: None})
    assert found.missing == [1, 2]
    assert [(one["rank"], one["step"], one["phase"]) for one in found.to_dict()["missing"]] == [
        (1, 7, "forward"),
        (2, 7, None),
    ]
    assert "rank 1 is missing at step 7: it does not answer and last reported step 5, phase forward" in found.sentence()
    assert "rank 2 is missing at step 7: it does not answer and never reported" in found.sentence()
    page = found.markdown()
    assert "| 1 | **no** | 5 | forward (last report) |" in page and "| 0 | yes | 7 | backward | 600 |" in page


@pytest.mark.parametrize(
    ("answered", "silent", "working"),
    [
        ([at(0, "saving", seconds=5000), waits(1, "barrier", training=False)], {}, True),
        ([at(0, "loading the model", seconds=5000), waits(1, "barrier", training=False)], {}, True),
        ([at(0, "evaluation", seconds=3), waits(1, "all_reduce", training=False)], {}, True),
        ([at(0, "evaluation", seconds=LIMIT), waits(1, "all_reduce", training=False)], {}, False),
        ([waits(1, "barrier", training=False)], {0: at(0, "saving", seconds=5000)}, False),
        ([at(0, "saving", seconds=5000), waits(1)], {}, False),
        ([waits(0, "barrier", training=False), waits(1, "barrier", training=False)], {}, False),
        ([dataclasses.replace(waits(0, "all_reduce"), waited=0.5), waits(1, "barrier", training=False)], {}, True),
    ],
    ids=["saves", "loads", "gets on", "is stuck", "saves, silent", "training waits", "all wait", "has just come"],
)
def test_who_may_be_waited_for(answered: list[RankStatus], silent: dict[int, Any], working: bool) -> None:
    assert report(*answered, silent=silent).working is working


def test_ranks_in_different_collectives_and_in_one_that_does_not_complete() -> None:
    crossed = report(waits(0, "barrier", phase="saving", step=6, training=False), waits(1))
    assert crossed.missing == []
    assert crossed.sentence() == (
        "the ranks wait for each other in different collectives: rank 0 in barrier (after step 6, phase saving); "
        "rank 1 in nccl:all_reduce (step 7, phase backward)"
    )
    assert "all ranks have waited 600 s in nccl:all_reduce" in report(waits(0), waits(1)).sentence()
